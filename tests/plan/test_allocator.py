"""The simulated caching allocator: its constants, its rules, and a second, naive writing of it."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bcg_compiler.plan import allocator
from bcg_compiler.plan.allocator import MIB, Event, simulate

# One sequence of examples for everybody and always: whether a test fails must not depend on chance or on the clock.
thorough = settings(max_examples=300, deadline=None, derandomize=True, database=None)
# Sizes on both sides of every rule's limit.
sizes = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 40 * MIB),
    st.sampled_from([1, 2, 10, 20]).flatmap(lambda m: st.integers(m * MIB - 600, m * MIB + 600)),
)


@st.composite
def sequences(draw: st.DrawFn) -> list[Event]:
    """Random allocations, each freed at some time or not at all."""
    events: list[Event] = []
    live: list[int] = []
    for storage in range(draw(st.integers(0, 25))):
        while live and draw(st.booleans()):
            events.append(Event(live.pop(draw(st.integers(0, len(live) - 1)))))
        events.append(Event(storage, draw(sizes)))
        live.append(storage)
    return events


def all_freed(events: list[Event]) -> list[Event]:
    freed = {event.storage for event in events if event.bytes is None}
    return [*events, *(Event(e.storage) for e in events if e.bytes is not None and e.storage not in freed)]


def naive(events: list[Event]) -> tuple[int, int]:
    """Reserved bytes and peak: each segment a list of [bytes, owner], which is searched through at each step."""
    segments: list[tuple[bool, list[list[int | None]]]] = []
    peak = 0
    for storage, size in events:
        if size is None:
            for _, blocks in segments:
                for block in blocks:
                    block[1] = None if block[1] == storage else block[1]
                for i in reversed(range(len(blocks) - 1)):
                    if blocks[i][1] is None and blocks[i + 1][1] is None:
                        blocks[i : i + 2] = [[blocks[i][0] + blocks[i + 1][0], None]]
            continue
        size = (size + 511) // 512 * 512
        small = size <= MIB
        fits = [
            (block[0], number, position)
            for number, (is_small, blocks) in enumerate(segments)
            for position, block in enumerate(blocks)
            if is_small == small and block[1] is None and block[0] >= size
        ]
        if not fits:
            taken = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            segments.append((small, [[taken, None]]))
            fits = [(taken, len(segments) - 1, 0)]
        has, number, position = min(fits)
        cut = has - size >= 512 if small else has - size > MIB
        pieces: list[list[int | None]] = [[size, storage], [has - size, None]] if cut else [[has, storage]]
        segments[number][1][position : position + 1] = pieces
        peak = max(peak, sum(b[0] for _, blocks in segments for b in blocks if b[1] is not None))
    return sum(b[0] for _, blocks in segments for b in blocks), peak


@thorough
@given(sequences())
def test_the_pool_takes_what_a_naive_writing_of_the_rules_takes(events: list[Event]) -> None:
    usage = simulate(events)
    assert (usage.reserved, usage.peak) == naive(events)


@thorough
@given(sequences())
def test_reserved_is_at_least_the_peak_and_the_peak_all_that_is_live(events: list[Event]) -> None:
    live: dict[int, int] = {}
    most = 0
    for event in events:
        if event.bytes is None:
            del live[event.storage]
        else:
            live[event.storage] = event.bytes
        most = max(most, sum(live.values()))
    usage = simulate(events)
    assert usage.reserved >= usage.peak >= most
    assert usage.reserved % (2 * MIB) == 0


@thorough
@given(sequences(), sizes)
def test_what_is_freed_joins_again(events: list[Event], size: int) -> None:
    """Once all is free each segment is whole: an allocation that one of them was made for takes nothing new."""
    first = [Event(-1, size), Event(-1)]
    before = simulate(all_freed([*first, *events]))
    assert simulate([*all_freed([*first, *events]), Event(-2, size)]).reserved == before.reserved


@pytest.mark.parametrize(
    ("bytes_", "reserved"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_the_segment_of_one_allocation(bytes_: int, reserved: int) -> None:
    assert simulate([Event(0, bytes_)]).reserved == reserved


def test_small_and_large_allocations_share_no_segment() -> None:
    assert simulate([Event(0, 512), Event(1, 2 * MIB), Event(2, 512)]).reserved == 22 * MIB


def test_the_rest_of_a_large_block_is_cut_off_only_above_one_mib() -> None:
    whole = [Event(0, 12 * MIB), Event(0), Event(1, 11 * MIB)]
    assert simulate(whole).peak == 12 * MIB
    assert simulate([*whole, Event(1), Event(2, 11 * MIB - 512), Event(3, MIB + 512)]).reserved == 12 * MIB


def test_the_same_again_may_take_more() -> None:
    """The best fit is not the best choice: what lay in a segment's rest goes into the smaller segment next time."""
    once = [Event(0, 3 * MIB), Event(1, 12 * MIB), Event(2, 12 * MIB)]
    assert simulate(once).reserved == 32 * MIB
    again = [*all_freed(once), *(Event(e.storage + 3, e.bytes) for e in once)]
    assert simulate(again).reserved == 44 * MIB


def test_freeing_what_is_not_allocated_is_an_error() -> None:
    with pytest.raises(KeyError):
        simulate([Event(0)])


def test_the_constants_are_those_of_the_torch_that_is_installed() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this torch has no header with the constants")
    known = dict(re.findall(r"\b(k\w+|large_segment_size_)\b(?: = |\{)(\d+)", header.read_text()))
    ours = {
        "kMinBlockSize": allocator.MIN_BLOCK,
        "kSmallSize": allocator.SMALL_SIZE,
        "kSmallBuffer": allocator.SMALL_SEGMENT,
        "kMinLargeAlloc": allocator.MIN_LARGE,
        "large_segment_size_": allocator.LARGE_SEGMENT,
        "kRoundLarge": allocator.ROUND_LARGE,
    }
    assert ours == {name: int(known[name]) for name in ours}
