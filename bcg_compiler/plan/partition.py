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

    Then, segments that are not worth a launch join the breaks beside them: what a launch costs, and what is copied
    between graphs and breaks, says ``costs``. And joining is only done if it pays. It may cut the one segment between
    two breaks in two, where nothing stands around the breaks: then the order of the program has a launch less.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bcg_compiler.plan.costs import Island, LaunchCosts


@dataclass(frozen=True)
class Unit:
    """What stays together: one node; a tuple's producer with its items; a functorch region.

    ``ordinal``  position in the program, unique
    ``kind``     ``segment`` (capturable), ``break``, or ``host``: arithmetic on numbers that no recording may freeze
    ``needs``    ordinals of the units whose results it takes
    ``reads``, ``writes``  the storages and states it touches
    ``pinned``   it must not cross a break
    ``copied``   ordinals of the caller's tensors that it takes and of results that it gives to the caller: a graph
                 needs a copy of each, at a fixed place
    """

    ordinal: int
    kind: Literal["segment", "break", "host"]
    kernels: int = 0
    needs: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    pinned: bool = False
    copied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Cut:
    """One step: its units in program order.

    ``islands``  segments that joined the break because they were too small
    ``moved``    units that left their place so that breaks could join
    """

    kind: Literal["segment", "break"]
    units: tuple[int, ...]
    islands: tuple[Island, ...] = ()
    moved: frozenset[int] = frozenset()

    @property
    def absorbed(self) -> frozenset[int]:
        """The units of all islands."""
        return frozenset().union(*(island.units for island in self.islands))


def partition(
    units: Sequence[Unit], min_segment_kernels: int | None = None, costs: LaunchCosts | None = None
) -> list[Cut]:
    """The steps, in order. ``units`` are in program order, each after all that it needs.

    A segment with fewer kernels than ``min_segment_kernels`` joins the break beside it; by ``None`` the costs decide.
    """
    costs = costs or LaunchCosts()
    joined = _cuts(units, *_levels(units, dependencies(units)), min_segment_kernels, costs)
    if not any(cut.moved for cut in joined):
        return joined
    at_home = [replace(unit, pinned=unit.kind == "segment") for unit in units]
    in_order = _cuts(units, *_levels(at_home, dependencies(at_home)), min_segment_kernels, costs)
    return min(joined, in_order, key=lambda cuts: _total(units, cuts, costs))


def dependencies(units: Sequence[Unit]) -> dict[int, set[int]]:
    """The DAG: for the ordinal of each unit those of the units that it must be behind."""
    before = {unit.ordinal: set(unit.needs) for unit in units}
    writer: dict[int, int] = {}  # root → the last unit that wrote it
    readers: dict[int, list[int]] = {}  # root → units that read it since
    last_break: int | None = None
    waiting: list[int] = []  # pinned units since the last break
    for unit in units:
        here = unit.ordinal
        earlier = before[here]
        earlier.update(writer[root] for root in unit.reads | unit.writes if root in writer)
        for root in unit.writes:
            earlier.update(readers.pop(root, ()))
            writer[root] = here
        for root in unit.reads - unit.writes:
            readers.setdefault(root, []).append(here)
        if (unit.kind == "break" or unit.pinned) and last_break is not None:
            earlier.add(last_break)
        if unit.kind == "break":
            earlier.update(waiting)
            last_break, waiting = here, []
        elif unit.pinned:
            waiting.append(here)
    return before


def _lowest_levels(units: Sequence[Unit], before: Mapping[int, Collection[int]]) -> dict[int, int]:
    """The lowest level that each unit can have."""
    lowest: dict[int, int] = {}
    for unit in units:
        odd = unit.kind != "segment"
        lowest[unit.ordinal] = max((_up(lowest[p], odd) for p in before[unit.ordinal]), default=int(odd))
    return lowest


def _levels(units: Sequence[Unit], before: Mapping[int, Collection[int]]) -> tuple[dict[int, int], frozenset[int]]:
    """The level of every unit: breaks as low as they can be, the rest at home unless a joined break moves it; and which
    were moved.
    """
    lowest = _lowest_levels(units, before)
    breaks = {unit.ordinal: lowest[unit.ordinal] for unit in units if unit.kind == "break"}
    last = max((lowest[unit.ordinal] for unit in units if unit.kind != "segment"), default=-1)
    highest = dict(breaks)
    behind: dict[int, list[int]] = {unit.ordinal: [] for unit in units}
    for here, earlier in before.items():
        for ordinal in earlier:
            behind[ordinal].append(here)
    for unit in reversed(units):
        if unit.kind != "break":
            odd = unit.kind == "host"
            above = (_down(highest[s], odd) for s in behind[unit.ordinal])
            highest[unit.ordinal] = min(above, default=last if odd else last + 1)
    next_break: dict[int, int] = {}  # level of the first break that the program has behind the unit
    nearest = last + 2
    for unit in reversed(units):
        next_break[unit.ordinal] = nearest
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
            needed = max((_up(levels[p], False) for p in before[here]), default=0)
            levels[here] = min(max(at_home, needed), highest[here])
            if levels[here] < at_home or levels[here] > next_break[here]:
                moved.add(here)
    return levels, frozenset(moved)


def _cuts(
    units: Sequence[Unit],
    levels: dict[int, int],
    moved: frozenset[int],
    min_segment_kernels: int | None,
    costs: LaunchCosts,
) -> list[Cut]:
    by_level: dict[int, list[Unit]] = {}
    for unit in units:
        by_level.setdefault(levels[unit.ordinal], []).append(unit)
    copies = _Copies(units, levels)
    cuts: list[Cut] = []
    for place, level in enumerate(sorted(by_level)):
        members = by_level[level]
        ordinals = tuple(unit.ordinal for unit in members)
        islands: tuple[Island, ...] = ()
        if level % 2 == 0:
            island = Island(
                units=frozenset(ordinals),
                kernels=sum(unit.kernels for unit in members),
                edges=(place > 0) + (place < len(by_level) - 1),
                taken=copies.taken(members),
                given=copies.given(members),
            )
            if _is_segment(island, min_segment_kernels, costs):
                cuts.append(Cut("segment", ordinals, moved=moved & set(ordinals)))
                continue
            copies.run_eagerly(members)
            islands = (island,)
        if cuts and cuts[-1].kind == "break":
            before = cuts.pop()
            ordinals, islands = tuple(sorted(before.units + ordinals)), before.islands + islands
        cuts.append(Cut("break", ordinals, islands))
    return cuts


def _is_segment(island: Island, min_segment_kernels: int | None, costs: LaunchCosts) -> bool:
    if island.kernels == 0 or island.edges == 0:  # with no break beside it there is none to join
        return island.kernels > 0
    return costs.worth_a_graph(island) if min_segment_kernels is None else island.kernels >= min_segment_kernels


class _Copies:
    """What has to be copied so that graphs find it at a fixed place, while segments join breaks one after the other.

    Those that are still to be looked at count as captured.
    """

    def __init__(self, units: Sequence[Unit], levels: dict[int, int]) -> None:
        self._units = {unit.ordinal: unit for unit in units}
        self._levels = levels
        with_kernels = {levels[unit.ordinal] for unit in units if unit.kind == "segment" and unit.kernels}
        self._eager = {unit.ordinal for unit in units if levels[unit.ordinal] not in with_kernels}
        self._readers: dict[int, set[int]] = {}  # unit → those that take its results
        self._copied: dict[int, set[int]] = {}  # caller's tensor → units that take or give it
        for unit in units:
            for other in unit.needs:
                self._readers.setdefault(other, set()).add(unit.ordinal)
            for tensor in unit.copied:
                self._copied.setdefault(tensor, set()).add(unit.ordinal)

    def run_eagerly(self, members: Sequence[Unit]) -> None:
        """These are not captured: what they make has to be copied for those that are."""
        self._eager |= {unit.ordinal for unit in members}

    def taken(self, members: Sequence[Unit]) -> int:
        """How many copies a segment needs that no other one does."""
        bridges = {other for unit in members for other in unit.needs if self._makes_bridges(other)}
        level = self._levels[members[0].ordinal]
        tensors = {tensor for unit in members for tensor in unit.copied}
        return sum(not self._graphs(self._readers[o], level) for o in bridges) + sum(
            not self._graphs(self._copied[tensor], level) for tensor in tensors
        )

    def given(self, members: Sequence[Unit]) -> int:
        """How many of its values other segments would need copies of, were this one not captured."""
        level = self._levels[members[0].ordinal]
        return sum(bool(unit.kernels and self._graphs(self._readers.get(unit.ordinal, ()), level)) for unit in members)

    def _makes_bridges(self, ordinal: int) -> bool:
        return ordinal in self._eager and _makes_tensors(self._units[ordinal])

    def _graphs(self, readers: Iterable[int], level: int) -> bool:
        """Whether any of these is captured, in a segment of another level."""
        return any(o not in self._eager and self._levels[o] != level for o in readers)


def _makes_tensors(unit: Unit) -> bool:
    """Whether it gives what a graph needs a copy of: a view of fixed memory is itself fixed, and a number no tensor."""
    return unit.kind == "break" or unit.kernels > 0


def _total(units: Sequence[Unit], cuts: Sequence[Cut], costs: LaunchCosts) -> float:
    """What all steps cost beyond the work of captured kernels."""
    by_ordinal = {unit.ordinal: unit for unit in units}
    captured = {ordinal for cut in cuts if cut.kind == "segment" for ordinal in cut.units}
    needed = {other for here in captured for other in by_ordinal[here].needs} - captured
    bridges = [other for other in needed if _makes_tensors(by_ordinal[other])]
    tensors = {tensor for here in captured for tensor in by_ordinal[here].copied}
    eager = sum(island.kernels for cut in cuts for island in cut.islands)
    segments = sum(cut.kind == "segment" for cut in cuts)
    return (
        segments * costs.graph_us
        + (len(cuts) - 1) * costs.edge_us
        + (len(cuts) - segments) * costs.break_us
        + (len(bridges) + len(tensors)) * costs.bridge_us
        + eager * costs.op_us
    )


def _up(level: int, odd: bool) -> int:
    """The lowest level of that parity which is not below ``level``."""
    return level if level % 2 == odd else level + 1


def _down(level: int, odd: bool) -> int:
    """The highest level of that parity which is not above ``level``."""
    return level if level % 2 == odd else level - 1
