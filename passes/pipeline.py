"""Runs the passes in their order."""

import logging
from collections.abc import Callable
from functools import partial

from bcg_compiler.breaks import KINDS
from bcg_compiler.errors import OptionError, nearest
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.options import Options
from bcg_compiler.passes.bind_pp_proxies import bind_pp_proxies
from bcg_compiler.passes.fuse_mla_bmm import fuse_mla_bmm
from bcg_compiler.passes.hoist_plans import hoist_plans
from bcg_compiler.passes.join_side_streams import join_side_streams
from bcg_compiler.passes.mark_a2a_moe import mark_a2a_moe
from bcg_compiler.passes.mark_attention import mark_attention
from bcg_compiler.passes.mark_break_functions import mark_break_functions
from bcg_compiler.passes.mark_cp_gather_tail import mark_cp_gather_tail
from bcg_compiler.passes.mark_dsa_indexer import mark_dsa_indexer
from bcg_compiler.passes.mark_logits_gate import mark_logits_gate
from bcg_compiler.passes.mark_rules import mark_rules
from bcg_compiler.passes.mark_uncapturable import mark_uncapturable
from bcg_compiler.passes.result import PassResult

log = logging.getLogger("bcg_compiler.passes")


#: What ``options={"mark": [...]}`` takes: every kind of break that can be known without its declaration.
MARKED = tuple(kind for kind in KINDS if kind not in ("eager_break", "cp_gather_tail"))

Pass = Callable[[AnnotatedGraph], PassResult]


def pipeline(options: Options) -> dict[str, Pass]:
    """The passes in the order they run, configured by ``options``."""
    return {
        "bind_pp_proxies": bind_pp_proxies,
        "hoist_plans": partial(hoist_plans, padded=options.ladder is not None),
        "mark_break_functions": mark_break_functions,
        "mark_attention": partial(mark_attention, wanted="attention" in options.mark),
        "mark_logits_gate": partial(mark_logits_gate, wanted="logits_gate" in options.mark),
        "mark_dsa_indexer": partial(mark_dsa_indexer, wanted="dsa_indexer" in options.mark),
        "mark_a2a_moe": partial(mark_a2a_moe, wanted="a2a_moe" in options.mark),
        "mark_rules": partial(mark_rules, rules=options.breaks),
        "mark_cp_gather_tail": mark_cp_gather_tail,
        "join_side_streams": partial(join_side_streams, wanted=options.dual_stream),
        "mark_uncapturable": mark_uncapturable,
        "fuse_mla_bmm": fuse_mla_bmm,
    }


def names() -> tuple[str, ...]:
    """The names of all passes, in their order: what ``options={"disable_passes": [...]}`` takes."""
    return tuple(pipeline(Options()))


def run_passes(
    graph: AnnotatedGraph, options: Options, seen: Callable[[AnnotatedGraph, PassResult], None] | None = None
) -> tuple[PassResult, ...]:
    """Run every pass that is not disabled; ``seen`` is called behind each one, with the graph as it left it.

    Raises ``OptionError`` for a disabled name that is no pass, and for a part to mark that nobody knows.
    """
    passes = pipeline(options)
    for name in options.disable_passes:
        if name not in passes:
            raise OptionError(f"Option 'disable_passes' names {name!r}, which is no pass. {nearest(name, passes)}")
    for kind in options.mark:
        if kind not in MARKED:
            raise OptionError(f"Option 'mark' names {kind!r}, which no pass marks. {nearest(kind, MARKED)}")
    results = []
    for name, run in passes.items():
        if name in options.disable_passes:
            result = PassResult(name, 0, ("disabled by option",))
        else:
            result = run(graph)
            log.info("%s: %d changes", result.name, result.changes)
        results.append(result)
        if seen is not None:
            seen(graph, result)
    return tuple(results)
