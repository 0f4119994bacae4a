"""Context parallelism: which rows of each sequence a rank holds.

Note [Zigzag]
A token looks at all tokens before it, so the last rows of a sequence are the most work. Each sequence is cut in ``2 *
size`` parts, and rank ``r`` holds part ``r`` from the front and part ``r`` from the back: the work of the two adds up
to the same on every rank (as in context parallelism of Llama 3, 2024).

The rows of a rank are those of the first sequence's front part, its back part, the second sequence's front part, and so
on. Rows of all ranks are gathered in the order of ranks, each rank's filled up to those of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from bcg_compiler.errors import LadderError, ParallelError


@dataclass(frozen=True, init=False)
class Zigzag:
    """The layout over ``size`` ranks. See Note [Zigzag].

    ``alignment``: the rows that a rank computes are a multiple of it; ``2 * size`` unless given. ``multiple``: what
    break functions ask of row counts (``bucket_multiple``); the alignment must be a multiple of it.

    All methods raise ``ParallelError`` for a rank that is out of range and for lengths or rows that cannot be.
    """

    size: int
    alignment: int

    def __init__(self, size: int, alignment: int | None = None, *, multiple: int = 1) -> None:
        size = _whole("The context-parallel size", size, least=1)
        alignment = _whole("alignment", 2 * size if alignment is None else alignment, least=1)
        multiple = _whole("multiple", multiple, least=1)
        if alignment % multiple:
            raise ParallelError(
                f"alignment is {alignment}, and a break takes multiples of {multiple} rows only (bucket_multiple): "
                f"give an alignment of {_round_up(alignment, multiple)}."
            )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "alignment", alignment)

    # -- numbers

    def parts(self, length: int) -> tuple[int, ...]:
        """Rows of each of the ``2 * size`` parts of a sequence: the first ones have one more if it does not divide."""
        base, more = divmod(_whole("A length", length), 2 * self.size)
        return tuple(base + (part < more) for part in range(2 * self.size))

    def held(self, length: int, rank: int) -> tuple[range, range]:
        """The places in a sequence that a rank holds: the part in front and the one behind. Either may be empty."""
        self._check_rank(rank)
        base, more = divmod(_whole("A length", length), 2 * self.size)

        def part(at: int) -> range:
            start = base * at + min(at, more)
            return range(start, start + base + (at < more))

        return part(rank), part(2 * self.size - 1 - rank)

    def rows(self, lengths: Sequence[int], rank: int) -> int:
        """How many rows a rank holds of sequences of these lengths."""
        return sum(len(part) for length in lengths for part in self.held(length, rank))

    def longest(self, lengths: Sequence[int]) -> int:
        """How many the rank holds that has the most."""
        return max(self.rows(lengths, rank) for rank in range(self.size))

    def required(self, lengths: Sequence[int]) -> int:
        """``longest``, rounded up to the alignment: the rows that each rank must have room for."""
        return _round_up(self.longest(lengths), self.alignment)

    def capacity(self, bucket: int) -> int:
        """The rows of each rank in a bucket of so many tokens: it is captured from one sequence of that length."""
        return self.required([bucket])

    def capacities(self, buckets: Iterable[int]) -> dict[int, int]:
        """``capacity`` of each bucket: ``Limits.captured_rows``."""
        return {bucket: self.capacity(bucket) for bucket in buckets}

    def usable(self, buckets: Iterable[int]) -> tuple[int, ...]:
        """The buckets that have a row for each part. Raises ``LadderError`` if there is none."""
        given = tuple(buckets)
        kept = tuple(bucket for bucket in given if bucket >= 2 * self.size)
        if not kept:
            raise LadderError(
                f"The ladder {list(given)} has no bucket of {2 * self.size} tokens or more, one for each of the 2 * "
                f"{self.size} parts that {self.size} context-parallel ranks cut a sequence in: raise its ceiling to at "
                f"least {2 * self.size}, or use fewer ranks."
            )
        return kept

    # -- rows

    def order(self, lengths: Sequence[int], rank: int) -> torch.Tensor:
        """Int64 ``[rows(lengths, rank)]``: which rows of the whole batch a rank holds, in its order."""
        starts, counts = [], []
        start = 0
        for length in lengths:
            for part in self.held(length, rank):
                starts.append(start + part.start)
                counts.append(len(part))
            start += length
        return _joined(starts, counts)

    def places(self, lengths: Sequence[int]) -> torch.Tensor:
        """Int64 ``[tokens]``: where each row of the whole batch stands in gathered rows ``[size * longest, ...]``."""
        found = torch.empty(sum(lengths), dtype=torch.int64)  # each of them is written: every row is held
        longest = self.longest(lengths)
        for rank in range(self.size):
            order = self.order(lengths, rank)
            found[order] = torch.arange(len(order)) + rank * longest
        return found

    def positions(self, lengths: Sequence[int], prefixes: Sequence[int], rank: int) -> torch.Tensor:
        """Int64 ``[rows(lengths, rank)]``: the place of each row of a rank in its sequence, prefix included."""
        if len(lengths) != len(prefixes):
            raise ParallelError(f"There are {len(lengths)} lengths and {len(prefixes)} prefixes: give one each.")
        return _joined(prefixes, lengths)[self.order(lengths, rank)]

    def split(self, rows: torch.Tensor, lengths: Sequence[int], rank: int) -> torch.Tensor:
        """The rows of a rank, of those of the whole batch ``[tokens, ...]``: a copy."""
        if sum(lengths) != len(rows):
            raise ParallelError(
                f"The lengths {list(lengths)} add up to {sum(lengths)} tokens, and {len(rows)} rows are given: give "
                f"the live rows of the batch that the lengths are of."
            )
        return rows[self.order(lengths, rank).to(rows.device)]

    def restore(self, gathered: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The whole batch ``[tokens, ...]`` in order, of gathered rows ``[size, longest(lengths), ...]``: a copy."""
        wanted = self.size, self.longest(lengths)
        if gathered.shape[:2] != wanted:
            raise ParallelError(
                f"Gathered rows are {list(gathered.shape)}, and lengths {list(lengths)} make {list(wanted)} over "
                f"{self.size} ranks: gather the live rows of each rank, filled up to those of the longest one."
            )
        return gathered.flatten(0, 1)[self.places(lengths).to(gathered.device)]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ParallelError(f"There is no context-parallel rank {rank}: the size is {self.size}.")


def _joined(starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Int64: ``counts[0]`` numbers from ``starts[0]`` on, then ``counts[1]`` from ``starts[1]`` on, and so on."""
    first, count = torch.tensor(starts, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    shift = first - (count.cumsum(0) - count)
    return torch.arange(sum(counts)) + shift.repeat_interleave(count)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _whole(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParallelError(f"{name} is {value!r} ({type(value).__name__}); it must be an int.")
    if value < least:
        raise ParallelError(f"{name} is {value}; it must be at least {least}.")
    return int(value)
