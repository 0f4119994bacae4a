"""Fakes of one bucket's sizes: what a unit is compiled for where its code is not to serve all buckets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bcg_compiler.compat.fake import FakeTensorMode, size_expression
from bcg_compiler.plan.sizes import evaluate


def exact_fakes(fakes: Sequence[Any], mode: FakeTensorMode, sizes: Mapping[str, int]) -> list[Any] | None:
    """The same fakes with ``sizes``, by the symbols of the graph, in place of what they leave open.

    ``None`` if they leave nothing open, or what none of these sizes says.
    """
    try:
        found = [_exact(fake, mode, sizes) for fake in fakes]
    except KeyError:
        return None
    return found if any(new is not old for new, old in zip(found, fakes, strict=True)) else None


def _exact(fake: Any, mode: FakeTensorMode, sizes: Mapping[str, int]) -> Any:
    if isinstance(fake, torch.SymInt):
        return _number(fake, sizes)
    if not isinstance(fake, torch.Tensor) or not any(
        isinstance(s, torch.SymInt) for s in (*fake.shape, *fake.stride())
    ):
        return fake
    shape, strides = ([_number(size, sizes) for size in of] for of in (fake.shape, fake.stride()))
    with mode, torch.inference_mode(False):
        made = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    return made.requires_grad_(fake.requires_grad) if fake.is_floating_point() else made


def _number(size: Any, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else evaluate(str(size_expression(size)), sizes)
