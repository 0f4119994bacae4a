"""PyTorch's caching allocator for CUDA memory, simulated: what a sequence of allocations makes one pool reserve.

It takes segments from the driver and cuts blocks out of them. All numbers are bytes. The constants and rules are those
of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` with their default settings: no
expandable segments, no limit on the size of blocks that are split.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
#: kMinBlockSize: sizes are rounded up to multiples of it.
MIN_BLOCK = 512
#: kSmallSize: allocations up to it come from small segments. The rest of a large block must exceed it to be split off.
SMALL_SIZE = 1 * MIB
#: kSmallBuffer: the size of small segments.
SMALL_SEGMENT = 2 * MIB
#: kMinLargeAlloc: allocations below it, and above ``SMALL_SIZE``, come from segments of ``LARGE_SEGMENT``.
MIN_LARGE = 10 * MIB
#: large_segment_size_: the size of segments for several large allocations.
LARGE_SEGMENT = 20 * MIB
#: kRoundLarge: a larger allocation gets a segment of its own size, rounded up to multiples of it.
ROUND_LARGE = 2 * MIB


class Event(NamedTuple):
    """A storage is allocated with so many ``bytes``; ``None``: it is freed. Storages are named by any number."""

    storage: int
    bytes: int | None = None


@dataclass(frozen=True)
class Usage:
    """What a pool took, in bytes: ``reserved`` from the driver, and the ``peak`` of its blocks in use."""

    reserved: int
    peak: int


def simulate(events: Iterable[Event]) -> Usage:
    """What one private pool takes when ``events`` happen in order, on one stream. It gives nothing back meanwhile.

    An allocation of 0 bytes takes nothing. Raises ``KeyError`` where a storage is freed that is not allocated.
    """
    pool = _Pool()
    blocks: dict[int, _Block | None] = {}
    for storage, size in events:
        if size is None:
            pool.free(blocks.pop(storage))
        else:
            blocks[storage] = pool.allocate(size)
    return Usage(pool.reserved, pool.peak)


def rounded(size: int, multiple: int) -> int:
    """``size`` rounded up."""
    return -(-size // multiple) * multiple


@dataclass(eq=False)
class _Block:
    """A piece of a segment; its neighbours are pieces of the same one."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class _Pool:
    def __init__(self) -> None:
        self.reserved = self.peak = self._in_use = 0
        # Sorted by what the best fit is found by: the smallest block, and of equal ones that of the lowest address. No
        # two blocks have one address. As tuples, as no function is called to compare them: millions are for a ladder.
        self._free_blocks: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> _Block | None:
        if size == 0:
            return None
        size = rounded(size, MIN_BLOCK)
        small = size <= SMALL_SIZE
        found = self._free_blocks[small]
        position = bisect_left(found, (size, -1))
        block = found.pop(position)[2] if position < len(found) else self._segment(size, small)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:
            self._split(block, size)
        block.free = False
        self._in_use += block.size
        self.peak = max(self.peak, self._in_use)
        return block

    def free(self, block: _Block | None) -> None:
        if block is None:
            return
        self._in_use -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                found = self._free_blocks[block.small]
                del found[bisect_left(found, (neighbour.size, neighbour.address))]
                block = _merged(*sorted((block, neighbour), key=lambda piece: piece.address))
        self._add(block)

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            size = SMALL_SEGMENT
        elif size < MIN_LARGE:
            size = LARGE_SEGMENT
        else:
            size = rounded(size, ROUND_LARGE)
        block = _Block(self.reserved, size, small)
        self.reserved += size
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.size, block.after = size, rest
        self._add(rest)

    def _add(self, block: _Block) -> None:
        insort(self._free_blocks[block.small], (block.size, block.address, block))


def _merged(left: _Block, right: _Block) -> _Block:
    left.size += right.size
    left.after = right.after
    if left.after is not None:
        left.after.before = left
    return left
