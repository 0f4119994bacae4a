"""The ladder: the ascending token counts that prompts are padded to, and how to choose them."""

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from bcg_compiler.buckets.choose import fewest_padded, keep_within
from bcg_compiler.errors import LadderError

#: Kernels index rows with 32 bits.
LARGEST = 2**31 - 1

#: A ladder is some dozens of captures. Far beyond that it is a mistake, which would take minutes to write down.
MOST_BUCKETS = 1_000_000

#: The default ladder: up to the first number by steps of the second one; beyond the last number by ``LAST_STEP``.
DEFAULT_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
LAST_STEP = 512

#: Prompt lengths in tokens: one for each prompt, or how many prompts have each length.
Lengths = Iterable[int] | Mapping[int, int]


@dataclass(frozen=True)
class Waste:
    """What padding costs on given prompts. Prompts above the last bucket run eagerly and are counted apart."""

    rows: int
    """Prompts that fit into a bucket."""
    live: int
    """Their tokens."""
    padded: int
    """Tokens of padding that the buckets add to them."""
    rows_above: int
    """Prompts above the last bucket."""
    live_above: int
    """Their tokens."""

    @property
    def ratio(self) -> float:
        """Padded tokens over live tokens; 0 where no prompt fits."""
        return self.padded / self.live if self.live else 0.0


@dataclass(frozen=True)
class DroppedRung:
    """A bucket that a budget of bytes left no room for, and what that costs."""

    bucket: int
    next: int
    """The bucket that its prompts now go to."""
    rows: int
    """How many prompts these are."""
    padded: int
    """Tokens of padding that they have more than before."""
    freed: int
    """Bytes."""

    def __str__(self) -> str:
        return (
            f"{self.bucket} is dropped: {self.freed:,} bytes are freed, and its {self.rows:,} prompts go to "
            f"{self.next}, with {self.padded:,} padded tokens more."
        )


@dataclass(frozen=True)
class FittedLadder:
    """A ladder that keeps within a budget of bytes, and what was dropped for it."""

    ladder: "Ladder"
    dropped: tuple[DroppedRung, ...]
    budget: int
    bytes_before: int
    bytes_after: int
    before: Waste
    after: Waste
    reserve: int = 0

    def __str__(self) -> str:
        reserved = f", of which {self.reserve:,} are reserved" if self.reserve else ""
        kept = f"{len(self.ladder)} of {len(self.ladder) + len(self.dropped)} buckets"
        return "\n".join(
            [
                f"{kept} are kept: {self.bytes_after:,} of {self.bytes_before:,} bytes, the budget is "
                f"{self.budget:,}{reserved}; {self.after.ratio:.1%} padding in place of {self.before.ratio:.1%}.",
                *map(str, self.dropped),
            ]
        )


@dataclass(frozen=True)
class Ladder:
    """Buckets in tokens, strictly ascending; a prompt is padded to the smallest one that holds it.

    The last bucket is the ceiling: longer prompts are not padded. All methods raise ``LadderError`` for what no ladder
    can be made from.
    """

    buckets: Sequence[int]
    """Any iterable is taken; kept as a tuple."""

    given: bool = field(default=True, compare=False, repr=False, kw_only=True)
    """The user's own list, which is not changed without a word."""

    def __post_init__(self) -> None:
        buckets = tuple(
            _whole(f"buckets[{at}]", bucket) for at, bucket in enumerate(_iterable("buckets", self.buckets))
        )
        if not buckets:
            raise LadderError("buckets is empty: a ladder has at least one bucket.")
        for at in range(1, len(buckets)):
            if buckets[at] <= buckets[at - 1]:
                raise LadderError(
                    f"buckets[{at}] is {buckets[at]}, behind {buckets[at - 1]}; buckets ascend and each is there once. "
                    "Give sorted(set(buckets))."
                )
        object.__setattr__(self, "buckets", buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Iterator[int]:
        return iter(self.buckets)

    @property
    def ceiling(self) -> int:
        """The last bucket."""
        return self.buckets[-1]

    @classmethod
    def default(cls, ceiling: int) -> "Ladder":
        """4 to 32 by 4, to 256 by 16, to 512 by 32, to 1024 by 64, to 4096 by 256, then by 512; and the ceiling.

        The steps are those of a widely used serving engine: 42 buckets to 2048, 50 to 4096, 58 to 8192.
        """
        ceiling = _whole("ceiling", ceiling)
        buckets: list[int] = []
        start = 0
        for end, step in (*DEFAULT_STEPS, (ceiling, LAST_STEP)):
            buckets += range(start + step, min(end, ceiling) + 1, step)
            start = end
        if not buckets or buckets[-1] < ceiling:
            buckets.append(ceiling)
        return cls(buckets, given=False)

    @classmethod
    def relative(cls, ceiling: int, waste: float) -> "Ladder":
        """Each bucket as large as it can be with no prompt padded by more than ``waste`` (0.1: a tenth) of its length.

        The worst prompt of a bucket is one token longer than the bucket before.
        """
        ceiling = _whole("ceiling", ceiling)
        if isinstance(waste, bool) or not isinstance(waste, Real) or not 0 < waste <= 1:
            raise LadderError(
                f"waste is {waste!r}; it must be a number above 0 and at most 1, the padded tokens of the worst prompt "
                "over its live tokens (0.1: a tenth)."
            )
        # As it is written: in binary, 475 * 1.36 is less than 646.
        factor = 1 + Fraction(str(waste))
        buckets: list[int] = []
        while (shortest := buckets[-1] + 1 if buckets else 1) <= ceiling:
            if len(buckets) == MOST_BUCKETS:
                raise LadderError(
                    f"waste={waste!r} up to {ceiling} makes more than {MOST_BUCKETS:,} buckets. Give a larger waste or "
                    "a lower ceiling."
                )
            buckets.append(min(ceiling, int(shortest * factor)))
        return cls(buckets, given=False)

    @classmethod
    def from_lengths(cls, lengths: Lengths, count: int, multiple: int = 1, ceiling: int | None = None) -> "Ladder":
        """The ladder of at most ``count`` buckets with the fewest padded tokens on ``lengths``: exactly, no heuristic.

        Every bucket is a multiple of ``multiple``. The ceiling, rounded up to one, is always a bucket; without one it
        is the longest prompt. Prompts above it do not count. ``lengths`` is read once, and what is kept of it is how
        often each length occurs. See Note [The cheapest ladder].
        """
        count, multiple = _whole("count", count), _whole("multiple", multiple)
        rows = count_lengths(lengths)
        top = max(rows) if ceiling is None else _whole("ceiling", ceiling)
        _check_multiple(multiple, top)
        top = _whole("The rounded ceiling", _round_up(top, multiple))
        if top < min(rows):
            raise LadderError(
                f"ceiling is {top}, and the shortest length is {min(rows)}: no prompt fits. Give a higher ceiling."
            )
        rounded = Counter({top: 0})
        for length, number in rows.items():
            if length <= top:
                rounded[_round_up(length, multiple)] += number
        values = sorted(rounded)
        return cls(fewest_padded(values, [rounded[value] for value in values], count), given=False)

    def multiple_of(self, multiple: int) -> "Ladder":
        """The ladder with each bucket, the ceiling too, rounded up to a multiple, and duplicates dropped.

        Some kernels ask for it (8 rows for DeepEP: other numbers can hang its capture). Warns, with both ladders, if
        that changes a list that the user wrote.
        """
        _check_multiple(_whole("multiple", multiple), self.ceiling)
        rounded = tuple(dict.fromkeys(_round_up(bucket, multiple) for bucket in self))
        if rounded == self.buckets:
            return self
        made = replace(self, buckets=rounded)
        if self.given:
            warnings.warn(
                f"The ladder {list(self)} has buckets that are not multiples of {multiple}; it is now {list(made)}.",
                UserWarning,
                stacklevel=2,
            )
        return made

    def bucket_for(self, rows: int) -> int | None:
        """The smallest bucket that holds so many rows; ``None`` if none does."""
        at = bisect_left(self.buckets, _whole("rows", rows))
        return self.buckets[at] if at < len(self.buckets) else None

    def waste(self, lengths: Lengths) -> Waste:
        """What padding to this ladder costs on prompts of these lengths, which are read once."""
        rows = count_lengths(lengths)
        fit = {length: number for length, number in rows.items() if length <= self.ceiling}
        live = sum(length * number for length, number in fit.items())
        filled = sum(bucket * number for bucket, number in zip(self, self._rows(fit), strict=True))
        fitting = sum(fit.values())
        return Waste(
            rows=fitting,
            live=live,
            padded=filled - live,
            rows_above=rows.total() - fitting,
            live_above=sum(length * number for length, number in rows.items()) - live,
        )

    def fit(
        self,
        lengths: Lengths,
        cost: Callable[[int], int] | Mapping[int, int],
        byte_budget: int,
        reserve_bytes: int = 0,
    ) -> FittedLadder:
        """Drop rungs until the ladder's bytes keep within a budget, and say which ones and what each costs.

        ``cost`` gives the bytes of a bucket; those of several add up. ``reserve_bytes`` of the budget are for what
        break functions take for themselves (``plan.reserves``), and no rung gets them. The rungs that save the fewest
        padded tokens on ``lengths`` for their bytes go; the ceiling stays (``choose.keep_within``).
        """
        budget = _whole("byte_budget", byte_budget, least=0, most=None)
        reserve = _whole("reserve_bytes", reserve_bytes, least=0, most=None)
        rows = count_lengths(lengths)
        costs = [self._cost(bucket, cost) for bucket in self]
        if costs[-1] > budget - reserve:
            reserved = f", of which {reserve:,} are reserved" if reserve else ""
            raise LadderError(
                f"The ceiling {self.ceiling} alone takes {costs[-1]:,} bytes, and byte_budget is {budget:,}{reserved}. "
                "Give a larger budget or a ladder with a lower ceiling."
            )
        own = self._rows(rows)
        kept = keep_within(self.buckets, own, costs, budget - reserve)
        made = replace(self, buckets=tuple(self.buckets[at] for at in kept))
        dropped = []
        for at in sorted(set(range(len(self))) - set(kept)):
            bucket, after = self.buckets[at], self.buckets[min(k for k in kept if k > at)]
            dropped.append(DroppedRung(bucket, after, own[at], own[at] * (after - bucket), costs[at]))
        return FittedLadder(
            ladder=made,
            dropped=tuple(dropped),
            budget=budget,
            reserve=reserve,
            bytes_before=sum(costs),
            bytes_after=sum(costs[at] for at in kept),
            before=self.waste(rows),
            after=made.waste(rows),
        )

    def _rows(self, rows: Mapping[int, int]) -> list[int]:
        """How many prompts go to each bucket."""
        found = [0] * len(self)
        for length, number in rows.items():
            if length <= self.ceiling:
                found[bisect_left(self.buckets, length)] += number
        return found

    @staticmethod
    def _cost(bucket: int, cost: Callable[[int], int] | Mapping[int, int]) -> int:
        if not isinstance(cost, Mapping):
            found = cost(bucket)
        elif bucket in cost:
            found = cost[bucket]
        else:
            raise LadderError(f"cost has no bytes for bucket {bucket}. Give them for each bucket, or a function.")
        return _whole(f"The cost of bucket {bucket}", found, least=0, most=None)


def count_lengths(lengths: Lengths) -> Counter[int]:
    """How many prompts have each length; every length is checked. Raises ``LadderError`` if there is none."""
    if isinstance(lengths, Mapping):
        found: Counter[int] = Counter()
        for length, number in lengths.items():
            found[_whole("A length", length)] = _whole(f"The number of prompts of length {length}", number, most=None)
    else:
        found = Counter(_checked(_iterable("lengths", lengths)))
    if not found:
        raise LadderError("lengths is empty: give the length of at least one prompt.")
    return found


def _checked(lengths: Iterable[int]) -> Iterator[int]:
    for row, length in enumerate(lengths):
        # The usual case first and in place: there may be millions of rows.
        yield length if type(length) is int and 0 < length <= LARGEST else _whole(f"lengths[{row}]", length)


def _whole(name: str, value: Any, least: int = 1, most: int | None = LARGEST) -> int:
    """A whole number between bounds, of Python or NumPy. ``True`` is never meant as one."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise LadderError(f"{name} is {value!r} ({type(value).__name__}); it must be an int.")
    value = int(value)
    if value < least:
        raise LadderError(f"{name} is {value}; it must be at least {least}.")
    if most is not None and value > most:
        raise LadderError(f"{name} is {value}; it must be at most {most}, the largest int32.")
    return value


def _iterable(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, Iterable):
        raise LadderError(f"{name} is {value!r} ({type(value).__name__}); it must be a list of ints.")
    return value


def _check_multiple(multiple: int, ceiling: int) -> None:
    if multiple > ceiling:
        raise LadderError(
            f"multiple is {multiple}, above the ceiling {ceiling}: the ladder would be that one bucket. Give a smaller "
            "multiple or a higher ceiling."
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
