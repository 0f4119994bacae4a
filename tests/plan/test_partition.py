"""How the cut is made, on hand-made units.

A docstring draws the program from left to right, and after the arrow the steps that it is cut into. ``S`` is a unit
that a segment may hold, ``S!`` one that is pinned, ``B`` a break, ``H`` arithmetic on numbers; numbers are positions in
the program. ``─`` is a result that is taken, ``~`` a buffer that both touch.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from bcg_compiler.plan.costs import LaunchCosts
from bcg_compiler.plan.partition import Cut, Unit, partition

#: A storage; units that touch the same number touch the same storage.
BUFFER = 7
#: Enough kernels for a segment of its own.
ENOUGH = 3


class Program:
    """Units in the order they are added; each call returns the position of its unit, for ``needs`` of later ones."""

    def __init__(self) -> None:
        self.units: list[Unit] = []

    def segment(self, *needs: int, kernels: int = ENOUGH, **facts: Any) -> int:
        """A capturable unit that takes the results of ``needs``."""
        return self._add("segment", needs, kernels=kernels, **facts)

    def brk(self, *needs: int, **facts: Any) -> int:
        """A break that takes the results of ``needs``."""
        return self._add("break", needs, **facts)

    def host(self, *needs: int) -> int:
        """Arithmetic on a number."""
        return self._add("host", needs)

    def _add(self, kind: Any, needs: Iterable[int], **facts: Any) -> int:
        for roots in ("reads", "writes"):
            facts[roots] = frozenset(facts.get(roots, ()))
        self.units.append(Unit(len(self.units), kind, needs=frozenset(needs), **facts))
        return len(self.units) - 1

    def steps(self, min_segment_kernels: int = 1) -> str:
        """The steps as text: ``S[0 2] B[1]``."""
        return text(partition(self.units, min_segment_kernels))


def text(cuts: Iterable[Cut]) -> str:
    return " ".join(f"{cut.kind[0].upper()}[{' '.join(map(str, cut.units))}]" for cut in cuts)


# -- breaks ------------------------------------------------------------------------------------------------------------


def test_neighbouring_breaks_join() -> None:
    """Nothing stands between two breaks: one step.

    S0 B1 B2 S3  →  S[0] B[1 2] S[3]
    """
    program = Program()
    program.segment()
    program.brk()
    program.brk()
    program.segment()
    assert program.steps() == "S[0] B[1 2] S[3]"


def test_breaks_keep_the_order_of_the_program() -> None:
    """B4 depends on nothing and could run first of all; a body may do what no graph shows, so it does not.

    S0─B1─S2─B3  B4  →  S[0] B[1] S[2] B[3 4]
    """
    program = Program()
    before = program.segment()
    first = program.brk(before)
    between = program.segment(first)
    program.brk(between)
    program.brk()
    assert program.steps() == "S[0] B[1] S[2] B[3 4]"


def test_a_break_that_depends_on_nothing_does_not_pass_a_later_one_that_has_to_wait() -> None:
    """B2 must wait for S1, so B3 does too, although only S4 needs it.

    B0─S1─B2  B3─S4  →  B[0] S[1] B[2 3] S[4]
    """
    program = Program()
    first = program.brk()
    between = program.segment(first)
    program.brk(between)
    last = program.brk()
    program.segment(last)
    assert program.steps() == "B[0] S[1] B[2 3] S[4]"


# -- pure units between breaks -----------------------------------------------------------------------------------------


def test_a_pure_unit_between_breaks_moves_up_when_that_joins_them() -> None:
    """S2 feeds B3 and takes nothing from B1.

    S0 B1 S2─B3 S4  →  S[0 2] B[1 3] S[4]
    """
    program = Program()
    program.segment()
    program.brk(0)
    free = program.segment()
    program.brk(free)
    program.segment(1, 3)
    assert program.steps() == "S[0 2] B[1 3] S[4]"


def test_a_chain_of_pure_units_moves_up_whole() -> None:
    """S2 and S3 feed B4 and take nothing from B1.

    S0 B1 S2─S3─B4  →  S[0 2 3] B[1 4]
    """
    program = Program()
    program.segment()
    program.brk(0)
    first = program.segment()
    second = program.segment(first)
    program.brk(second)
    assert program.steps() == "S[0 2 3] B[1 4]"


def test_a_pure_unit_between_breaks_moves_down_when_it_depends_on_the_first() -> None:
    """B3 need not wait for S2, which takes the result of B1.

    S0 B1─S2  B3 S4  →  S[0] B[1 3] S[2 4]
    """
    program = Program()
    program.segment()
    first = program.brk(0)
    program.segment(first)
    program.brk(0)
    program.segment(2, 3)
    assert program.steps() == "S[0] B[1 3] S[2 4]"


def test_units_between_two_breaks_part_up_and_down() -> None:
    """S2 feeds B4, S3 takes from B1: one goes up, one goes down, and the breaks join.

    S0 B1 S2 S3 B4 S5  →  S[0 2] B[1 4] S[3 5]      B1─S3, S2─B4
    """
    program = Program()
    program.segment()
    first = program.brk(0)
    up = program.segment()
    down = program.segment(first)
    program.brk(up)
    program.segment(down)
    assert program.steps() == "S[0 2] B[1 4] S[3 5]"


def test_joining_breaks_does_not_add_a_segment() -> None:
    """S1 feeds B3, S2 takes from B0, and nothing stands outside of the breaks: joined, there are two segments to launch
    where there was one, and as many steps.

    B0 S1 S2 B3  →  B[0] S[1 2] B[3], not S[1] B[0 3] S[2]      B0─S2, S1─B3
    """
    program = Program()
    first = program.brk()
    up = program.segment()
    program.segment(first)
    program.brk(up)
    assert program.steps() == "B[0] S[1 2] B[3]"


def test_breaks_of_three_streams_join_in_one_step() -> None:
    """Each break has a producer and a consumer of its own.

    S0─B1─S2  S3─B4─S5  S6─B7─S8  →  S[0 3 6] B[1 4 7] S[2 5 8]
    """
    program = Program()
    for _ in range(3):
        program.segment(program.brk(program.segment()))
    assert program.steps() == "S[0 3 6] B[1 4 7] S[2 5 8]"


def test_a_unit_does_not_move_when_nothing_is_saved() -> None:
    """S2 could run before B1, but the breaks stay apart anyway. Moving a value far from its readers costs memory.

    S0 B1 S2  S3─B4  →  S[0] B[1] S[2 3] B[4]      B1─S3, S2─B4
    """
    program = Program()
    program.segment()
    first = program.brk(0)
    free = program.segment()
    path = program.segment(first)
    program.brk(free, path)
    assert program.steps() == "S[0] B[1] S[2 3] B[4]"


def test_a_unit_that_no_break_waits_for_stays_behind_the_break_before_it() -> None:
    """S0 and S2 have nothing to do with the break.

    S0 B1 S2  →  S[0] B[1] S[2]
    """
    program = Program()
    program.segment()
    program.brk()
    program.segment()
    assert program.steps() == "S[0] B[1] S[2]"


@pytest.mark.parametrize("length", [1, 3])
def test_a_path_between_two_breaks_keeps_them_apart(length: int) -> None:
    """S1 … takes from B0 and feeds the last break.

    B0─S1─…─B  →  B[0] S[1 …] B[…]
    """
    program = Program()
    previous = program.brk()
    for _ in range(length):
        previous = program.segment(previous)
    program.brk(previous)
    between = " ".join(map(str, range(1, length + 1)))
    assert program.steps() == f"B[0] S[{between}] B[{length + 1}]"


def test_only_the_path_stays_between_the_breaks_that_it_keeps_apart() -> None:
    """B1 and B3 join over S2; B5 waits for S4, which takes from B3.

    S0 B1 S2─B3─S4─B5  →  S[0 2] B[1 3] S[4] B[5]
    """
    program = Program()
    program.segment()
    program.brk(0)
    free = program.segment()
    second = program.brk(free)
    path = program.segment(second)
    program.brk(path)
    assert program.steps() == "S[0 2] B[1 3] S[4] B[5]"


def test_a_unit_that_moved_up_is_named() -> None:
    """Who looks for S2 between the breaks must be told why it is not there.

    S0 B1 S2─B3  →  S[0 2] B[1 3], moved: 2
    """
    program = Program()
    program.segment()
    program.brk(0)
    program.brk(program.segment())
    assert moved(program) == {2}


def test_a_unit_that_moved_down_is_named() -> None:
    """As above: S2 stood between the breaks, and is behind both now.

    S0 B1─S2  B3 S4  →  S[0] B[1 3] S[2 4], moved: 2
    """
    program = Program()
    program.segment()
    program.segment(program.brk(0))
    program.brk(0)
    program.segment(2, 3)
    assert moved(program) == {2}


def test_units_that_stay_are_not_named_as_moved() -> None:
    """S2 keeps the breaks apart.

    S0 B1─S2─B3 S4  →  S[0] B[1] S[2] B[3] S[4], moved: none
    """
    program = Program()
    program.segment()
    program.brk(program.segment(program.brk(0)))
    program.segment()
    assert moved(program) == set()


def moved(program: Program) -> set[int]:
    return {ordinal for cut in partition(program.units, 1) for ordinal in cut.moved}


# -- effects -----------------------------------------------------------------------------------------------------------

ACCESSES = {
    "read, read": ("reads", "reads"),
    "read, write": ("reads", "writes"),
    "write, read": ("writes", "reads"),
    "write, write": ("writes", "writes"),
}
each_pair_of_accesses = pytest.mark.parametrize("first, second", ACCESSES.values(), ids=ACCESSES)


@each_pair_of_accesses
def test_a_unit_does_not_move_up_over_a_break_that_touches_its_buffer(first: str, second: str) -> None:
    """B1 and S2 touch one buffer. Only if neither writes may S2 move up, to join B3, which it feeds, with B1.

    S0 B1~S2─B3  →  S[0 2] B[1 3]  if both read
                 →  S[0] B[1] S[2] B[3]  else
    """
    program = Program()
    program.segment()
    program.brk(0, **{first: {BUFFER}})
    free = program.segment(**{second: {BUFFER}})
    program.brk(free)
    joined = (first, second) == ("reads", "reads")
    assert program.steps() == ("S[0 2] B[1 3]" if joined else "S[0] B[1] S[2] B[3]")


@each_pair_of_accesses
def test_a_unit_does_not_move_down_over_a_break_that_touches_its_buffer(first: str, second: str) -> None:
    """S2, which takes from B1, and B3 touch one buffer. Only if neither writes may S2 move down, to join B1 and B3.

    S0 B1─S2~B3 S4  →  S[0] B[1 3] S[2 4]  if both read
                    →  S[0] B[1] S[2] B[3] S[4]  else
    """
    program = Program()
    program.segment()
    before = program.brk(0)
    program.segment(before, **{first: {BUFFER}})
    program.brk(0, **{second: {BUFFER}})
    program.segment(2, 3)
    joined = (first, second) == ("reads", "reads")
    assert program.steps() == ("S[0] B[1 3] S[2 4]" if joined else "S[0] B[1] S[2] B[3] S[4]")


@each_pair_of_accesses
def test_two_units_that_touch_one_buffer_keep_their_order(first: str, second: str) -> None:
    """S2 must wait for B1. S3, which feeds B4, touches the buffer of S2: only if neither writes may it run earlier.

    S0 B1─S2~S3─B4  →  S[0 3] B[1 4] S[2]  if both read
                    →  S[0] B[1] S[2 3] B[4]  else
    """
    program = Program()
    program.segment()
    before = program.brk(0)
    program.segment(before, **{first: {BUFFER}})
    free = program.segment(**{second: {BUFFER}})
    program.brk(free)
    joined = (first, second) == ("reads", "reads")
    assert program.steps() == ("S[0 3] B[1 4] S[2]" if joined else "S[0] B[1] S[2 3] B[4]")


def test_every_reader_since_the_last_write_holds_back_the_next_one() -> None:
    """S1 and S3 read the buffer that B4 writes; S3 waits for B2, and so does B4, whatever reads came before.

    S0 S1 B2─S3~B4  →  S[0 1] B[2] S[3] B[4]
    """
    program = Program()
    program.segment(writes={BUFFER})
    program.segment(reads={BUFFER})
    before = program.brk(0)
    program.segment(before, reads={BUFFER})
    program.brk(writes={BUFFER})
    assert program.steps() == "S[0 1] B[2] S[3] B[4]"


def test_a_reader_before_the_others_holds_back_a_write_too() -> None:
    """As above, with the reader that has to wait first, and another reader after it.

    S0 B1─S2  S3~B4  →  S[0] B[1] S[2 3] B[4]
    """
    program = Program()
    program.segment(writes={BUFFER})
    before = program.brk(0)
    program.segment(before, reads={BUFFER})
    program.segment(reads={BUFFER})
    program.brk(writes={BUFFER})
    assert program.steps() == "S[0] B[1] S[2 3] B[4]"


def test_a_reader_of_an_alias_counts_like_one_of_the_value() -> None:
    """S1 makes a buffer, S2 a view of it. B4 writes through the view, S5 reads the buffer itself and takes no result of
    B4: the storage alone ties it to the break, and keeps B6, which it feeds, behind.

    S0 S1─S2─B4~S5─B6  →  S[0 1 2] B[3 4] S[5] B[6]
    """
    program = Program()
    program.segment()
    buffer = program.segment(kernels=0)
    view = program.segment(buffer, kernels=0, reads={BUFFER})
    program.brk(0)
    program.brk(view, writes={BUFFER})
    read = program.segment(buffer, reads={BUFFER})
    program.brk(read)
    assert program.steps() == "S[0 1 2] B[3 4] S[5] B[6]"


def test_a_write_through_one_alias_holds_back_a_read_through_another() -> None:
    """S4 reads one view, B5 writes another view of the same storage: S4, which waits for B3, stays before B5.

    S0─S1,S2  B3─S4~B5  →  S[0 1 2] B[3] S[4] B[5]
    """
    program = Program()
    buffer = program.segment(writes={BUFFER})
    one = program.segment(buffer, kernels=0, reads={BUFFER})
    other = program.segment(buffer, kernels=0, reads={BUFFER})
    before = program.brk(buffer)
    program.segment(before, one, reads={BUFFER})
    program.brk(other, writes={BUFFER})
    assert program.steps() == "S[0 1 2] B[3] S[4] B[5]"


def test_other_buffers_do_not_matter() -> None:
    """As above, but B5 writes another storage: it joins B3, and S4 moves behind both.

    S0 S1 B2─S3  B4  →  S[0 1] B[2 4] S[3]
    """
    program = Program()
    program.segment(writes={BUFFER})
    program.segment(writes={BUFFER + 1})
    before = program.brk(0)
    program.segment(before, reads={BUFFER})
    program.brk(1, writes={BUFFER + 1})
    assert program.steps() == "S[0 1] B[2 4] S[3]"


# -- pinned units ------------------------------------------------------------------------------------------------------


def test_a_pinned_unit_stays_between_the_breaks_around_it() -> None:
    """S2 draws random numbers, or writes what exists outside: nothing else ties it to a break.

    S0 B1 S2! B3 S4  →  S[0] B[1] S[2] B[3] S[4]
    """
    program = Program()
    program.segment()
    program.brk()
    program.segment(pinned=True)
    program.brk()
    program.segment()
    assert program.steps() == "S[0] B[1] S[2] B[3] S[4]"


def test_pinned_units_before_and_behind_all_breaks_stay_there() -> None:
    """S1 waits for nothing and S4 could run first, but neither may cross a break.

    S0 S1! B2 B3 S4!  →  S[0 1] B[2 3] S[4]
    """
    program = Program()
    program.segment()
    program.segment(pinned=True)
    program.brk()
    program.brk()
    program.segment(pinned=True)
    assert program.steps() == "S[0 1] B[2 3] S[4]"


def test_each_of_several_pinned_units_holds_back_the_next_break() -> None:
    """S2 must wait for B1, S3 need not: B4 waits for both.

    S0 B1─S2! S3! B4  →  S[0] B[1] S[2 3] B[4]
    """
    program = Program()
    program.segment()
    before = program.brk()
    program.segment(before, pinned=True)
    program.segment(pinned=True)
    program.brk()
    assert program.steps() == "S[0] B[1] S[2 3] B[4]"


def test_a_pinned_unit_does_not_hold_back_its_pure_neighbours() -> None:
    """S4, which feeds B5, is free to run before B1, but B5 has to wait for S3 anyway: S4 stays.

    S0 B1 S2 S3! S4─B5 S6─B7  →  S[0] B[1] S[2 3 4 6] B[5 7]
    """
    program = Program()
    program.segment()
    program.brk()
    program.segment()
    program.segment(pinned=True)
    pure = program.segment()
    program.brk(pure)
    free = program.segment()
    program.brk(free)
    assert program.steps() == "S[0] B[1] S[2 3 4 6] B[5 7]"


# -- numbers on the host -----------------------------------------------------------------------------------------------


def test_a_host_unit_joins_the_break_that_uses_it_and_splits_no_segment() -> None:
    """H1 stands in the middle of a segment.

    S0 H1 S2 B3 S4  →  S[0 2] B[1 3] S[4]      H1─B3
    """
    program = Program()
    program.segment()
    number = program.host()
    program.segment(0)
    program.brk(2, number)
    program.segment(3)
    assert program.steps() == "S[0 2] B[1 3] S[4]"


def test_a_host_unit_of_an_early_break_s_number_joins_the_late_break_that_uses_it() -> None:
    """H2 could run with B1, which reads the number; B4 uses it.

    S0─B1─H2 S3 B4  →  S[0] B[1] S[3] B[2 4]      B1─S3─B4, H2─B4
    """
    program = Program()
    program.segment()
    first = program.brk(0)
    number = program.host(first)
    between = program.segment(first)
    program.brk(between, number)
    assert program.steps() == "S[0] B[1] S[3] B[2 4]"


def test_a_host_unit_that_two_breaks_use_joins_the_first() -> None:
    """B1 and B3 both use H0, and S2 keeps them apart.

    H0 B1─S2─B3  →  B[0 1] S[2] B[3]      H0─B1, H0─B3
    """
    program = Program()
    number = program.host()
    first = program.brk(number)
    between = program.segment(first)
    program.brk(between, number)
    assert program.steps() == "B[0 1] S[2] B[3]"


def test_a_chain_of_host_units_stays_with_its_break() -> None:
    """H2 is computed from H1, and only B5 uses it.

    S0 H1 B2 H3 S4 B5  →  S[0] B[2] S[4] B[1 3 5]      B2─S4─B5, H1─H3─B5
    """
    program = Program()
    program.segment()
    first = program.host()
    before = program.brk(0)
    second = program.host(first)
    between = program.segment(before)
    program.brk(between, second)
    assert program.steps() == "S[0] B[2] S[4] B[1 3 5]"


def test_a_host_unit_that_nobody_uses_joins_the_last_break() -> None:
    """H1 is a check: it has no result.

    S0 H1 S2 B3 S4  →  S[0 2] B[1 3] S[4]
    """
    program = Program()
    program.segment()
    program.host()
    program.segment(0)
    program.brk(2)
    program.segment(3)
    assert program.steps() == "S[0 2] B[1 3] S[4]"


# -- small segments ----------------------------------------------------------------------------------------------------


def test_segments_without_a_kernel_vanish() -> None:
    """S1 and S3 are views.

    B0─S1─B2─S3─B4  →  B[0 1 2 3 4]
    """
    program = Program()
    previous = program.brk()
    for _ in range(2):
        previous = program.brk(program.segment(previous, kernels=0))
    assert program.steps(min_segment_kernels=0) == "B[0 1 2 3 4]"


def test_a_unit_without_a_kernel_stays_in_a_segment_that_has_one() -> None:
    """S1 is a view; S0 has kernels.

    S0 S1 B2  →  S[0 1] B[2]
    """
    program = Program()
    program.segment()
    program.segment(0, kernels=0)
    program.brk(1)
    assert program.steps() == "S[0 1] B[2]"


LONE = {
    "front": ((1, 3, 3), "B[0 1] S[2] B[3] S[4]", {0}),
    "middle": ((3, 1, 3), "S[0] B[1 2 3] S[4]", {2}),
    "end": ((3, 3, 1), "S[0] B[1] S[2] B[3 4]", {4}),
    "front and middle": ((1, 1, 3), "B[0 1 2 3] S[4]", {0, 2}),
    "everywhere": ((1, 1, 1), "B[0 1 2 3 4]", {0, 2, 4}),
}


@pytest.mark.parametrize("kernels, expected, absorbed", LONE.values(), ids=LONE)
def test_a_lone_kernel_joins_the_break_beside_it(
    kernels: tuple[int, int, int], expected: str, absorbed: set[int]
) -> None:
    """A lone kernel costs less than a graph launch. Which units joined for that reason is known after.

    S0─B1─S2─B3─S4  →  e.g. S[0] B[1 2 3] S[4]
    """
    program = Program()
    first = program.segment(kernels=kernels[0])
    second = program.segment(program.brk(first), kernels=kernels[1])
    program.segment(program.brk(second), kernels=kernels[2])
    cuts = partition(program.units, 2)
    assert text(cuts) == expected
    assert frozenset().union(*(cut.absorbed for cut in cuts)) == absorbed
    assert all(cut.absorbed <= set(cut.units) for cut in cuts)


def test_small_units_count_together() -> None:
    """S1 and S2 have one kernel each, which makes two.

    B0─S1─S2─B3  →  B[0] S[1 2] B[3]
    """
    program = Program()
    first = program.segment(program.brk(), kernels=1)
    program.brk(program.segment(first, kernels=1))
    assert program.steps(min_segment_kernels=2) == "B[0] S[1 2] B[3]"


@pytest.mark.parametrize("min_segment_kernels", [0, 1, 2, 5])
def test_a_graph_without_a_break_keeps_its_lone_kernel(min_segment_kernels: int) -> None:
    """There is no break that it could join.

    S0  →  S[0]
    """
    program = Program()
    program.segment(kernels=1)
    assert program.steps(min_segment_kernels) == "S[0]"


def test_a_graph_without_a_kernel_has_no_segment() -> None:
    """There is nothing to capture in a graph of views.

    S0─S1  →  B[0 1]
    """
    program = Program()
    program.segment(kernels=0)
    program.segment(0, kernels=0)
    assert program.steps() == "B[0 1]"


def test_no_units_no_steps() -> None:
    assert partition([], 2) == []


# -- what is worth a graph ---------------------------------------------------------------------------------------------

#: In round numbers: a graph costs 2, each edge of it 1, an eager kernel 4, a copy 3.
COSTS = LaunchCosts(graph_us=2, edge_us=1, op_us=4, bridge_us=3, break_us=1)


def at_the_front(kernels: int) -> Program:
    """S0 is beside one break, which writes: graph 2 + 1 edge."""
    program = Program()
    program.segment(kernels=kernels)
    program.brk(0)
    return program


def in_the_middle(kernels: int) -> Program:
    """S1 gives B2 its result, and takes nothing: graph 2 + 2 edges."""
    program = Program()
    program.brk()
    program.segment(kernels=kernels, reads={BUFFER}, pinned=True)
    program.brk(1)
    return program


def behind_a_value(kernels: int) -> Program:
    """S1 takes a value that B0 makes, which is copied to a bridge: graph 2 + 2 edges + 3."""
    program = Program()
    program.brk()
    program.segment(0, kernels=kernels)
    program.brk(1)
    return program


def behind_two_values(kernels: int) -> Program:
    """S2 takes two: graph 2 + 2 edges + 6."""
    program = Program()
    program.brk()
    program.brk()
    program.segment(0, 1, kernels=kernels)
    program.brk(2)
    return program


def behind_a_value_that_another_takes(kernels: int) -> Program:
    """B0 is copied for S3 anyway: graph 2 + 2 edges."""
    program = Program()
    program.brk()
    program.segment(0, kernels=kernels)
    program.brk(1)
    program.segment(0, 2, kernels=100)
    return program


def before_another_segment(kernels: int) -> Program:
    """S1 makes a value that S3 takes: graph 2 + 2 edges + 3, eagerly a copy to a bridge for S3."""
    program = Program()
    program.brk()
    program.segment(0, kernels=kernels)
    program.brk(1)
    program.segment(1, kernels=100)
    return program


def from_the_caller_and_back(kernels: int) -> Program:
    """S1 takes a tensor of the caller's and gives one: graph 2 + 1 edge + 6."""
    program = Program()
    program.brk()
    program.segment(kernels=kernels, copied=frozenset({-1, 1}), reads={BUFFER}, pinned=True)
    return program


#: Program → the fewest kernels with which its segment is captured.
WORTH = {
    at_the_front: 1,
    in_the_middle: 2,
    behind_a_value: 2,
    behind_two_values: 3,
    behind_a_value_that_another_takes: 2,
    before_another_segment: 2,
    from_the_caller_and_back: 3,
}


@pytest.mark.parametrize("make, least", WORTH.items(), ids=lambda value: getattr(value, "__name__", None))
def test_a_segment_is_captured_from_as_many_kernels_on_as_its_graph_costs(make: Any, least: int) -> None:
    """And with more than these it is, too."""
    for kernels in range(1, 8):
        units = make(kernels).units
        (island,) = [unit.ordinal for unit in units if unit.kind == "segment" and unit.kernels != 100]
        cuts = partition(units, costs=COSTS)
        assert (island in {o for cut in cuts if cut.kind == "segment" for o in cut.units}) == (kernels >= least)


def test_what_an_absorbed_segment_makes_is_copied_for_the_next_one() -> None:
    """S1 joins the breaks. What it makes for S3 then has to be copied, and S3 with two kernels, which is worth a graph
    with one copy, is not worth one with two.

    B0─S1─B2─S3─B4  →  B[0 1 2 3 4], but with another kernel: B[0 1 2] S[3] B[4]      S1─S3
    """
    for kernels, expected in ((2, "B[0 1 2 3 4]"), (3, "B[0 1 2] S[3] B[4]")):
        program = Program()
        small = program.segment(program.brk(), kernels=1)
        program.brk(program.segment(small, program.brk(small), kernels=kernels))
        assert text(partition(program.units, costs=COSTS)) == expected


def test_a_threshold_of_the_user_s_is_the_only_one() -> None:
    """Copies do not count then."""
    assert behind_two_values(1).steps(min_segment_kernels=1) == "B[0 1] S[2] B[3]"
    assert in_the_middle(50).steps(min_segment_kernels=51) == "B[0 1 2]"


def test_joining_breaks_must_pay() -> None:
    """B1 and B3 join over S2 for one graph less. Where S1 and S2 would have to part for it, there is one more.

    S0 B1 S2─B3 S4  →  S[0 2] B[1 3] S[4];  B0 S1 S2 B3  →  B[0] S[1 2] B[3]      B0─S2, S1─B3
    """
    program = Program()
    program.segment()
    program.brk(0)
    program.brk(program.segment())
    program.segment(1, 3, kernels=9)
    assert text(partition(program.units)) == "S[0 2] B[1 3] S[4]"
    program = Program()
    first = program.brk()
    up = program.segment()
    program.segment(first)
    program.brk(up)
    assert text(partition(program.units)) == "B[0] S[1 2] B[3]"


THRESHOLDS = {
    0: "S[0] B[1] S[2] B[3] S[4] B[5 6 7] S[8]",
    1: "S[0] B[1] S[2] B[3] S[4] B[5 6 7] S[8]",
    2: "B[0 1] S[2] B[3] S[4] B[5 6 7] S[8]",
    3: "B[0 1 2 3] S[4] B[5 6 7] S[8]",
    5: "B[0 1 2 3 4 5 6 7] S[8]",
    6: "B[0 1 2 3 4 5 6 7 8]",
}


@pytest.mark.parametrize("min_segment_kernels, expected", THRESHOLDS.items())
def test_segments_of_fewer_kernels_than_the_threshold_join_a_break(min_segment_kernels: int, expected: str) -> None:
    """S0, S2, S4, S6 and S8 have 1, 2, 4, 0 and 5 kernels. The one without any always joins, at threshold 0 too.

    S0─B1─S2─B3─S4─B5─S6─B7─S8
    """
    program = Program()
    previous = program.segment(kernels=1)
    for kernels in (2, 4, 0, 5):
        previous = program.segment(program.brk(previous), kernels=kernels)
    assert program.steps(min_segment_kernels) == expected
