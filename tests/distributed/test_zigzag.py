"""The zigzag layout: every row is held once, comes back in order, and fits into the bucket that is chosen."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bcg_compiler as bcg
from bcg_compiler.buckets.admission import admit
from bcg_compiler.distributed import Zigzag
from bcg_compiler.errors import BcgError, LadderError, ParallelError

thorough = settings(max_examples=200, deadline=None, derandomize=True, database=None)

lengths_of_batches = st.lists(st.integers(0, 40), max_size=6)
layouts = st.builds(Zigzag, st.integers(1, 6), st.none() | st.integers(1, 20))


def test_lengths_that_one_sequence_of_their_sum_has_no_room_for_take_a_larger_bucket() -> None:
    """2048 tokens in three requests are more rows on the longest rank than in one: 513, and 520 in eights."""
    layout, lengths = Zigzag(4), [1534, 161, 353]
    assert (layout.alignment, sum(lengths)) == (8, 2048)
    assert [layout.rows(lengths, rank) for rank in range(4)] == [513, 511, 512, 512]
    assert (layout.longest(lengths), layout.required(lengths)) == (513, 520)
    captured = layout.capacities(bcg.Ladder.default(4096))
    assert (captured[2048], captured[2304]) == (512, 576)
    batch = bcg.Batch(rows=2048, local_rows=layout.required(lengths))
    # Nothing of it is a rank's own: all of them find the same.
    assert admit(batch, tuple(captured), bcg.Limits(captured_rows=captured)).bucket == 2304


@thorough
@given(layouts, lengths_of_batches)
def test_every_row_is_held_once(layout: Zigzag, lengths: list[int]) -> None:
    ranks = range(layout.size)
    orders = [layout.order(lengths, rank) for rank in ranks]
    assert sorted(torch.cat(orders).tolist()) == list(range(sum(lengths)))
    assert [len(order) for order in orders] == [layout.rows(lengths, rank) for rank in ranks]
    assert layout.longest(lengths) == max(map(len, orders))
    for length in lengths:
        parts = layout.parts(length)
        assert sum(parts) == length and len(parts) == 2 * layout.size and parts[0] - parts[-1] in (0, 1)
        for rank in ranks:
            front, back = layout.held(length, rank)
            assert (len(front), len(back)) == (parts[rank], parts[-1 - rank])
            assert front.start == sum(parts[:rank]) and back.stop == length - sum(parts[len(parts) - rank :])


@thorough
@given(layouts, lengths_of_batches, st.randoms(use_true_random=False))
def test_what_is_split_is_restored(layout: Zigzag, lengths: list[int], random: Any) -> None:
    rows = torch.arange(sum(lengths) * 3).view(-1, 3)
    prefixes = [random.randrange(5) for _ in lengths]
    positions = [prefix + at for length, prefix in zip(lengths, prefixes, strict=True) for at in range(length)]
    gathered = torch.full((layout.size, layout.longest(lengths), 3), -1)
    for rank in range(layout.size):
        mine = layout.split(rows, lengths, rank)
        gathered[rank, : len(mine)] = mine
        there = layout.positions(lengths, prefixes, rank)
        assert torch.equal(there, layout.split(torch.tensor(positions, dtype=torch.int64), lengths, rank))
    assert torch.equal(layout.restore(gathered, lengths), rows)


@thorough
@given(
    layouts,
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.sets(st.integers(1, 1500), min_size=1, max_size=12),
    st.sampled_from([1, 1.5, 2, math.inf]),
)
def test_the_chosen_bucket_has_room_and_no_smaller_one_would_do(
    layout: Zigzag, lengths: list[int], ladder: set[int], factor: float
) -> None:
    buckets = tuple(b for b in sorted(ladder) if b >= 2 * layout.size)
    if not buckets:
        with pytest.raises(LadderError, match="raise its ceiling"):
            layout.usable(sorted(ladder))
        return
    assert layout.usable(sorted(ladder)) == buckets
    captured = layout.capacities(buckets)
    tokens, needed = sum(lengths), layout.required(lengths)
    assert needed % layout.alignment == 0 and needed - layout.longest(lengths) < layout.alignment
    limits = bcg.Limits(captured_rows=captured, max_padding_factor=factor)
    found = admit(bcg.Batch(rows=tokens, local_rows=needed), buckets, limits)
    in_bounds = [b for b in buckets if b >= tokens and (b == buckets[0] or b <= factor * tokens)]
    with_room = [b for b in in_bounds if captured[b] >= needed]
    assert found.bucket == (with_room[0] if with_room else None)
    if not with_room:
        assert found.reason == ("too_long" if tokens > buckets[-1] else "cp_capacity" if in_bounds else "padding")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Zigzag(0), ParallelError, "size is 0; it must be at least 1"),
        (lambda: Zigzag(2.0), ParallelError, r"size is 2.0 \(float\); it must be an int"),
        (lambda: Zigzag(2, 0), ParallelError, "alignment is 0; it must be at least 1"),
        (lambda: Zigzag(2, 12, multiple=8), ParallelError, "alignment is 12, .* multiples of 8 .* alignment of 16"),
        (lambda: Zigzag(2).order([4], 2), ParallelError, "no context-parallel rank 2: the size is 2"),
        (lambda: Zigzag(2).order([4], -1), ParallelError, "no context-parallel rank -1"),
        (lambda: Zigzag(2).parts(-1), ParallelError, "A length is -1"),
        (lambda: Zigzag(2).split(torch.zeros(9), [4, 4], 0), ParallelError, r"\[4, 4\] add up to 8 .* 9 rows"),
        (lambda: Zigzag(2).restore(torch.zeros(2, 5), [4, 4]), ParallelError, r"are \[2, 5\], .* make \[2, 4\]"),
        (lambda: Zigzag(2).positions([4], [], 0), ParallelError, "1 lengths and 0 prefixes"),
        (
            lambda: Zigzag(4).usable([2, 7]),
            LadderError,
            r"\[2, 7\] has no bucket of 8 tokens .* at least 8, or fewer|use",
        ),
    ],
)
def test_what_cannot_be_is_told(make: Callable[[], Any], error: type[BcgError], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
