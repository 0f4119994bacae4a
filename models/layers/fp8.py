"""Rows of 8 bits: float8_e4m3 values with one float32 scale a row, in one cache of bytes.

A row of ``width`` numbers takes ``width + 4`` bytes, the scale last. So a cache stays one tensor of pages, and what
writes and reads pages needs no second one.
"""

import torch

#: The largest number of float8_e4m3.
_LARGEST = 448.0


def packed_width(width: int) -> int:
    """Bytes of a row of ``width`` numbers."""
    return width + 4


def is_packed(cache: torch.Tensor) -> bool:
    """Whether a cache holds packed rows."""
    return cache.dtype == torch.uint8


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8_e4m3 ``[..., width]`` and float32 scales ``[...]`` of ``rows`` ``[..., width]``: their product is near."""
    rows = rows.float()
    scales = rows.abs().amax(-1).clamp(min=1e-10) / _LARGEST
    return (rows / scales[..., None]).to(torch.float8_e4m3fn), scales


def pack(rows: torch.Tensor) -> torch.Tensor:
    """``[..., width]`` to bytes ``[..., width + 4]``. ``width`` is a multiple of 4."""
    values, scales = quantise(rows)
    # The bytes of a scale one by one, the low one first: Inductor cannot view a column as numbers of another size.
    bits = scales.view(torch.int32)[..., None] >> torch.arange(0, 32, 8, device=rows.device)
    return torch.cat([values.view(torch.uint8), (bits & 255).to(torch.uint8)], -1)


def parts(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of packed rows ``[..., width + 4]``: float8_e4m3 ``[..., width]`` and float32 scales ``[...]``."""
    width = packed.shape[-1] - 4
    return packed[..., :width].view(torch.float8_e4m3fn), packed[..., width:].view(torch.float32)[..., 0]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """What packed rows stand for: float32 ``[..., width]``."""
    values, scales = parts(packed)
    return values.float() * scales[..., None]
