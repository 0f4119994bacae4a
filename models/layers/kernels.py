"""Which implementation of an operation is in use: the first one of its list that the device can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.models.layers import reference


@dataclass(frozen=True)
class Kernel:
    """One implementation. ``name`` is what is printed; ``runs_on`` says whether it is there for a device."""

    name: str
    run: Callable[..., Any]
    runs_on: Callable[[torch.device], bool] = lambda device: True


#: Best first. All implementations of one operation take the same arguments, see ``reference``.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "grouped_query_attention": (Kernel("torch", reference.grouped_query_attention),),
    "mla_attention": (Kernel("torch", reference.mla_attention),),
    "index_top_k": (Kernel("torch", reference.index_top_k),),
    "experts": (Kernel("torch", reference.experts),),
}


def kernel(operation: str, device: torch.device) -> Kernel:
    """The implementation in use for tensors on ``device``."""
    return next(found for found in KERNELS[operation] if found.runs_on(device))


def in_use(device: torch.device | str) -> dict[str, str]:
    """Operation → name of the implementation in use: to print."""
    return {operation: kernel(operation, torch.device(device)).name for operation in KERNELS}
