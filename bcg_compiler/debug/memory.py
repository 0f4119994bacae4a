"""Bytes of a plan for numbers in place of the sizes that it leaves open."""

from collections.abc import Sequence
from dataclasses import dataclass

from bcg_compiler.buckets import Ladder
from bcg_compiler.plan import Plan
from bcg_compiler.plan.allocator import simulate
from bcg_compiler.plan.memory import Forecast, Symbols, forecast_each, forecast_ladder, step_events, tensor_bytes
from bcg_compiler.plan.padding import symbol_sources
from bcg_compiler.plan.plan import Step, Value
from bcg_compiler.plan.sizes import evaluate


@dataclass(frozen=True)
class BucketUse:
    """One bucket: what a capture of it takes by itself (``None`` if a size cannot be told), how many prompts go to it,
    how many tokens they have and how many are padded to them.
    """

    rows: int
    forecast: Forecast | None
    prompts: int = 0
    live: int = 0
    padded: int = 0


def sizes_of(plan: Plan, length: int | None) -> Symbols:
    """The sizes that bytes are told for: the largest bucket, else ``length`` tokens, if that is all that is open."""
    if plan.padding is not None:
        return {plan.padding.symbol: plan.padding.buckets[-1]}
    return dict.fromkeys(symbols, length) if len(symbols := symbol_sources(plan)) == 1 and length else {}


def forecast_of(plan: Plan, *lengths: int) -> Forecast | None:
    """What captures of the plan take together: of all buckets, else of the exact shapes of these lengths; ``None`` if a
    size cannot be told.
    """
    try:
        if plan.padding is not None:
            return forecast_ladder(plan, [{plan.padding.symbol: rows} for rows in reversed(plan.padding.buckets)])
        return forecast_ladder(plan, [sizes_of(plan, length) for length in lengths or (None,)])
    except KeyError:
        return None


def buckets_of(plan: Plan, lengths: Sequence[int]) -> list[BucketUse]:
    """All buckets, with the prompts that go to them."""
    if plan.padding is None:
        return []
    ladder, used = Ladder(plan.padding.buckets), dict[int, list[int]]()
    for length in lengths:
        if (bucket := ladder.bucket_for(length)) is not None:
            used.setdefault(bucket, []).append(length)
    buckets = plan.padding.buckets
    forecasts: Sequence[Forecast | None] = _forecasts(plan, [{plan.padding.symbol: rows} for rows in buckets])
    prompts = [used.get(rows, []) for rows in buckets]
    return [
        BucketUse(rows, found, len(at), sum(at), rows * len(at) - sum(at))
        for rows, found, at in zip(buckets, forecasts, prompts, strict=True)
    ]


def value_bytes(value: Value, symbols: Symbols) -> int | None:
    """The bytes of a value's tensors; ``None`` if a size cannot be told."""
    try:
        return sum(tensor_bytes(spec, symbols) for spec in value.specs)
    except KeyError:
        return None


def size_in_bytes(text: str, symbols: Symbols) -> int | None:
    """The number that a size is; ``None`` if it cannot be told."""
    try:
        return evaluate(text, symbols)
    except KeyError:
        return None


def peak(step: Step, symbols: Symbols) -> int | None:
    """The most bytes that storages which the step allocates take at one time."""
    try:
        return simulate(step_events(step, symbols)).peak
    except KeyError:
        return None


def _forecasts(plan: Plan, buckets: Sequence[Symbols]) -> Sequence[Forecast | None]:
    try:
        return forecast_each(plan, buckets)
    except KeyError:
        return [None] * len(buckets)
