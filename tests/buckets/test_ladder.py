"""Ladders: that the chosen one pads least, that each rule of rounding holds, and that bad input is told."""

import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import Any

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bcg_compiler as bcg
from bcg_compiler import Ladder, LadderError
from bcg_compiler.buckets import choose
from bcg_compiler.buckets.ladder import LARGEST, Waste
from bcg_compiler.debug.lengths import sample_lengths

# One sequence of examples for everybody and always: whether a test fails must not depend on chance or on the clock.
thorough = settings(max_examples=300, deadline=None, derandomize=True, database=None)
some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
ladders = st.sets(st.integers(1, 50), min_size=1, max_size=10).map(lambda found: Ladder(sorted(found)))


def padded(buckets: Any, lengths: list[int]) -> int:
    """Counted one by one."""
    return sum(min(b for b in buckets if b >= n) - n for n in lengths if n <= max(buckets))


def rounded_up(number: int, multiple: int) -> int:
    while number % multiple:
        number += 1
    return number


# -- a ladder


def test_a_ladder_is_its_buckets() -> None:
    ladder = Ladder([4, 8, 20])
    assert (list(ladder), len(ladder), ladder.ceiling, ladder.buckets) == ([4, 8, 20], 3, 20, (4, 8, 20))
    assert len({ladder, Ladder((4, 8, 20)), Ladder(numpy.array([4, 8, 20]))}) == 1
    assert all(type(bucket) is int for bucket in Ladder(numpy.array([4, 8])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ladder([]), "buckets is empty"),
        (lambda: Ladder([4, 16, 8]), r"buckets\[2\] is 8, behind 16; .* Give sorted"),
        (lambda: Ladder([4, 4]), r"buckets\[1\] is 4, behind 4"),
        (lambda: Ladder([0, 4]), r"buckets\[0\] is 0; it must be at least 1"),
        (lambda: Ladder([-4, 4]), r"buckets\[0\] is -4; it must be at least 1"),
        (lambda: Ladder([4, 2**31]), r"buckets\[1\] is 2147483648; it must be at most 2147483647, the largest int32"),
        (lambda: Ladder([4.0]), r"buckets\[0\] is 4.0 \(float\); it must be an int"),
        (lambda: Ladder([True, 4]), r"buckets\[0\] is True \(bool\); it must be an int"),
        (lambda: Ladder("48"), r"buckets\[0\] is '4' \(str\)"),
        (lambda: Ladder(8), r"buckets is 8 \(int\); it must be a list"),
        (lambda: Ladder.default(0), "ceiling is 0; it must be at least 1"),
        (lambda: Ladder.default(2048.0), r"ceiling is 2048.0 \(float\)"),
        (lambda: Ladder.relative(-1, 0.1), "ceiling is -1"),
        (lambda: Ladder.relative(64, 0), "waste is 0; it must be a number above 0 and at most 1"),
        (lambda: Ladder.relative(64, -0.1), "waste is -0.1"),
        (lambda: Ladder.relative(64, 1.5), "waste is 1.5"),
        (lambda: Ladder.relative(64, float("nan")), "waste is nan"),
        (lambda: Ladder.relative(64, True), "waste is True"),
        (lambda: Ladder.relative(64, "0.1"), "waste is '0.1'"),
        (lambda: Ladder.relative(LARGEST, 1e-9), "more than 1,000,000 buckets. Give a larger waste"),
        (lambda: Ladder.from_lengths([], 4), "lengths is empty"),
        (lambda: Ladder.from_lengths({}, 4), "lengths is empty"),
        (lambda: Ladder.from_lengths(5, 4), r"lengths is 5 \(int\); it must be a list"),
        (lambda: Ladder.from_lengths([3, 0], 4), r"lengths\[1\] is 0; it must be at least 1"),
        (lambda: Ladder.from_lengths([3, -3], 4), r"lengths\[1\] is -3"),
        (lambda: Ladder.from_lengths([3, 3.0], 4), r"lengths\[1\] is 3.0 \(float\)"),
        (lambda: Ladder.from_lengths([1, True], 4), r"lengths\[1\] is True \(bool\)"),
        (lambda: Ladder.from_lengths([3, 2**31], 4), r"lengths\[1\] is 2147483648; it must be at most"),
        (lambda: Ladder.from_lengths({0: 3}, 4), "A length is 0"),
        (lambda: Ladder.from_lengths({3: 0}, 4), "The number of prompts of length 3 is 0"),
        (lambda: Ladder.from_lengths([3], 0), "count is 0; it must be at least 1"),
        (lambda: Ladder.from_lengths([3], True), r"count is True \(bool\)"),
        (lambda: Ladder.from_lengths([3], 4, multiple=0), "multiple is 0; it must be at least 1"),
        (lambda: Ladder.from_lengths([3], 4, multiple=8, ceiling=7), "multiple is 8, above the ceiling 7"),
        (lambda: Ladder.from_lengths([3], 4, multiple=8), "multiple is 8, above the ceiling 3"),
        (lambda: Ladder.from_lengths([9, 12], 4, ceiling=8), "ceiling is 8, and the shortest length is 9"),
        (lambda: Ladder.from_lengths([3], 4, ceiling=0), "ceiling is 0; it must be at least 1"),
        (lambda: Ladder.from_lengths([3], 4, multiple=8, ceiling=LARGEST), "The rounded ceiling is 2147483648"),
        (lambda: Ladder([8]).multiple_of(9), "multiple is 9, above the ceiling 8"),
        (lambda: Ladder([8]).multiple_of(0), "multiple is 0"),
        (lambda: Ladder([8]).bucket_for(0), "rows is 0; it must be at least 1"),
        (lambda: Ladder([8]).bucket_for(True), r"rows is True \(bool\)"),
        (lambda: Ladder([8]).waste([]), "lengths is empty"),
        (lambda: Ladder([8, 16]).fit([3], {8: 5}, 9), "cost has no bytes for bucket 16"),
        (lambda: Ladder([8, 16]).fit([3], {8: 5, 16: -1}, 9), "The cost of bucket 16 is -1; it must be at least 0"),
        (lambda: Ladder([8]).fit([3], lambda bucket: 0.5, 9), r"The cost of bucket 8 is 0.5 \(float\)"),
        (lambda: Ladder([8]).fit([3], {8: 5}, -1), "byte_budget is -1"),
        (
            lambda: Ladder([8, 16]).fit([3], {8: 5, 16: 10}, 9),
            "The ceiling 16 alone takes 10 bytes, and byte_budget is",
        ),
    ],
)
def test_what_no_ladder_can_be_made_from_is_told(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(LadderError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, bcg.BcgError)


@thorough
@given(ladders, st.integers(1, 60))
def test_a_prompt_goes_to_the_smallest_bucket_that_holds_it(ladder: Ladder, rows: int) -> None:
    assert ladder.bucket_for(rows) == min((bucket for bucket in ladder if bucket >= rows), default=None)


@thorough
@given(ladders, some_lengths)
def test_waste_counts_each_prompt(ladder: Ladder, lengths: list[int]) -> None:
    fit = [length for length in lengths if length <= ladder.ceiling]
    above = [length for length in lengths if length > ladder.ceiling]
    waste = ladder.waste(iter(lengths))
    assert waste == Waste(len(fit), sum(fit), padded(ladder, lengths), len(above), sum(above))
    assert waste.ratio == (waste.padded / sum(fit) if fit else 0)


# -- the default, and by the worst prompt


def test_the_default_ladder() -> None:
    assert [len(Ladder.default(ceiling)) for ceiling in (2048, 4096, 8192)] == [42, 50, 58]
    steps = Counter(after - before for before, after in pairwise([0, *Ladder.default(8192)]))
    assert steps == {4: 8, 16: 14, 32: 8, 64: 8, 256: 12, 512: 8}


@pytest.mark.parametrize(
    ("ceiling", "last"), [(1, [1]), (4, [4]), (5, [4, 5]), (40, [28, 32, 40]), (4097, [3840, 4096, 4097])]
)
def test_the_ceiling_is_always_a_bucket(ceiling: int, last: list[int]) -> None:
    assert list(Ladder.default(ceiling))[-3:] == last


@thorough
@given(st.integers(1, 3000), st.integers(1, 100))
def test_buckets_are_as_large_as_the_worst_prompt_allows(ceiling: int, percent: int) -> None:
    ladder = Ladder.relative(ceiling, percent / 100)
    assert ladder.ceiling == ceiling
    for before, bucket in pairwise([0, *ladder]):
        worst = before + 1
        assert 100 * (bucket - worst) <= percent * worst
        assert bucket == ceiling or 100 * (bucket + 1 - worst) > percent * worst


def test_waste_is_meant_as_it_is_written() -> None:
    """In binary, 475 * 1.36 is less than 646, and the bucket was one too small."""
    assert Ladder.relative(3000, 0.36).bucket_for(475) == 646


# -- the optimum


@thorough
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(0, 10**6),
)
@example([1], 1, 1, None, 0)
@example([7, 7, 7], 3, 7, 50, 0)
def test_no_other_ladder_pads_less(
    lengths: list[int], count: int, multiple: int, ceiling: int | None, row: int
) -> None:
    """Against all ladders of multiples up to the ceiling."""
    wanted = max(lengths) if ceiling is None else ceiling
    multiple = min(multiple, wanted)
    top = rounded_up(wanted, multiple)
    if top < min(lengths):
        return
    # A length that comes often must draw a bucket.
    lengths = lengths + [lengths[row % len(lengths)]] * (row % 20)
    ladder = Ladder.from_lengths(lengths, count, multiple, ceiling)
    assert ladder.ceiling == top
    assert len(ladder) <= count
    assert all(bucket % multiple == 0 for bucket in ladder)
    # Only buckets that some prompt rounds to can matter: lowering any other to the next such value pads less.
    values = sorted({rounded_up(length, multiple) for length in lengths if length <= top} - {top})
    others = ([*chosen, top] for size in range(count) for chosen in combinations(values, size))
    assert padded(ladder, lengths) == min(padded(buckets, lengths) for buckets in others)
    assert ladder.waste(lengths).padded == padded(ladder, lengths)


@thorough
@given(some_lengths, st.integers(1, 8))
def test_more_buckets_never_pad_more(lengths: list[int], count: int) -> None:
    fewer, more = (Ladder.from_lengths(lengths, n).waste(lengths).padded for n in (count, count + 1))
    assert more <= fewer
    assert more < fewer or fewer == 0


def test_with_enough_buckets_nothing_is_padded() -> None:
    assert Ladder.from_lengths([9, 3, 9, 5], 10) == Ladder([3, 5, 9])


def test_the_ceiling_follows_the_multiple_and_what_then_fits_counts() -> None:
    ladder = Ladder.from_lengths([3, 14, 15, 17], 2, multiple=8, ceiling=10)
    assert ladder == Ladder([8, 16])
    assert ladder.waste([3, 14, 15, 17]) == Waste(rows=3, live=32, padded=8, rows_above=1, live_above=17)


def test_lengths_may_be_any_iterable_or_counts() -> None:
    lengths = sample_lengths()
    wanted = Ladder.from_lengths(lengths, 8, multiple=4)
    given_as = [tuple(lengths), iter(lengths), (n for n in lengths), Counter(lengths), numpy.array(lengths)]
    assert all(Ladder.from_lengths(form, 8, multiple=4) == wanted for form in given_as)
    assert wanted.waste(Counter(lengths)) == wanted.waste(lengths)


def peak_of_many(rows: int) -> int:
    """Bytes that choosing a ladder takes at most."""

    def lengths() -> Iterator[int]:
        for row in range(rows):
            yield 1000 + row * 7919 % 512

    tracemalloc.start()
    try:
        assert len(Ladder.from_lengths(lengths(), 16)) == 16
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_with_the_different_lengths_only() -> None:
    assert peak_of_many(200_000) < 1_000_000


@pytest.mark.nightly
def test_ten_million_rows() -> None:
    assert peak_of_many(10_000_000) < 1_000_000


def test_the_search_takes_a_step_for_each_length_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """To try all pairs of lengths took minutes for a real trace."""
    steps = Counter[str]()

    def counted(*args: Any) -> None:
        steps["lines"] += 1
        add_line(*args)

    add_line = choose._add_line
    monkeypatch.setattr(choose, "_add_line", counted)
    Ladder.from_lengths(range(1, 1001), 10)
    assert steps["lines"] < 10 * 1000


def test_a_ladder_chosen_by_half_of_a_trace_suits_the_other_half() -> None:
    """The bundled lengths, up to 2048; docs/ladders.md has the figures of the whole trace."""
    lengths = sample_lengths()
    even, odd = lengths[::2], lengths[1::2]
    default = Ladder.default(2048).waste(odd)
    sixteen = Ladder.from_lengths(even, 16, ceiling=2048).waste(odd)
    many = Ladder.from_lengths(even, 42, ceiling=2048).waste(odd)
    assert {waste.rows for waste in (default, sixteen, many)} == {99}  # none is left out
    assert many.ratio <= 0.026
    assert sixteen.ratio <= 0.06
    assert default.ratio > 0.1  # that of 42 buckets


# -- multiples


@thorough
@given(ladders, st.integers(1, 50))
def test_rounding_up_to_a_multiple(ladder: Ladder, multiple: int) -> None:
    multiple = min(multiple, ladder.ceiling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = ladder.multiple_of(multiple)
    assert list(made) == sorted({rounded_up(bucket, multiple) for bucket in ladder})
    assert made.multiple_of(multiple) is made


def test_a_list_of_the_user_s_is_changed_with_a_warning_that_shows_both() -> None:
    with pytest.warns(
        UserWarning, match=r"\[4, 8, 12, 20\] has .* not multiples of 8; it is now \[8, 16, 24\]"
    ) as seen:
        made = Ladder([4, 8, 12, 20]).multiple_of(8)
    assert made == Ladder([8, 16, 24])
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="multiples of 5"):
        made.multiple_of(5)  # it is still the user's


@pytest.mark.parametrize(
    "ladder", [Ladder.default(100), Ladder.relative(100, 0.1), Ladder.from_lengths([9, 30], 2), Ladder([8, 16])]
)
def test_no_warning_without_a_change_or_for_a_ladder_that_was_made(ladder: Ladder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ladder.multiple_of(8).ceiling % 8 == 0


# -- a budget of bytes


def test_what_is_dropped_for_a_budget_is_told() -> None:
    """Six bytes are too many. The rung of 8 saves 2 * 8 tokens for them, that of 16 saves 3 * 16."""
    fitted = Ladder([8, 16, 32]).fit([7, 8, 15, 16, 16, 30], lambda bucket: bucket, 50)
    assert fitted.ladder == Ladder([16, 32])
    assert str(fitted) == (
        "2 of 3 buckets are kept: 48 of 56 bytes, the budget is 50; 21.7% padding in place of 4.3%.\n"
        "8 is dropped: 8 bytes are freed, and its 2 prompts go to 16, with 16 padded tokens more."
    )


@st.composite
def budgets(draw: st.DrawFn) -> tuple[Ladder, dict[int, int], int]:
    ladder = draw(ladders)
    costs = {bucket: draw(st.integers(0, 20)) for bucket in ladder}
    return ladder, costs, costs[ladder.ceiling] + draw(st.integers(0, 60))


@thorough
@given(budgets(), some_lengths)
def test_a_fitted_ladder_keeps_within_its_budget_and_adds_up(
    drawn: tuple[Ladder, dict[int, int], int], lengths: list[int]
) -> None:
    ladder, costs, budget = drawn
    fitted = ladder.fit(lengths, costs, budget)
    kept, dropped = list(fitted.ladder), [rung.bucket for rung in fitted.dropped]
    assert sorted(kept + dropped) == list(ladder)
    assert fitted.ladder.ceiling == ladder.ceiling
    assert fitted.bytes_before == sum(costs.values())
    assert fitted.bytes_after == sum(costs[bucket] for bucket in kept) <= budget == fitted.budget
    assert fitted.bytes_before - fitted.bytes_after == sum(rung.freed for rung in fitted.dropped)
    assert (fitted.before, fitted.after) == (ladder.waste(lengths), fitted.ladder.waste(lengths))
    assert fitted.after.padded - fitted.before.padded == sum(rung.padded for rung in fitted.dropped)
    assert all(rung.next == fitted.ladder.bucket_for(rung.bucket) for rung in fitted.dropped)
    # Nothing is dropped without need.
    for rung in fitted.dropped:
        if fitted.bytes_after + costs[rung.bucket] <= budget:
            assert Ladder(sorted([*kept, rung.bucket])).waste(lengths).padded == fitted.after.padded


def test_the_bytes_of_a_rung_count_against_what_it_saves() -> None:
    """10 and 30 save fewer tokens than 20 each, and have to go both to free what 20 alone frees."""
    lengths = [10] * 9 + [20] * 10 + [30] * 8
    fitted = Ladder([10, 20, 30, 40]).fit(lengths, {10: 40, 20: 50, 30: 10, 40: 7}, 57)
    assert fitted.ladder == Ladder([10, 30, 40])


def test_bytes_that_nobody_needs_do_not_count() -> None:
    """16 frees more for each token, but five bytes are enough, and 8 frees ten."""
    fitted = Ladder([8, 16, 32]).fit([8] * 10 + [16] * 10, {8: 10, 16: 100, 32: 10}, 115)
    assert fitted.ladder == Ladder([16, 32])


def test_what_went_early_comes_back_if_a_large_rung_went_after_it() -> None:
    """4 saves least for its byte and goes first. Then 8 must go as well, and leaves room for 4."""
    lengths = [4] * 1 + [8] * 50
    fitted = Ladder([4, 8, 16]).fit(lengths, {4: 1, 8: 50, 16: 10}, 20)
    assert fitted.ladder == Ladder([4, 16])


def test_a_budget_that_suffices_drops_nothing() -> None:
    ladder = Ladder.default(64)
    fitted = ladder.fit([3, 70], lambda bucket: 2, 2 * len(ladder))
    assert (fitted.ladder, fitted.dropped) == (ladder, ())
    assert fitted.after.rows_above == 1
