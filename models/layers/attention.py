"""The attention breaks. Each writes the new keys into the cache, then attends for the live rows.

All that differs from call to call they read from the published batch. ``out`` is allocated by the caller, so that in a
compiled model it stands in the segment before the break.
"""

import torch

import bcg_compiler as bcg
from bcg_compiler.models.layers import cache, kernels
from bcg_compiler.models.layers.batch import live_batch


@bcg.eager_break(reason="attention", mutates_args=("key_cache", "value_cache", "out"), reads_live_rows=True)
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention with fewer key heads than query heads, or as many.

    ``query`` and ``out`` ``[rows, heads, width]``, ``key`` and ``value`` ``[rows, key heads, width]``, caches ``[pages,
    page_size, key heads, width]``. ``window`` > 0: a token sees so many tokens, itself included. ``sinks`` ``[heads]``:
    a score a head for looking nowhere.
    """
    batch = live_batch(query, key_cache)
    cache.write(key_cache, batch, key)
    cache.write(value_cache, batch, value)
    if not batch.tokens:  # a context-parallel rank that holds no row
        return
    live = slice(batch.tokens)
    args = batch, query[live], key_cache, value_cache, out[live], scale, window, sinks
    kernels.run("grouped_query_attention", query.device, *args)


@bcg.eager_break(reason="attention", mutates_args=("latent_cache", "rotary_cache", "out"), reads_live_rows=True)
def mla_attention(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent: torch.Tensor,
    k_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Causal MLA in absorbed form (DeepSeek-V2, 2024): the keys of all heads are one latent and one rotary part.

    ``q_latent`` and ``out`` ``[rows, heads, rank]``, ``q_rotary`` ``[rows, heads, rotary width]``, ``latent`` ``[rows,
    rank]``, ``k_rotary`` ``[rows, rotary width]``, caches ``[pages, page_size, rank]`` and ``[pages, page_size, rotary
    width]``.
    """
    _mla(q_latent, q_rotary, latent, k_rotary, latent_cache, rotary_cache, out, scale, None)


@bcg.eager_break(reason="attention", mutates_args=("latent_cache", "rotary_cache", "out"), reads_live_rows=True)
def sparse_mla_attention(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent: torch.Tensor,
    k_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    chosen: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """``mla_attention`` to chosen tokens: int32 ``[rows, most]``, places in the request, -1 behind the last one."""
    _mla(q_latent, q_rotary, latent, k_rotary, latent_cache, rotary_cache, out, scale, chosen)


def _mla(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent: torch.Tensor,
    k_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor | None,
) -> None:
    batch = live_batch(q_latent, latent_cache)
    cache.write(latent_cache, batch, latent)
    cache.write(rotary_cache, batch, k_rotary)
    if not batch.tokens:  # a context-parallel rank that holds no row
        return
    live = slice(batch.tokens)
    chosen = None if chosen is None else chosen[live]
    args = batch, q_latent[live], q_rotary[live], latent_cache, rotary_cache, out[live], scale, chosen
    kernels.run("mla_attention" if chosen is None else "sparse_mla_attention", q_latent.device, *args)
