"""How much memory the captures of a plan take, as far as the plan tells. All numbers are bytes.

Counted are the slots, the bridges, the pool of the segments, and what break functions declare to take for themselves.
Not counted is what no tensor shows: workspaces that kernels and cuBLAS take for themselves, the graphs, and what breaks
allocate while they run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bcg_compiler.facts import TensorSpec
from bcg_compiler.plan.allocator import MIN_BLOCK, Event, rounded, simulate
from bcg_compiler.plan.plan import Allocation, Plan, Step
from bcg_compiler.plan.sizes import evaluate

Symbols = Mapping[str, int]


@dataclass(frozen=True)
class Forecast:
    """Bytes of the fixed buffers of inputs (``slots``) and of what breaks make (``bridges``), and the bytes that the
    pool of the ``segments`` reserves; ``reserves`` are those that break functions declare (``reserve_bytes``).
    """

    slots: int
    bridges: int
    segments: int
    reserves: int = 0

    @property
    def captures(self) -> int:
        """What captures hold: what is measured after them."""
        return self.slots + self.bridges + self.segments

    @property
    def total(self) -> int:
        """All of them together."""
        return self.captures + self.reserves


class Interval(NamedTuple):
    """A value of so many ``bytes`` that is needed from step ``first`` to step ``last``, both included."""

    ordinal: int
    bytes: int
    first: int
    last: int


def forecast(plan: Plan, symbols: Symbols) -> Forecast:
    """What a capture of ``plan`` takes where the plan's symbols have these values.

    Raises ``KeyError`` with the name of a symbol that has none.
    """
    return forecast_ladder(plan, [symbols])


def forecast_ladder(plan: Plan, buckets: Sequence[Symbols]) -> Forecast:
    """What captures of ``plan`` take together, one for each of ``buckets`` (values of the symbols), in this order.

    They share one pool, and what one of them allocated is free before the next is captured. They share the memory of
    slots and bridges, too, which is that of the largest. Raises ``KeyError`` as ``forecast`` does.
    """
    return _forecast(plan, buckets, tuple(_segment_sizes(plan)))


def forecast_each(plan: Plan, buckets: Iterable[Symbols]) -> list[Forecast]:
    """What a capture of ``plan`` takes by itself, for each of ``buckets``. Raises ``KeyError`` as ``forecast`` does."""
    sizes = tuple(_segment_sizes(plan))
    return [_forecast(plan, [symbols], sizes) for symbols in buckets]


def _forecast(plan: Plan, buckets: Sequence[Symbols], sizes: Sequence["_Size"]) -> Forecast:
    return Forecast(
        slots=max((slot_bytes(plan, symbols) for symbols in buckets), default=0),
        bridges=max((bridge_bytes(plan, symbols) for symbols in buckets), default=0),
        segments=simulate(event for symbols in buckets for event in _events(sizes, symbols)).reserved,
        reserves=sum(reserve.bytes for reserve in plan.reserves),
    )


def slot_bytes(plan: Plan, symbols: Symbols) -> int:
    """The bytes of all slots of ``plan``."""
    return sum(tensor_bytes(spec, symbols) for slot in plan.slots for spec in plan.value(slot.ordinal).specs)


def bridge_bytes(plan: Plan, symbols: Symbols) -> int:
    """The bytes of all bridges: of those that ``pass``, an arena; each of the others has a buffer of its own."""
    passing = passing_bridges(plan)
    intervals = bridge_intervals(plan, symbols)
    _, arena = assign(i for i in intervals if i.ordinal in passing)
    return arena + sum(i.bytes for i in intervals if i.ordinal not in passing)


def passing_bridges(plan: Plan) -> frozenset[int]:
    """The bridges that nobody needs in the last step, and that may share memory with one another, by ordinal.

    What is returned, seen by a later break, or written is none: it has memory of its own, under an identity of its own.
    """
    return frozenset(kept.ordinal for kept in plan.bridge_ranges if kept.last < plan.steps[-1].index)


def bridge_intervals(plan: Plan, symbols: Symbols) -> list[Interval]:
    """The size of each bridge of ``plan``, and when it is needed."""
    return [
        Interval(
            kept.ordinal,
            sum(tensor_bytes(spec, symbols) for spec in plan.value(kept.ordinal).specs),
            kept.first,
            kept.last,
        )
        for kept in plan.bridge_ranges
    ]


def tensor_bytes(spec: TensorSpec, symbols: Symbols) -> int:
    """The bytes of a buffer with the sizes and strides of ``spec``; 0 for one that has no strides, a sparse tensor."""
    shape = [evaluate(size, symbols) for size in spec.shape]
    if len(spec.strides) != len(shape):
        return 0
    strides = [evaluate(stride, symbols) for stride in spec.strides]
    return span(shape, strides) * getattr(torch, spec.dtype).itemsize


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first one of a tensor to its last one, both included; 0 if it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def assign(intervals: Iterable[Interval]) -> tuple[dict[int, int], int]:
    """Offsets in one arena, by ordinal, and the bytes of the arena.

    No two values share a byte that are needed in the same step. Offsets are multiples of 512, as those of the CUDA
    allocator. The largest value comes first and takes the lowest gap that holds it: "greedy by size" of Pisarchyk and
    Lee, Efficient Memory Management for Deep Neural Net Inference (2020).
    """
    offsets: dict[int, int] = {}
    placed: list[Interval] = []
    total = 0
    for new in sorted(intervals, key=lambda i: (-i.bytes, i.first, i.ordinal)):
        size, start = rounded(new.bytes, MIN_BLOCK), 0
        beside = [i for i in placed if i.first <= new.last and new.first <= i.last]
        for other in sorted(beside, key=lambda i: offsets[i.ordinal]):
            if offsets[other.ordinal] - start >= size:
                break
            start = max(start, offsets[other.ordinal] + rounded(other.bytes, MIN_BLOCK))
        offsets[new.ordinal] = start
        placed.append(new)
        total = max(total, start + size)
    return offsets, total


class _Size(NamedTuple):
    """An ``Event`` whose bytes are an expression yet. In which order storages come and go, no size decides."""

    storage: int
    bytes: str | None = None


def segment_events(plan: Plan, symbols: Symbols) -> Iterator[Event]:
    """What capturing the segments of ``plan`` in order allocates and frees; in the end all is free."""
    return _events(_segment_sizes(plan), symbols)


def step_events(step: Step, symbols: Symbols) -> Iterator[Event]:
    """What running ``step`` allocates and frees; its allocations are named by numbers from 0 on."""
    return _events(_step_sizes(step), symbols)


def _events(sizes: Iterable[_Size], symbols: Symbols) -> Iterator[Event]:
    """Numbers for expressions. Layers are alike, so there are few different ones."""
    known: dict[str | None, int | None] = {None: None}
    for storage, size in sizes:
        if size not in known:
            known[size] = evaluate(str(size), symbols)
        yield Event(storage, known[size])


def _segment_sizes(plan: Plan) -> Iterator[_Size]:
    held: list[tuple[int, Allocation]] = []
    count = 0
    for step in plan.steps:
        if step.kind == "segment":
            yield from _step_sizes(step, count)
            held += [(count + i, a) for i, a in enumerate(step.allocations) if a.dies is None]
            count += len(step.allocations)
        for storage, _ in [pair for pair in held if pair[1].freed == step.index]:
            yield _Size(storage)
        held = [pair for pair in held if pair[1].freed != step.index]
    for storage, _ in held:
        yield _Size(storage)


def _step_sizes(step: Step, first: int = 0) -> Iterator[_Size]:
    born: dict[int, list[tuple[int, Allocation]]] = {}
    dying: dict[int, list[int]] = {}
    for storage, allocation in enumerate(step.allocations, first):
        born.setdefault(allocation.born, []).append((storage, allocation))
        if allocation.lasts is None and allocation.dies is not None:
            dying.setdefault(allocation.dies, []).append(storage)
    for position in range(len(step.nodes)):
        inside: dict[int, list[int]] = {}  # by the storage of the same node after which they are freed
        for storage, allocation in born.get(position, ()):
            yield _Size(storage, allocation.bytes)
            if allocation.lasts is not None:
                inside.setdefault(storage + allocation.lasts, []).append(storage)
            yield from map(_Size, inside.get(storage, ()))
        yield from map(_Size, dying.get(position, ()))
