"""Whether nodes may go in front of the breaks of an indexer."""

from collections.abc import Iterable, Sequence

from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat.fake import tree_leaves
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.facts.node import WORLD


class Crossing:
    """What breaks may write, with ``weights``: nodes that no indexer writes unseen.

    A body may reach any tensor that exists outside of the call, and those that breaks have made; parameters it is taken
    not to write. What is declared an indexer writes its key cache and its ``mutates_args``, and no weight of a matmul
    either: that is what a declaration as ``dsa_indexer`` or ``logits_gate`` means.
    """

    def __init__(self, graph: AnnotatedGraph, weights: Iterable[Node]) -> None:
        self._graph = graph
        self._outside = graph.outside - graph.parameters - self._roots(weights)
        self._opaque = [facts for facts in graph.facts.values() if facts.opaque]

    def allows(self, moved: Sequence[Node], crossed: Sequence[Node]) -> bool:
        """Whether ``moved`` may go in front of ``crossed``: it is pure, and nothing of it is made or touched there."""
        facts = self._graph.facts
        first = facts[crossed[0]]
        reachable = self._outside.union(*(f.results for f in self._opaque if f.ordinal < first.ordinal))
        for node in moved:
            own = facts[node]
            if own.mode != first.mode or own.group != own.ordinal or own.opaque or any(root < 0 for root in own.writes):
                return False
            if not set(node.all_input_nodes).isdisjoint(crossed):
                return False
            read = self._roots(node.all_input_nodes)
            for other in crossed:
                if read & self._may_write(other, reachable) or own.writes & (facts[other].reads | facts[other].writes):
                    return False
        return True

    def _may_write(self, node: Node, reachable: frozenset[int]) -> frozenset[int]:
        writes = self._graph.facts[node].writes
        if isinstance(node.target, BoundBreak):
            # Not what its facts say: if the graph writes into any input, these count all inputs and buffers as one.
            spec = node.target.spec
            given = [value for name, value in spec.named(node.args, node.kwargs) if name in spec.mutates_args]
            return self._roots(n for n in tree_leaves(given) if isinstance(n, Node)) | reachable
        return writes | reachable if WORLD in writes else writes

    def _roots(self, nodes: Iterable[Node]) -> frozenset[int]:
        known = (self._graph.producer_facts(node) for node in nodes)
        return frozenset().union(*(facts.results for facts in known if facts is not None))
