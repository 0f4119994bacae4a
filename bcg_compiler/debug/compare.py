"""Compares two results tensor by tensor, whatever they are nested in: bit by bit, and within a tolerance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.checks.numbers import TOLERANCES, Difference, tensor_difference

__all__ = ["TOLERANCES", "Comparison", "Difference", "compare", "tensor_difference"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Comparison:
    """How many tensors were compared, and what differs."""

    tensors: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether everything is the same."""
        return not self.differences


def compare(got: Any, expected: Any, where: str = "") -> Comparison:
    """Compare every tensor and every plain value in ``got`` and ``expected``, which are called ``where``.

    Looks into mappings (a ``ModelOutput`` of transformers is one), lists, tuples and the attributes of other objects.
    Tensors must be equal in shape, dtype, device and bits; NaNs only need to stand at the same places.
    """
    walk = _Walk()
    walk.compare(got, expected, where)
    return Comparison(walk.tensors, tuple(walk.differences))


class _Walk:
    def __init__(self) -> None:
        self.tensors = 0
        self.differences: list[Difference] = []
        self._seen: set[tuple[int, int]] = set()

    def compare(self, got: Any, expected: Any, where: str) -> None:
        if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
            self.tensors += 1
            self._differs(tensor_difference(got, expected, where))
        elif type(got) is not type(expected):
            self._differs(Difference(where, f"is a {type(got).__name__} instead of a {type(expected).__name__}"))
        elif isinstance(got, _PLAIN):
            if got != expected and not (got != got and expected != expected):
                self._differs(Difference(where, f"is {got!r} instead of {expected!r}", _gap(got, expected)))
        elif (id(got), id(expected)) not in self._seen:
            self._seen.add((id(got), id(expected)))
            self._compare_parts(got, expected, where)

    def _compare_parts(self, got: Any, expected: Any, where: str) -> None:
        if isinstance(got, Mapping):
            parts, others = dict(got), dict(expected)
            path = "{}[{!r}]"
        elif isinstance(got, (list, tuple)):
            parts, others = dict(enumerate(got)), dict(enumerate(expected))
            path = "{}[{}]"
        else:
            parts, others = getattr(got, "__dict__", {}), getattr(expected, "__dict__", {})
            path = "{}.{}"
        if list(parts) != list(others):
            return self._differs(Difference(where, f"has {_names(parts)} instead of {_names(others)}"))
        for name, part in parts.items():
            self.compare(part, others[name], path.format(where, name))

    def _differs(self, difference: Difference | None) -> None:
        if difference is not None:
            self.differences.append(difference)


def _gap(got: Any, expected: Any) -> float:
    if isinstance(got, (int, float)) and not isinstance(got, bool):
        gap = abs(got - expected)
        return float(gap) if gap == gap else math.inf
    return math.inf


def _names(parts: Mapping[Any, Any]) -> str:
    return f"{len(parts)} items ({', '.join(map(str, list(parts)[:8]))}{', …' if len(parts) > 8 else ''})"
