"""What holds for the cut of any program, on random units; and that no other schedule has fewer breaks."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bcg_compiler.plan.costs import LaunchCosts
from bcg_compiler.plan.partition import Cut, Unit, dependencies, partition


@st.composite
def units(
    draw: st.DrawFn, most: int = 12, kinds: Sequence[str] = ("segment", "segment", "break", "host")
) -> list[Unit]:
    """Random units, each after all that it needs. No segment needs a host unit: what uses such a number is a break."""
    made: list[Unit] = []
    roots = st.frozensets(st.integers(-2, 3), max_size=2)
    for ordinal in range(draw(st.integers(0, most))):
        kind: Any = draw(st.sampled_from(kinds))
        usable = [unit.ordinal for unit in made if kind != "segment" or unit.kind != "host"]
        needs = draw(st.frozensets(st.sampled_from(usable), max_size=2)) if usable else frozenset()
        if kind == "host":
            made.append(Unit(ordinal, kind, needs=needs))
            continue
        kernels = draw(st.integers(0, 4)) if kind == "segment" else 0
        pinned = kind == "segment" and draw(st.booleans()) and draw(st.booleans())
        made.append(Unit(ordinal, kind, kernels, needs, draw(roots), draw(roots), pinned))
    return made


def with_kernels(made: list[Unit]) -> list[Unit]:
    """The same units, each capturable one with a kernel: no segment is absorbed for having none."""
    return [Unit(u.ordinal, u.kind, 1, u.needs, u.reads, u.writes, u.pinned) for u in made]


# One sequence of examples for everybody and always: whether a test fails must not depend on chance or on the clock.
thorough = settings(max_examples=150, deadline=None, derandomize=True, database=None)
thresholds = st.sampled_from([None, 0, 1, 2, 5])


@thorough
@given(units(), thresholds)
def test_dependencies_are_respected(made: list[Unit], min_segment_kernels: int | None) -> None:
    """Whatever a unit depends on runs before it: in an earlier step, or earlier in the same one."""
    place = {
        ordinal: (step, position)
        for step, cut in enumerate(partition(made, min_segment_kernels))
        for position, ordinal in enumerate(cut.units)
    }
    for after, earlier in dependencies(made).items():
        assert all(place[before] < place[after] for before in earlier)


@thorough
@given(units(), thresholds)
def test_every_unit_runs_once_in_program_order_within_its_step(
    made: list[Unit], min_segment_kernels: int | None
) -> None:
    cuts = partition(made, min_segment_kernels)
    assert sorted(ordinal for cut in cuts for ordinal in cut.units) == [unit.ordinal for unit in made]
    assert all(list(cut.units) == sorted(cut.units) for cut in cuts)
    assert all(cut.units for cut in cuts)


@thorough
@given(units(), thresholds)
def test_segments_and_breaks_alternate(made: list[Unit], min_segment_kernels: int | None) -> None:
    kinds = [cut.kind for cut in partition(made, min_segment_kernels)]
    assert all(kind != following for kind, following in pairwise(kinds))


@thorough
@given(units(), thresholds)
def test_breaks_run_outside_of_segments_in_program_order(made: list[Unit], min_segment_kernels: int | None) -> None:
    cuts = partition(made, min_segment_kernels)
    kind_of = {unit.ordinal: unit.kind for unit in made}
    breaks = [ordinal for cut in cuts for ordinal in cut.units if kind_of[ordinal] == "break"]
    assert breaks == sorted(breaks)
    assert all(kind_of[ordinal] == "segment" for cut in cuts if cut.kind == "segment" for ordinal in cut.units)


@thorough
@given(units(), thresholds)
def test_segments_are_worth_a_launch_and_absorbed_units_capturable(
    made: list[Unit], min_segment_kernels: int | None
) -> None:
    cuts = partition(made, min_segment_kernels)
    by_ordinal = {unit.ordinal: unit for unit in made}
    has_breaks = any(unit.kind != "segment" for unit in made)
    for cut in cuts:
        kernels = sum(by_ordinal[ordinal].kernels for ordinal in cut.units)
        if cut.kind == "segment":
            assert kernels >= (max(1, min_segment_kernels or 1) if has_breaks else 1)
            assert not cut.absorbed
        # What is in a break's step without having been absorbed is a break or a host unit.
        kinds = {by_ordinal[ordinal].kind for ordinal in set(cut.units) - cut.absorbed}
        assert kinds <= ({"segment"} if cut.kind == "segment" else {"break", "host"})
        assert all(by_ordinal[ordinal].kind == "segment" for ordinal in cut.absorbed)


@thorough
@given(units())
def test_units_that_touch_one_root_keep_their_order_if_one_writes(made: list[Unit]) -> None:
    """The same as the edges of ``dependencies`` say, from the definition: independent of how they are built."""
    place = {ordinal: index for index, ordinal in enumerate(o for cut in partition(made, 2) for o in cut.units)}
    for later in made:
        for earlier in made[: later.ordinal]:
            touched = earlier.writes & (later.reads | later.writes) or earlier.reads & later.writes
            pinned_apart = {earlier.kind, later.kind} == {"break", "segment"} and (earlier.pinned or later.pinned)
            if touched or pinned_apart or earlier.ordinal in later.needs:
                assert place[earlier.ordinal] < place[later.ordinal]


@thorough
@given(units())
def test_what_joins_a_break_by_its_costs_makes_the_plan_cheaper(made: list[Unit]) -> None:
    """Against all segments captured, with the costs of the whole plan added up."""
    costs = LaunchCosts()
    assert total(made, partition(made), costs) <= total(made, partition(made, 0), costs) + 1e-9


def total(made: Sequence[Unit], cuts: Sequence[Cut], costs: LaunchCosts) -> float:
    """What all steps cost beyond the work of captured kernels, from the definition."""
    home = {ordinal: cut for cut in cuts for ordinal in cut.units}
    found = 0.0
    copied = set()
    for index, cut in enumerate(cuts):
        found += costs.graph_us if cut.kind == "segment" else costs.break_us
        found += costs.edge_us if index else 0
    for unit in made:
        if home[unit.ordinal].kind == "break":
            found += costs.op_us * unit.kernels
            continue
        for other in unit.needs:
            tensors = made[other].kind == "break" or made[other].kernels
            if home[other].kind == "break" and tensors and other not in copied:
                copied.add(other)
                found += costs.bridge_us
    return found


def in_order(made: Iterable[Unit]) -> list[str]:
    """The kinds of the steps of a cut that moves nothing: neighbours of one kind are one step."""
    kinds: list[str] = []
    for unit in made:
        kind = "segment" if unit.kind == "segment" else "break"
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    return kinds


@thorough
@given(units().map(with_kernels))
def test_there_are_no_more_steps_than_without_moving(made: list[Unit]) -> None:
    cuts = partition(made, 0)
    naive = in_order(made)
    assert len(cuts) <= len(naive)
    assert len([cut for cut in cuts if cut.kind == "break"]) <= naive.count("break")


def fewest_steps(made: Sequence[Unit]) -> tuple[int, int]:
    """The fewest steps with a break, and the fewest steps, of all orders that ``dependencies`` allow."""
    predecessors = dependencies(made)
    # (units that have run, kind of the last step) → fewest (breaks, steps) so far; the two are minimised apart.
    states: dict[tuple[frozenset[int], str], tuple[int, int]] = {(frozenset(), ""): (0, 0)}
    for _ in made:
        following: dict[tuple[frozenset[int], str], tuple[int, int]] = {}
        for (done, last), (breaks, steps) in states.items():
            for unit in made:
                if unit.ordinal in done or not predecessors[unit.ordinal] <= done:
                    continue
                kind = "segment" if unit.kind == "segment" else "break"
                new = kind != last
                found = breaks + (new and kind == "break"), steps + new
                state = (done | {unit.ordinal}, kind)
                known = following.get(state, found)
                following[state] = min(known[0], found[0]), min(known[1], found[1])
        states = following
    return min(b for b, _ in states.values()), min(s for _, s in states.values())


@thorough
@given(units(most=7).map(with_kernels))
def test_no_schedule_has_fewer_breaks(made: list[Unit]) -> None:
    """Against an exhaustive search: no segment between two breaks could be emptied to join them, but for the lone one
    between two breaks that would be parted.

    Steps in all may be two more than the fewest: a unit before the first break, or behind the last one, stays there
    although it could run in a segment between breaks.
    """
    cuts = partition(made, 0)
    breaks, steps = fewest_steps(made)
    parted = [cut.kind for cut in cuts] == ["break", "segment", "break"]
    assert len([cut for cut in cuts if cut.kind == "break"]) == breaks or parted
    assert steps <= len(cuts) <= steps + 2
