"""From when to when memory is needed: what the nodes of a step allocate, and the bridges between steps.

A storage is needed as long as any value over it is: views, items of tuples, and what may be the same tensor. Values go
after the node that uses them last, as the emitted code deletes them (``lower/emit.py``).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.plan.plan import Allocation, LiveRange, Plan, Step
from bcg_compiler.plan.structure import SymbolNames


def with_lifetimes(plan: Plan, graph: AnnotatedGraph, symbols: SymbolNames) -> Plan:
    """``plan`` with the allocations of its steps and the live ranges of its bridges."""
    lifetimes = _Lifetimes(plan, graph, symbols)
    return replace(
        plan,
        steps=tuple(replace(step, allocations=tuple(lifetimes.allocations(step))) for step in plan.steps),
        bridge_ranges=tuple(map(lifetimes.bridge_range, plan.bridges)),
    )


class _Lifetimes:
    """Looks at storages by their roots, and names steps by their index."""

    def __init__(self, plan: Plan, graph: AnnotatedGraph, symbols: SymbolNames) -> None:
        self._graph = graph
        self._plan = plan
        self._symbols = symbols
        self._facts = {facts.ordinal: facts for facts in graph.facts.values()}
        ordinals = {node: facts.ordinal for node, facts in graph.facts.items()}
        self._given = {
            facts.ordinal: [ordinals[n] for n in node.all_input_nodes if n in ordinals]
            for node, facts in graph.facts.items()
        }
        self._made_in = {o: step.index for step in plan.steps for o in step.outputs}
        self._freed_after = {o: step.index for step in plan.steps for o in step.frees}
        self._returned = self._roots(plan.outputs)
        self._fresh: dict[int, set[int]] = {}  # by group: an item of a tuple is as fresh as the tuple
        for facts in self._facts.values():
            self._fresh.setdefault(facts.group, set()).update(facts.fresh)
        # By root: the outputs of steps over it, and the last step that does something with it.
        self._over: dict[int, list[int]] = {}
        self._read: dict[int, int] = {}
        self._read_by_break: dict[int, int] = {}
        self._written: dict[int, int] = {}
        for step in plan.steps:
            self._see(step)

    def _see(self, step: Step) -> None:
        self._read.update(dict.fromkeys(self._roots(step.inputs), step.index))
        for ordinal in step.outputs:
            for root in self._facts[ordinal].results:
                self._over.setdefault(root, []).append(ordinal)
        for node in step.nodes:
            facts = self._facts[node.ordinal]
            self._written.update(dict.fromkeys(facts.writes, step.index))
            if step.kind == "break" and node.ordinal not in step.fixed:
                self._read_by_break.update(dict.fromkeys(facts.reads, step.index))

    def allocations(self, step: Step) -> Iterator[Allocation]:
        """The storages of the graph's device that ``step`` allocates, in order."""
        last_use = self._last_uses(step)
        kept = self._roots((*step.outputs, *step.fixed))
        for position, node in enumerate(step.nodes):
            for storage in self._facts[node.ordinal].allocates:
                if storage.device != self._graph.device:
                    continue
                survives = storage.root in kept
                yield Allocation(
                    bytes=self._symbols.text(storage.bytes),
                    born=position,
                    dies=None if survives else last_use.get(storage.root, position),
                    lasts=storage.lasts,
                    freed=self._freed(storage.root) if survives else None,
                )

    def _last_uses(self, step: Step) -> dict[int, int]:
        """For each root the position of the last node of ``step`` that uses a value of this step over it."""
        found: dict[int, int] = {}
        own: set[int] = set()
        for position, node in enumerate(step.nodes):
            own.add(node.ordinal)
            used = [node.ordinal, *(o for o in self._given[node.ordinal] if o in own)]
            found.update(dict.fromkeys(self._roots(used), position))
        return found

    def _freed(self, root: int) -> int | None:
        """The step after which no value over ``root`` is needed; ``None`` if that is the end."""
        over = self._over.get(root, [])
        if root in self._read_by_break or not all(o in self._freed_after for o in over):
            return None
        return max((self._freed_after[o] for o in over), default=None)

    def bridge_range(self, ordinal: int) -> LiveRange:
        """From the break that makes a bridge to the last step that reads it, or a value over it.

        To the end if a later break reads it, if it is written later, or if it is returned.
        """
        first, end = self._made_in[ordinal], len(self._plan.steps) - 1
        roots = self._own_roots(ordinal)
        touched = (last.get(root, -1) > first for last in (self._read_by_break, self._written) for root in roots)
        if roots & self._returned or any(touched):
            return LiveRange(ordinal, first, end)
        return LiveRange(ordinal, first, max(self._read.get(root, first) for root in roots))

    def _own_roots(self, ordinal: int) -> frozenset[int]:
        """What a bridge lives in, without what it only may share with the arguments of its break: it is a copy."""
        facts = self._facts[ordinal]
        return facts.results & self._fresh[facts.group] or facts.results

    def _roots(self, ordinals: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(self._facts[o].results for o in ordinals if o in self._facts))
