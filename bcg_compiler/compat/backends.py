"""Choices of the process that kernels depend on and Dynamo does not guard."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

#: For each kind of device the dtype of autocast, ``None`` where it is off.
Autocast = tuple[torch.dtype | None, ...]

_DEVICES = ("cpu", "cuda")


def autocast_now() -> Autocast:
    """The autocast of the thread."""
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _DEVICES)


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Within it autocast is as it was for ``state``."""
    with ExitStack() as stack:
        for device, now, dtype in zip(_DEVICES, autocast_now(), state, strict=True):
            if now != dtype:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=dtype is not None))
        yield


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose now (``torch.nn.attention.sdpa_kernel``)."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )
