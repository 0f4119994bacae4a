"""Index scores over keys of 8 bits by one Triton kernel: on CUDA, where Triton is installed.

In torch the products of all heads with all keys are written to memory before they are summed up; the kernel keeps a
tile of the sums in registers and goes through the heads.
"""

from importlib.util import find_spec

import torch

from bcg_compiler.models.layers import fp8
from bcg_compiler.models.layers.batch import PrefillBatch, Request

#: Tokens and keys of a tile.
TILE = 64, 128

#: Logits that are held at once: a block of tokens is as long as fits. 2^27 float32 are 512 MiB.
_LOGITS = 1 << 27


def unavailable(device: torch.device) -> str:
    """Why the kernel is not used on a device; "" if it is."""
    if device.type != "cuda" or torch.version.hip:
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "it needs a GPU with 8-bit floating point, compute capability 8.9 or newer"
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'bcg-compiler[triton]'"
    return ""


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
    """``reference.index_top_k`` for a packed ``key_cache``."""
    values, scales = fp8.quantise(query)
    # relu(s * x) is s * relu(x) for a positive s: the scale of a query can go into its weight.
    weights = weights * scales
    chosen.fill_(-1)
    for request in batch.requests:
        most = min(chosen.shape[1], request.context)
        step = max(1, _LOGITS // request.context)
        for start in range(request.start, request.stop, step):
            rows = slice(start, min(start + step, request.stop))
            first = request.prefix + start - request.start
            best = index_logits(values[rows], weights[rows], key_cache, request, first).topk(most, dim=-1)
            chosen[rows, :most] = best.indices.to(chosen.dtype).masked_fill(best.values == -torch.inf, -1)


def index_logits(
    query: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, request: Request, first: int
) -> torch.Tensor:
    """``sum over heads of weight * relu(query · key)`` for each token of a request and each key of its context.

    ``query`` float8_e4m3 ``[tokens, heads, width]``, contiguous, the first token at place ``first``; ``weights``
    float32 ``[tokens, heads]`` with the scales of the query in them; packed ``key_cache`` ``[pages, page_size, width +
    4]``.
    Float32 ``[tokens, context]``, -inf for what a token does not see.
    """
    from bcg_compiler.models.layers import index_kernel

    tokens, heads, width = query.shape
    keys, scales = fp8.parts(key_cache.flatten(0, 1))
    out = torch.empty(tokens, request.context, dtype=torch.float32, device=query.device)
    grid = (-(-tokens // TILE[0]), -(-request.context // TILE[1]))
    index_kernel.index_logits[grid](
        query,
        weights,
        keys,
        scales,
        request.slots,
        out,
        tokens,
        request.context,
        first,
        query.stride(0),
        weights.stride(0),
        out.stride(0),
        ROW=key_cache.shape[2],
        HEADS=heads,
        WIDTH=width,
        TOKENS=TILE[0],
        KEYS=TILE[1],
        num_warps=8,
    )
    return out
