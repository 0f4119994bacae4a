"""Which implementation of an operation is in use: the first one of its list that the device, and the call, can have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.models.layers import flashinfer, grouped, index_logits, reference, sparse


def _nothing(*args: Any) -> str:
    return ""


@dataclass(frozen=True)
class Kernel:
    """One implementation.

    Attributes:
        name: what is printed.
        run: takes the arguments of the reference.
        unavailable: why it is not there for a device; "" if it is.
        refuses: why it cannot do a call, of the arguments of ``run``; "" if it can.
    """

    name: str
    run: Callable[..., Any]
    unavailable: Callable[[torch.device], str] = _nothing
    refuses: Callable[..., str] = _nothing


#: Best first. All implementations of one operation take the same arguments, see ``reference``.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    "grouped_query_attention": (
        Kernel(
            "flashinfer",
            flashinfer.grouped_query_attention,
            flashinfer.unavailable,
            flashinfer.refuses_grouped_query_attention,
        ),
        Kernel("torch", reference.grouped_query_attention),
    ),
    "mla_attention": (
        Kernel("flashinfer", flashinfer.mla_attention, flashinfer.unavailable, flashinfer.refuses_mla_attention),
        Kernel("torch", reference.mla_attention),
    ),
    "sparse_mla_attention": (
        Kernel("triton", sparse.fused_mla_attention, sparse.fused_unavailable, sparse.fused_refuses),
        Kernel("torch gather", sparse.mla_attention, sparse.unavailable, sparse.refuses),
        Kernel("torch", reference.mla_attention),
    ),
    "index_top_k": (
        Kernel("triton fp8", index_logits.index_top_k, index_logits.unavailable, index_logits.refuses),
        Kernel("torch", reference.index_top_k),
    ),
    "experts": (
        Kernel("torch grouped", grouped.experts, grouped.unavailable, grouped.refuses),
        Kernel("torch", reference.experts),
    ),
}


def kernel(operation: str, device: torch.device, *args: Any) -> Kernel:
    """The implementation in use on ``device``: for a call with ``args``; without them, for a call that all can do."""
    return next(
        found for found in KERNELS[operation] if not found.unavailable(device) and not (args and found.refuses(*args))
    )


@functools.cache
def _there(found: Kernel, device: torch.device) -> bool:
    """To look what is installed takes longer than most breaks: it is done once."""
    return not found.unavailable(device)


def run(operation: str, device: torch.device, *args: Any) -> None:
    """Run an operation by the best implementation that can do this call."""
    next(found for found in KERNELS[operation] if _there(found, device) and not found.refuses(*args)).run(*args)


def in_use(device: torch.device | str) -> dict[str, str]:
    """Operation → name of the implementation in use: to print."""
    return {operation: kernel(operation, torch.device(device)).name for operation in KERNELS}


def choices(device: torch.device | str) -> dict[str, dict[str, str]]:
    """Operation → each implementation by name, best first → why it is not in use on a device, "" if it is there."""
    where = torch.device(device)
    return {
        operation: {found.name: found.unavailable(where) for found in kernels} for operation, kernels in KERNELS.items()
    }
