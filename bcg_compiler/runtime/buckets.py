"""Buckets at run time: which one a call goes to, and what tensors look like in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.facts import TensorSpec
from bcg_compiler.plan import Padding, Plan, Value
from bcg_compiler.plan.padding import symbol_sources
from bcg_compiler.plan.sizes import evaluate, substitute, symbols_in
from bcg_compiler.runtime.memory import Form, dense


@dataclass(frozen=True)
class Bucket:
    """One row count that a program is captured for.

    ``others`` are the sizes that are not padded; ``symbols`` all open sizes, with ``rows`` for the padded one.
    """

    rows: int
    others: tuple[int, ...]
    symbol: str
    symbols: Mapping[str, int]

    def tells(self, value: Value) -> bool:
        """Whether it says all sizes of a value: not so if one of them was read from data."""
        sizes = (value.size, *(size for spec in value.specs for size in (*spec.shape, *spec.strides)))
        return all(symbols_in(size) <= self.symbols.keys() for size in sizes if size)

    def form(self, spec: TensorSpec, grad: bool = False) -> Form:
        """What a tensor of the plan looks like in this bucket."""
        shape = torch.Size(evaluate(size, self.symbols) for size in spec.shape)
        strides = tuple(evaluate(stride, self.symbols) for stride in spec.strides)
        return Form(shape, dense(shape, strides), getattr(torch, spec.dtype), torch.device(spec.device), grad)

    def live(self, size: str) -> str:
        """An expression for how much of a size is live, over ``rows``, the live rows of a call."""
        return substitute(size, {**self.symbols, self.symbol: "rows"})

    def cuts(self, spec: TensorSpec) -> list[tuple[int, str, int]]:
        """(dimension, live part as an expression, size in this bucket) for each dimension that has rows."""
        sizes = enumerate(spec.shape)
        return [(d, self.live(s), evaluate(s, self.symbols)) for d, s in sizes if self.symbol in symbols_in(s)]


class Sizes:
    """Reads the sizes that a plan leaves open from the arguments of a call.

    ``conditions`` are what must hold of them, beyond those of the padding.
    """

    def __init__(self, plan: Plan, padding: Padding, conditions: Iterable[str] = ()) -> None:
        self.padding = padding
        more = (condition for condition in conditions if padding.symbol in symbols_in(condition))
        self._conditions = tuple(dict.fromkeys((*padding.conditions, *more)))
        sources = symbol_sources(plan)
        self._rows = sources.pop(padding.symbol)
        self._others = tuple(sources.items())
        self._usable: dict[tuple[int, ...], tuple[int, ...]] = {}

    def rows(self, args: Sequence[Any]) -> int:
        """The live rows."""
        return _read(args, *self._rows)

    def others(self, args: Sequence[Any]) -> tuple[int, ...]:
        """All other open sizes: those that are captured as they are."""
        return tuple([_read(args, position, dim) for _, (position, dim) in self._others])

    def bucket(self, rows: int, others: tuple[int, ...]) -> Bucket:
        """The bucket of so many rows."""
        symbols = dict(zip((symbol for symbol, _ in self._others), others, strict=True))
        return Bucket(rows, others, self.padding.symbol, {**symbols, self.padding.symbol: rows})

    def usable(self, others: tuple[int, ...]) -> tuple[int, ...]:
        """The buckets for which the graph is the one that was traced."""
        found = self._usable.get(others)
        if found is None:
            found = tuple(rows for rows in self.padding.buckets if self._holds(self.bucket(rows, others)))
            self._usable[others] = found
        return found

    def holds(self, rows: int, others: tuple[int, ...]) -> bool:
        """Whether the graph is the one that was traced for so many rows."""
        return self._holds(self.bucket(rows, others))

    def _holds(self, bucket: Bucket) -> bool:
        try:
            return all(evaluate(condition, bucket.symbols) for condition in self._conditions)
        except KeyError:  # it depends on what is no size, or nobody here can compute it
            return False


def read_sizes(plan: Plan, args: Sequence[Any]) -> dict[str, int]:
    """All sizes that a plan leaves open, as they are in a call."""
    return {symbol: _read(args, position, dim) for symbol, (position, dim) in symbol_sources(plan).items()}


def _read(args: Sequence[Any], position: int, dim: int | None) -> int:
    value = args[position]
    if dim is None:
        return int(value)
    rank = value.dim()
    return int(value.shape[dim] if dim < rank else value.stride(dim - rank))
