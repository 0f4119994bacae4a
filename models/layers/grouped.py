"""Routed experts by grouped matrix products: a few kernels for all experts, and nothing that the host waits for.

The reference reads on the host how many rows each expert gets, and then runs expert by expert.
"""

import torch

from bcg_compiler.models.layers.experts import ExpertGroup
from bcg_compiler.models.layers.gpus import lacking


def unavailable(device: torch.device) -> str:
    """Why this is not used on a device; "" if it is."""
    return lacking(device, (8, 0))


def refuses(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: ExpertGroup, out: torch.Tensor
) -> str:
    """Why this cannot do such a call; "" if it can."""
    return cannot(hidden.dtype, group.count, group.widths)


def cannot(dtype: torch.dtype, count: int, widths: tuple[int, int]) -> str:
    """Why this cannot do ``count`` experts of these ``widths`` (``ExpertGroup``); "" if it can."""
    if dtype != torch.bfloat16:
        return f"grouped products are for bfloat16, not {dtype}"
    if count >= 1 << 15:
        return f"there are {count} experts, and they are numbered in 15 bits"
    if any(width % 8 for width in widths):
        return f"the rows of experts, {' and '.join(map(str, widths))} wide, must be multiples of 8"
    return ""


def experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: ExpertGroup, out: torch.Tensor
) -> None:
    """``reference.experts``; the weighted sums are in float32."""
    if not len(hidden):
        return
    count, chosen = group.count, ids.shape[1]
    here = ids >= 0
    # Rows for experts of other ranks go behind all others, where no group is. A sort takes a pass for a few bits.
    owners, order = ids.where(here, count).flatten().to(torch.int16).sort(stable=True)
    numbers = torch.arange(1, count + 1, dtype=torch.int16, device=ids.device)
    ends = torch.searchsorted(owners, numbers, out_int32=True)
    made = group.grouped(hidden[order // chosen], ends, owners)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    of_token = made[back].unflatten(0, ids.shape).masked_fill_(~here[..., None], 0)
    out.copy_((of_token * weights.where(here, 0)[..., None].float()).sum(1))
