"""What breaks compute, in plain torch on any device. Each takes live rows only and writes into its last tensor."""

from collections.abc import Iterator

import torch

from bcg_compiler.models.layers import cache, fp8
from bcg_compiler.models.layers.batch import PrefillBatch, Request
from bcg_compiler.models.layers.experts import ExpertGroup

#: Scores that are held at once: a block of queries is as long as fits. 2^27 float32 are 512 MiB.
_SCORES = 1 << 27


def grouped_query_attention(
    batch: PrefillBatch,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> None:
    """Causal attention of ``query`` ``[tokens, heads, width]`` to caches ``[pages, page_size, key heads, width]``.

    ``window`` > 0: a token sees so many tokens, itself included. ``sinks`` ``[heads]``: a score for looking nowhere.
    """
    heads, groups = query.shape[1], key_cache.shape[2]
    for request in batch.requests:
        keys, values = cache.read(key_cache, request), cache.read(value_cache, request)  # [context, groups, width]
        for rows, positions in _blocks(request, heads, query.device):
            q = query[rows].unflatten(1, (groups, heads // groups))
            scores = torch.einsum("tgjd,sgd->tgjs", q, keys).flatten(1, 2).float() * scale
            seen = _seen(positions, request, window)
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[None, :, None].expand(len(q), -1, 1)], -1)
            shares = scores.softmax(-1)[..., : request.context].to(values.dtype).unflatten(1, (groups, -1))
            out[rows] = torch.einsum("tgjs,sgd->tgjd", shares, values).flatten(1, 2)


def mla_attention(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor | None,
) -> None:
    """Causal attention in absorbed form: all heads share one key, the latent beside its rotary part.

    ``q_latent`` ``[tokens, heads, rank]``, ``q_rotary`` ``[tokens, heads, rotary width]``, caches ``[pages, page_size,
    rank]`` and ``[pages, page_size, rotary width]``, ``out`` like ``q_latent``. ``chosen``: int32 ``[tokens, most]``,
    the places in its request that each token looks at, -1 behind the last one; ``None`` for all before it.
    """
    for request in batch.requests:
        latents, rotary = cache.read(latent_cache, request), cache.read(rotary_cache, request)
        for rows, positions in _blocks(request, q_latent.shape[1], q_latent.device):
            scores = torch.einsum("thr,sr->ths", q_latent[rows], latents)
            scores = (scores + torch.einsum("thr,sr->ths", q_rotary[rows], rotary)).float() * scale
            seen = _seen(positions, request)
            if chosen is not None:
                seen = seen & _among(chosen[rows], request.context)
            shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).to(latents.dtype)
            out[rows] = torch.einsum("ths,sr->thr", shares, latents)


def index_top_k(
    batch: PrefillBatch, query: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, chosen: torch.Tensor
) -> None:
    """The tokens with the highest index scores, ``sum over heads of weight * relu(query · key)``, for each token.

    ``query`` ``[tokens, heads, width]``, ``weights`` float32 ``[tokens, heads]``, ``key_cache`` ``[pages, page_size,
    width]``, or packed rows (``fp8``): then queries are float8_e4m3, and what they are scaled by is in the weights.
    ``chosen`` int32 ``[tokens, most]`` gets places in the request, -1 behind the last one.
    """
    chosen.fill_(-1)
    for request in batch.requests:
        keys = cache.read(key_cache, request)
        keys = fp8.unpack(keys) if fp8.is_packed(key_cache) else keys.float()
        most = min(chosen.shape[1], request.context)
        for rows, positions in _blocks(request, query.shape[1], query.device):
            products = torch.einsum("thd,sd->ths", query[rows].float(), keys).relu()
            scores = torch.einsum("th,ths->ts", weights[rows], products)
            scores = scores.masked_fill(~_seen(positions, request), -torch.inf)
            best = scores.topk(most, dim=-1)
            chosen[rows, :most] = best.indices.to(chosen.dtype).masked_fill(best.values == -torch.inf, -1)


def all_before(batch: PrefillBatch, chosen: torch.Tensor) -> None:
    """What ``index_top_k`` chooses where all contexts fit: each token and those before it, in order, without scores."""
    places = torch.arange(chosen.shape[1], dtype=chosen.dtype, device=chosen.device)
    chosen.copy_(torch.where(places <= batch.positions[:, None], places, -1))


def experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: ExpertGroup, out: torch.Tensor
) -> None:
    """The weighted sum of what its chosen experts make of each token.

    ``hidden`` and ``out`` ``[tokens, hidden]``, ``ids`` and ``weights`` ``[tokens, chosen]``; an id of -1 is an
    expert of another rank, and counts nothing. How many rows each expert gets is read on the host.
    """
    pairs = ids.flatten()
    order = pairs.argsort(stable=True)
    elsewhere, *counts = (pairs + 1).bincount(minlength=group.count + 1).tolist()
    out.zero_()
    for i, part in enumerate(order[elsewhere:].split(counts)):
        if len(part):
            rows = part // ids.shape[1]
            made = group.one(i, hidden[rows]) * weights.flatten()[part, None]
            out.index_add_(0, rows, made.to(out.dtype))


def _blocks(request: Request, heads: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of a request in blocks, with their positions in it."""
    step = max(1, _SCORES // (heads * request.context))
    for start in range(request.start, request.stop, step):
        stop = min(start + step, request.stop)
        first = request.prefix + start - request.start
        yield slice(start, stop), torch.arange(first, first + stop - start, device=device)


def _seen(positions: torch.Tensor, request: Request, window: int = 0) -> torch.Tensor:
    """Bool ``[tokens, context]``: whether a token may look at another one."""
    places = torch.arange(request.context, device=positions.device)
    seen = places <= positions[:, None]
    return seen & (places > positions[:, None] - window) if window else seen


def _among(chosen: torch.Tensor, context: int) -> torch.Tensor:
    """Bool ``[tokens, context]``: whether a place is among the chosen ones."""
    found = torch.zeros(len(chosen), context + 1, dtype=torch.bool, device=chosen.device)
    places = chosen.long()
    return found.scatter_(1, torch.where(places < 0, context, places), True)[:, :context]
