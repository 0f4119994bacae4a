"""Cuts a graph into steps.

Note [How the cut is made]
    The graph is a DAG: an edge where a unit needs another's result, and where two touch the same storage or state and
    one of them writes. Breaks keep their order among themselves, since a body may do what no graph shows.

    Each unit gets a level: segments are even, breaks odd, and a unit is never below what it depends on. Two breaks can
    run as one step exactly if no capturable unit lies on a path between them, so each break takes the lowest level that
    its dependencies allow: that joins as many as can be joined. A capturable unit then stays where the program has it,
    behind the last break before it, unless that break was joined with one that needs the unit: then it moves up. One
    that a joined break would have to wait for moves behind it. Nothing moves without need: moving a value's producer
    far from its readers costs memory.

    A unit that writes what exists outside the call, draws random numbers or sets state stays between the breaks that
    stand around it. Every other unit may cross a break: edges already say what it must not cross.

    Last, segments that are not worth a launch join the breaks beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import networkx as nx


@dataclass(frozen=True)
class Unit:
    """What stays together: one node; a tuple's producer with its items; a functorch region.

    ``ordinal``  position in the program, unique
    ``kind``     ``segment`` (capturable), ``break``, or ``host``: arithmetic on numbers that no recording may freeze
    ``needs``    ordinals of the units whose results it takes
    ``reads``, ``writes``  the storages and states it touches
    ``pinned``   it must not cross a break
    """

    ordinal: int
    kind: Literal["segment", "break", "host"]
    kernels: int = 0
    needs: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    pinned: bool = False


@dataclass(frozen=True)
class Cut:
    """One step: its units in program order.

    ``absorbed``  those that only joined a break because their segment was too small
    ``moved``     those that left their place so that breaks could join
    """

    kind: Literal["segment", "break"]
    units: tuple[int, ...]
    absorbed: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()


def partition(units: Sequence[Unit], min_segment_kernels: int) -> list[Cut]:
    """The steps, in order. ``units`` are in program order, each after all that it needs."""
    levels, moved = _levels(units, dependencies(units))
    return _cuts(units, levels, moved, min_segment_kernels)


def dependencies(units: Sequence[Unit]) -> nx.DiGraph:
    """The DAG of ordinals; each edge has a ``why``: data, effect, order or pinned."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(unit.ordinal for unit in units)
    writer: dict[int, int] = {}  # root → the last unit that wrote it
    readers: dict[int, list[int]] = {}  # root → units that read it since
    last_break: int | None = None
    waiting: list[int] = []  # pinned units since the last break
    for unit in units:
        here = unit.ordinal
        graph.add_edges_from(((other, here) for other in unit.needs), why="data")
        for root in unit.reads | unit.writes:
            if root in writer:
                graph.add_edge(writer[root], here, why="effect")
        for root in unit.writes:
            graph.add_edges_from(((other, here) for other in readers.pop(root, ()) if other != here), why="effect")
            writer[root] = here
        for root in unit.reads - unit.writes:
            readers.setdefault(root, []).append(here)
        if unit.kind == "break":
            if last_break is not None:
                graph.add_edge(last_break, here, why="order")
            graph.add_edges_from(((other, here) for other in waiting), why="pinned")
            last_break, waiting = here, []
        elif unit.pinned:
            if last_break is not None:
                graph.add_edge(last_break, here, why="pinned")
            waiting.append(here)
    return graph


def _lowest_levels(units: Sequence[Unit], graph: nx.DiGraph) -> dict[int, int]:
    """The lowest level that each unit can have."""
    lowest: dict[int, int] = {}
    for unit in units:
        odd = unit.kind != "segment"
        lowest[unit.ordinal] = max((_up(lowest[p], odd) for p in graph.predecessors(unit.ordinal)), default=int(odd))
    return lowest


def _levels(units: Sequence[Unit], graph: nx.DiGraph) -> tuple[dict[int, int], frozenset[int]]:
    """The level of every unit: breaks as low as they can be, the rest at home unless a joined break moves it; and which
    were moved.
    """
    lowest = _lowest_levels(units, graph)
    breaks = {unit.ordinal: lowest[unit.ordinal] for unit in units if unit.kind == "break"}
    last = max((lowest[unit.ordinal] for unit in units if unit.kind != "segment"), default=-1)
    highest = dict(breaks)
    for unit in reversed(units):
        if unit.kind != "break":
            odd = unit.kind == "host"
            above = (_down(highest[s], odd) for s in graph.successors(unit.ordinal))
            highest[unit.ordinal] = min(above, default=last if odd else last + 1)
    behind: dict[int, int] = {}  # level of the first break that the program has behind the unit
    nearest = last + 2
    for unit in reversed(units):
        behind[unit.ordinal] = nearest
        nearest = breaks.get(unit.ordinal, nearest)
    levels: dict[int, int] = {}
    moved: set[int] = set()
    at_home = 0  # behind the last break that the program has before the unit
    for unit in units:
        here = unit.ordinal
        if unit.kind == "break":
            levels[here] = breaks[here]
            at_home = breaks[here] + 1
        elif unit.kind == "host":
            levels[here] = highest[here]  # as late as can be, so that it joins the break that uses it
        else:
            needed = max((_up(levels[p], False) for p in graph.predecessors(here)), default=0)
            levels[here] = min(max(at_home, needed), highest[here])
            if levels[here] < at_home or levels[here] > behind[here]:
                moved.add(here)
    return levels, frozenset(moved)


def _cuts(units: Sequence[Unit], levels: dict[int, int], moved: frozenset[int], min_segment_kernels: int) -> list[Cut]:
    by_level: dict[int, list[Unit]] = {}
    for unit in units:
        by_level.setdefault(levels[unit.ordinal], []).append(unit)
    has_breaks = any(level % 2 for level in by_level)
    cuts: list[Cut] = []
    for level in sorted(by_level):
        members = by_level[level]
        kernels = sum(unit.kernels for unit in members)
        small = level % 2 == 0 and (kernels == 0 or (has_breaks and kernels < min_segment_kernels))
        ordinals = tuple(unit.ordinal for unit in members)
        if level % 2 == 0 and not small:
            cuts.append(Cut("segment", ordinals, moved=moved & set(ordinals)))
            continue
        absorbed = frozenset(ordinals) if small else frozenset()
        if cuts and cuts[-1].kind == "break":
            before = cuts.pop()
            ordinals, absorbed = tuple(sorted(before.units + ordinals)), before.absorbed | absorbed
        cuts.append(Cut("break", ordinals, absorbed))
    return cuts


def _up(level: int, odd: bool) -> int:
    """The lowest level of that parity which is not below ``level``."""
    return level if level % 2 == odd else level + 1


def _down(level: int, odd: bool) -> int:
    """The highest level of that parity which is not above ``level``."""
    return level if level % 2 == odd else level - 1
