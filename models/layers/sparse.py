"""MLA over chosen tokens that reads only those: for GPUs, in plain torch.

The reference computes the scores of all tokens of the context and drops most of them. Here the rows of the chosen
tokens are gathered, so that the work grows with their number and not with the context.
"""

import torch

from bcg_compiler.models.layers.batch import PrefillBatch

#: Numbers that are gathered at once: a block of tokens is as long as fits. 2^27 in bfloat16 are 256 MiB.
_GATHERED = 1 << 27


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


def _slots(batch: PrefillBatch, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each chosen place its slot int64 ``[tokens, most]``, and whether the token looks at it."""
    seen = (chosen >= 0) & (chosen <= batch.positions[:, None])
    places = chosen.long().where(seen, 0)
    pages = batch.page_table[batch.owners[:, None], places // batch.page_size]
    return pages.long() * batch.page_size + places % batch.page_size, seen
