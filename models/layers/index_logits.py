"""Index scores over keys of 8 bits by one Triton kernel: on CUDA, where Triton is installed.

In torch the products of all heads with all keys are written to memory before they are summed up; the kernel keeps a
tile of the sums in registers and goes through the heads.
"""

import torch

from bcg_compiler.models.layers import fp8
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.gpus import lacking

#: Tokens and keys of a tile.
TILE = 64, 128

#: Logits that are held at once: a block of tokens is as long as fits. 2^27 float32 are 512 MiB.
_LOGITS = 1 << 27


def unavailable(device: torch.device) -> str:
    """Why the kernel is not used on a device; "" if it is."""
    return lacking(device, (8, 9), triton=True)  # the first with 8-bit floating point


def refuses(
    batch: PrefillBatch, query: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, chosen: torch.Tensor
) -> str:
    """Why the kernel cannot do such a call; "" if it can."""
    if not fp8.is_packed(key_cache):
        return f"the index cache holds {key_cache.dtype}: build the model with fp8_index=True"
    if (width := query.shape[2]) not in (32, 64, 128, 256):
        return f"index keys are 32, 64, 128 or 256 wide, not {width}"
    return ""


def index_top_k(
    batch: PrefillBatch, query: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, chosen: torch.Tensor
) -> None:
    """``reference.index_top_k`` for a packed ``key_cache``: all requests at once."""
    most = min(chosen.shape[1], batch.longest_context)
    chosen[:, most:].fill_(-1)
    step = max(1, _LOGITS // batch.longest_context)
    for start in range(0, batch.tokens, step):
        rows = slice(start, min(start + step, batch.tokens))
        best = index_logits(query, weights, key_cache, batch, rows).topk(most, dim=-1)
        chosen[rows, :most] = best.indices.masked_fill_(best.values == -torch.inf, -1)


def index_logits(
    query: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, batch: PrefillBatch, rows: slice
) -> torch.Tensor:
    """``sum over heads of weight * relu(query · key)`` for some tokens of a batch and the keys of their requests.

    ``query`` float8_e4m3 ``[tokens, heads, width]``, contiguous; ``weights`` float32 ``[tokens, heads]``; packed
    ``key_cache`` ``[pages, page_size, width + 4]``. Float32 ``[tokens of rows, longest context of the batch]``, -inf
    for what a token does not see.
    """
    from bcg_compiler.models.layers import index_kernel

    _, heads, width = query.shape
    keys, scales = fp8.parts(key_cache.flatten(0, 1))
    longest = batch.longest_context
    out = torch.empty(rows.stop - rows.start, longest, dtype=torch.float32, device=query.device)
    tiles = -(-max(batch.lengths) // TILE[0])
    index_kernel.index_logits[len(batch.lengths) * tiles, -(-longest // TILE[1])](
        query,
        weights,
        keys,
        scales,
        batch.starts,
        batch.positions,
        batch.page_table,
        out,
        rows.start,
        rows.stop,
        longest,
        tiles,
        batch.page_table.stride(0),
        query.stride(0),
        weights.stride(0),
        ROW=key_cache.shape[2],
        HEADS=heads,
        WIDTH=width,
        PAGE=batch.page_size,
        TOKENS=TILE[0],
        KEYS=TILE[1],
        num_warps=8,
    )
    return out
