"""Makes expert-parallel mixture of experts (dispatch, experts, combine) one break; says what a declared one lacks."""

from collections import Counter

from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.passes.result import PassResult

#: The collectives that send tokens to experts and back, by a part of their name; and where all collectives live.
ALL_TO_ALL, COLLECTIVES = "all_to_all", "_c10d_functional"


def mark_a2a_moe(graph: AnnotatedGraph, *, wanted: bool) -> PassResult:
    """Mark what stands between the first and the last all-to-all of a module, both included, if ``wanted``.

    The collectives are breaks anyway, the experts between them are not: as a segment they are captured for the rows
    that one rank got at one call. A break that is declared ``a2a_moe`` is not changed: ``notes`` say which of buffer,
    stub and barrier it lacks, each of which costs something at capture or at replay.
    """
    notes = list(dict.fromkeys(note for node in graph.nodes for note in _lacks(graph, node)))
    if not wanted:
        return PassResult("mark_a2a_moe", 0, tuple(notes))
    regions = _regions(list(graph.facts.values()))
    changes = 0
    for path, (first, last) in regions.items():
        for node, facts in graph.facts.items():
            if first <= facts.ordinal <= last and not facts.host_only:
                changes += graph.mark(node, "a2a_moe", f"between dispatch and combine of {path or 'the model'}")
    if not regions:
        notes.append("no all-to-all mixture of experts: no module calls two all-to-all collectives")
    return PassResult("mark_a2a_moe", changes, tuple(notes))


def _regions(nodes: list[NodeFacts]) -> dict[str, tuple[int, int]]:
    """By module path: the ordinals of its first all-to-all and of its last collective, the wait for the last one."""
    collectives = [f for f in nodes if any(op.startswith(COLLECTIVES) for op in f.aten)]
    sends = [f for f in collectives if any(ALL_TO_ALL in op for op in f.aten)]
    count = Counter(path for f in sends for path in _paths(f))
    # Dispatch and combine may be modules of their own: the mixture of experts is the innermost one around two sends.
    homes = {path for f in sends for path in [next((p for p in reversed(_paths(f)) if count[p] > 1), None)]} - {None}
    return {
        path: (
            min(f.ordinal for f in sends if path in _paths(f)),
            max(f.ordinal for f in collectives if path in _paths(f)),
        )
        for path in sorted(p for p in homes if p is not None)
    }


def _paths(facts: NodeFacts) -> list[str]:
    return list(dict.fromkeys(["", *(path for path, _ in facts.modules)]))


def _lacks(graph: AnnotatedGraph, node: Node) -> list[str]:
    if not isinstance(node.target, BoundBreak) or node.target.spec.reason != "a2a_moe":
        return []
    spec, facts = node.target.spec, graph.facts[node]
    said = []
    if facts.specs:
        said.append("it returns its result, which each replay copies: let it write into a tensor of the forward's")
    elif any(root in graph.outside for root in facts.writes):
        said.append("it writes into memory from outside of the call: let it write into a tensor of the forward's")
    if spec.capture_stub is None:
        said.append("it has no capture_stub: what it writes is undefined while a capture runs")
    if spec.barrier is None:
        said.append("it has no barrier: ranks that take unlike time to capture may time out")
    return [f"{spec.name}: {text}" for text in said]
