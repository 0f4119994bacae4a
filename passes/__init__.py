"""Passes over an annotated graph, one file each. Imported as ``bcg_compiler.passes``.

``bind_pp_proxies``       inputs from the pipeline stage before: slots of the token axis
``mark_break_functions``  calls of ``@eager_break`` functions and ``call_with_break``
``mark_attention``        attention, the weights projection of a sparse indexer, the indexer itself, expert-parallel
``mark_logits_gate``      mixture of experts: where ``options={"mark": [...]}`` asks for it, as a graph could hold it
``mark_dsa_indexer``
``mark_a2a_moe``
``mark_rules``            what the user's rules name (``options={"breaks": [...]}``)
``mark_cp_gather_tail``   the gather at the end of a context-parallel graph, with all that follows from it
``join_side_streams``     lets work on a second stream be captured, where ``options={"dual_stream": True}`` asks for it
``mark_uncapturable``     what the facts of the graph prove uncapturable
``fuse_mla_bmm``          takes the matmul of absorbed MLA out from between the breaks of indexer and attention

Each is ``verb_object(graph, *, config) -> PassResult``: it reads facts and never global state, and either marks nodes
or rewrites the graph. Earlier marks win, so that a break shows the most deliberate reason.
"""

from bcg_compiler.passes.pipeline import names, run_passes
from bcg_compiler.passes.result import PassResult

__all__ = ["PassResult", "names", "run_passes"]
