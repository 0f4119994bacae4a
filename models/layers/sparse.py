"""MLA over chosen tokens that reads only those: for GPUs, by one Triton kernel, or in plain torch.

The reference computes the scores of all tokens of the context and drops most of them. Here only the rows of the chosen
tokens are read, so that the work grows with their number and not with the context. In plain torch they are gathered in
memory first, block by block; the kernel gathers them where it multiplies.
"""

import math

import torch

from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.gpus import lacking

#: Numbers that are gathered at once: a block of tokens is as long as fits. 2^27 in bfloat16 are 256 MiB.
_GATHERED = 1 << 27

#: Chosen tokens that the kernel reads at once.
_KEYS = 64


def unavailable(device: torch.device) -> str:
    """Why this is not used on a device; "" if it is."""
    return "" if device.type == "cuda" else "it is for GPUs; on a CPU results are those of the reference bit by bit"


def refuses(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor,
) -> str:
    """Why gathering is no use for such a call; "" if it is."""
    return "all tokens are chosen" if batch.longest_context <= chosen.shape[1] else ""


def mla_attention(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor,
) -> None:
    """``reference.mla_attention`` to ``chosen``, of which those of one token differ from each other."""
    latents, rotary = latent_cache.flatten(0, 1), rotary_cache.flatten(0, 1)
    slots, seen = _slots(batch, chosen)
    step = max(1, _GATHERED // (chosen.shape[1] * (latents.shape[1] + rotary.shape[1])))
    for start in range(0, batch.tokens, step):
        rows = slice(start, start + step)
        keys = latents[slots[rows]]  # [rows, chosen, rank]
        scores = torch.bmm(q_rotary[rows], rotary[slots[rows]].mT)  # [rows, heads, chosen]
        scores = torch.baddbmm(scores, q_latent[rows], keys.mT).float() * scale
        shares = scores.masked_fill_(~seen[rows, None], -torch.inf).softmax(-1).to(keys.dtype)
        out[rows] = torch.bmm(shares, keys)


def fused_unavailable(device: torch.device) -> str:
    """Why the kernel is not used on a device; "" if it is."""
    return lacking(device, (8, 0), triton=True)


def fused_refuses(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor,
) -> str:
    """Why the kernel cannot do such a call; "" if it can."""
    if q_latent.dtype not in (torch.float16, torch.bfloat16):
        return f"queries are {q_latent.dtype}, and the kernel is for 16 bits"
    widths = q_latent.shape[2], q_rotary.shape[2]
    if any(width < 16 or width & width - 1 for width in widths) or widths[0] > 512:
        return f"the latent and its rotary part, {widths[0]} and {widths[1]} wide, must be powers of two from 16 to 512"
    return ""


def fused_mla_attention(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor,
) -> None:
    """``mla_attention`` in one kernel; of each row of ``chosen`` all that are not -1 stand first."""
    from bcg_compiler.models.layers import sparse_kernel

    tokens, heads, rank = q_latent.shape
    rows = 16 if heads <= 16 else 32
    q_latent, q_rotary = (q if q.stride(2) == 1 else q.contiguous() for q in (q_latent, q_rotary))
    sparse_kernel.sparse_mla[tokens, -(-heads // rows)](
        q_latent,
        q_rotary,
        latent_cache,
        rotary_cache,
        chosen,
        batch.owners,
        batch.positions,
        batch.page_table,
        out,
        chosen.shape[1],
        batch.page_table.stride(0),
        chosen.stride(0),
        *q_latent.stride()[:2],
        *q_rotary.stride()[:2],
        *out.stride()[:2],
        scale * math.log2(math.e),
        HEADS=heads,
        RANK=rank,
        ROTARY=q_rotary.shape[2],
        PAGE=batch.page_size,
        ROWS=rows,
        KEYS=_KEYS,
        num_warps=4 if rows == 16 else 8,
        num_stages=2,
    )


def _slots(batch: PrefillBatch, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each chosen place its slot int64 ``[tokens, most]``, and whether the token looks at it."""
    seen = (chosen >= 0) & (chosen <= batch.positions[:, None])
    places = chosen.long().where(seen, 0)
    pages = batch.page_table[batch.owners[:, None], places // batch.page_size]
    return pages.long() * batch.page_size + places % batch.page_size, seen
