"""Makes the gather at the end of a context-parallel graph, and all that follows from it, its tail: one eager step.

Note [What may stand behind a gather]
    Breaks keep their order, so whatever is captured behind the gather would be a segment of its own between its tail
    and what comes after. The partitioner moves a node in front of the gather where a break behind needs it, and it
    neither takes nor touches what breaks from the gather on make or may write: all that is seen outside of the call,
    and the order of random numbers. Any other node that a graph could hold would stay behind, and the tail would not be
    the end.
"""

from collections.abc import Collection, Iterable

from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.result import PassResult

REASON = "cp_gather_tail"


def mark_cp_gather_tail(graph: AnnotatedGraph) -> PassResult:
    """Mark what follows from a break declared ``cp_gather_tail``, be it by what it returns or by what is written.

    The plan then ends with one eager step, on the rows of the whole batch, which are no rows of a bucket. Where
    something else stands behind the gather that could be captured, nothing is marked, and ``notes`` say what it is
    (``work_behind``). See Note [What may stand behind a gather].
    """
    nodes = graph.nodes
    gathers = [place for place, node in enumerate(nodes) if _gathers(node)]
    if not gathers:
        return PassResult("mark_cp_gather_tail", 0)
    gather, behind = graph.facts[nodes[gathers[0]]], nodes[gathers[0] :]
    tail = _followers(graph, behind, [nodes[place] for place in gathers])
    if found := _stays_behind(graph, behind, tail):
        where = ", ".join(f"{graph.facts[node]}" for node in found)
        text = f"{where}: it stands behind {gather}, needs nothing of it, and could be captured: compute it before"
        return PassResult("mark_cp_gather_tail", 0, (f"work_behind: {text}",))
    changes = sum(graph.mark(node, REASON, f"it follows from {gather.op}: whole batch, live rows") for node in tail)
    return PassResult("mark_cp_gather_tail", changes)


def _gathers(node: Node) -> bool:
    return isinstance(node.target, BoundBreak) and node.target.spec.reason == REASON


def _followers(
    graph: AnnotatedGraph, nodes: Iterable[Node], first: Collection[Node], *, unseen: bool = False
) -> dict[Node, None]:
    """``first``, and what takes what they make or sees what they write; with ``unseen`` also what they may write."""
    found: dict[Node, None] = {}
    written: frozenset[int] = frozenset()
    for node in nodes:
        facts = graph.facts[node]
        touched = facts.reads | facts.writes
        if node in first or not found.keys().isdisjoint(node.all_input_nodes) or touched & written:
            found[node] = None
            written |= {root for root in facts.writes if unseen or root >= 0}
    return found


def _stays_behind(graph: AnnotatedGraph, behind: list[Node], tail: Collection[Node]) -> list[Node]:
    """What could be captured behind the gather, is not of the tail, and would not move before it."""
    captured = [n for n in behind if n not in tail and not _is_eager(graph, n)]
    eager = set(behind).difference(captured)
    bound = _followers(graph, behind, eager, unseen=True)
    needed = set(eager)
    for node in reversed(behind):
        if not needed.isdisjoint(node.users):
            needed.add(node)
    return [n for n in captured if graph.facts[n].kernels and (n in bound or n not in needed)]


def _is_eager(graph: AnnotatedGraph, node: Node) -> bool:
    return node in graph.marks or bool(graph.facts[node].uncapturable)
