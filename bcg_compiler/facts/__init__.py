"""What each node of a graph does, found by running the graph once on fake tensors.

``node``       the facts of one node: pure data
``collect``    runs the graph and collects the facts of all nodes
``repeats``    nodes that are equal to earlier ones, which are not run again
``roots``      storages by small numbers
``allocations``  the storages that a node allocates
``footprint``  from recorded ATen operations to kernels, syncs, effects
``known_ops``  what neither schema nor tag of an operation tells
``modes``      grad, autocast and inference state, functorch regions
``sizes``      which symbols are sizes, which are numbers, which are read from data
``rows``, ``row_rules``, ``row_proof``  whether padded rows can reach live ones
``graph``      the graph with its facts and marks: what passes work on
"""

from bcg_compiler.facts.collect import collect_facts
from bcg_compiler.facts.graph import AnnotatedGraph
from bcg_compiler.facts.node import ModeState, NewStorage, NodeFacts, Reason, RowVerdict, Source, TensorSpec

__all__ = [
    "AnnotatedGraph",
    "ModeState",
    "NewStorage",
    "NodeFacts",
    "Reason",
    "RowVerdict",
    "Source",
    "TensorSpec",
    "collect_facts",
]
