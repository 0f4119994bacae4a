"""How far apart two tensors are: bit by bit, and within a tolerance."""

import math
from dataclasses import dataclass

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


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal, or within the tolerance of their dtype."""
    difference = tensor_difference(got, expected)
    return difference is None or difference.close


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.resolve_neg().reshape(-1)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_INTEGERS[flat.element_size()])
