"""Compares two results tensor by tensor, whatever they are nested in: bit by bit, and within a tolerance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: How far apart two tensors are close: a part of the largest number, and so much more. The numbers are those of
#: ``torch.testing.assert_close``; it takes the part of each number, but small ones are what is left of large ones.
TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Difference:
    """One place where two results differ.

    ``where``    the path to it, e.g. ``.logits`` or ``['a'][0]``
    ``what``     in words
    ``largest``  the largest absolute difference; infinite where there is none to speak of: a NaN against a number,
                 another shape, another type
    ``close``    whether it is within the tolerance of the dtype, see ``TOLERANCES``
    """

    where: str
    what: str
    largest: float = math.inf
    close: bool = False


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


def tensor_difference(got: torch.Tensor, expected: torch.Tensor, where: str = "") -> Difference | None:
    """What differs between two tensors, ``None`` if nothing does."""
    for what in ("shape", "dtype", "device"):
        one, other = getattr(got, what), getattr(expected, what)
        if one != other:
            one, other = (tuple(one), tuple(other)) if what == "shape" else (one, other)
            return Difference(where, f"has {what} {one} instead of {other}")
    one, other = _flat(got), _flat(expected)
    differs = _bits(one) != _bits(other)
    if one.is_floating_point():
        one, other = one.double(), other.double()
        differs &= ~(one.isnan() & other.isnan())
    count = int(differs.sum())
    if count == 0:
        return None
    gap = (one[differs].double() - other[differs].double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    largest = float(gap.max())
    part, more = TOLERANCES.get(expected.dtype, (0.0, -1.0))
    close = largest <= part * float(other.double().abs().nan_to_num(posinf=0).max()) + more
    return Difference(where, f"{count:,} of {len(one):,} numbers differ", largest, close)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.resolve_neg().reshape(-1)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_INTEGERS[flat.element_size()])


def _gap(got: Any, expected: Any) -> float:
    if isinstance(got, (int, float)) and not isinstance(got, bool):
        gap = abs(got - expected)
        return float(gap) if gap == gap else math.inf
    return math.inf


def _names(parts: Mapping[Any, Any]) -> str:
    return f"{len(parts)} items ({', '.join(map(str, list(parts)[:8]))}{', …' if len(parts) > 8 else ''})"
