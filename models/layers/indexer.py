"""DeepSeek sparse attention (DeepSeek-V3.2-Exp, 2025): a small indexer chooses the tokens that attention looks at."""

import torch
import torch.nn.functional as F
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.models.layers import cache, fp8, kernels, reference
from bcg_compiler.models.layers.basic import Linear
from bcg_compiler.models.layers.batch import live_batch
from bcg_compiler.models.layers.rotary import Angles, rotate


@bcg.eager_break(reason="dsa_indexer", mutates_args=("key_cache", "chosen"), reads_live_rows=True)
def choose_tokens(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Write the index keys, then choose for each live row the tokens with the highest index scores.

    ``query`` ``[rows, heads, width]``, ``key`` ``[rows, width]``, ``weights`` float32 ``[rows, heads]``, ``key_cache``
    ``[pages, page_size, width]``. Where the cache holds packed rows (``fp8``), ``key`` is packed, and ``query``
    float8_e4m3. ``chosen`` int32 ``[rows, most]`` gets places in the request, -1 behind the last one.

    Where all contexts of the batch have at most ``most`` tokens, all are chosen and no score is computed. That is
    decided here, at each call: captured, it would be frozen.
    """
    batch = live_batch(query, key_cache)
    cache.write(key_cache, batch, key)
    live = slice(batch.tokens)
    if batch.longest_context <= chosen.shape[1]:
        reference.all_before(batch, chosen[live])
    else:
        kernels.run("index_top_k", query.device, batch, query[live], weights[live], key_cache, chosen[live])


class LogitsGate(Linear):
    """How much each index head counts, from the hidden states: float32 ``[rows, heads]``.

    A module of its own, scales included, so that a pass can mark all of it; then it joins the break beside it.
    """

    def __init__(self, hidden: int, heads: int, scale: float) -> None:
        super().__init__(hidden, heads)
        self.scale = scale

    def forward(self, x: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` ``[rows, hidden]``; ``scales`` float32 ``[rows, heads]``, of queries that were rounded."""
        weights = super().forward(x).float() * self.scale
        # relu(s * x) is s * relu(x) for a positive s: the scale of a query can go into its weight.
        return weights if scales is None else weights * scales


class LayerNorm(nn.Module):
    """Layer norm with weight and bias over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Indexer(nn.Module):
    """Chooses the ``most`` tokens that each token of a layer attends to.

    Scores are computed in float32, or of queries and keys of 8 bits after ``pack_keys``. The published model also
    rotates them by a Hadamard matrix, which spreads outliers before they are quantised and changes nothing else; that
    is left out.
    """

    key_cache: torch.Tensor

    def __init__(
        self,
        *,
        hidden: int,
        query_rank: int,
        heads: int,
        width: int,
        rotary_width: int,
        most: int,
        interleaved: bool,
        pages: int,
        page_size: int,
    ) -> None:
        super().__init__()
        self.heads, self.width, self.rotary_width = heads, width, rotary_width
        self.most = most
        self.interleaved = interleaved
        self.wq_b = Linear(query_rank, heads * width)
        self.wk = Linear(hidden, width)
        self.k_norm = LayerNorm(width, 1e-6)
        # relu(a * s) is s * relu(a), so the scale of the scores can go into the weights.
        self.weights_proj = LogitsGate(hidden, heads, heads**-0.5 * width**-0.5)
        self.register_buffer("key_cache", torch.zeros(pages, page_size, width), persistent=False)

    def pack_keys(self) -> None:
        """Keep keys in 8 bits (``fp8``): before the first call. Chosen tokens are then not quite those of float32."""
        pages, page_size, width = self.key_cache.shape
        bytes_of_rows = self.key_cache.new_zeros(pages, page_size, fp8.packed_width(width), dtype=torch.uint8)
        self.register_buffer("key_cache", bytes_of_rows, persistent=False)

    def forward(self, x: torch.Tensor, q_low: torch.Tensor, angles: Angles) -> torch.Tensor:
        """``x`` ``[rows, hidden]``, ``q_low`` ``[rows, query_rank]``; int32 ``[rows, most]``, see ``choose_tokens``."""
        query = self._rotated(self.wq_b(q_low).unflatten(-1, (self.heads, self.width)), angles)
        key = self._rotated(self.k_norm(self.wk(x))[:, None], angles)[:, 0]
        chosen = torch.empty(x.shape[0], self.most, dtype=torch.int32, device=x.device)
        scales = None
        if fp8.is_packed(self.key_cache):
            key = fp8.pack(key)
            query, scales = fp8.quantise(query)
        choose_tokens(query, key, self.weights_proj(x, scales), self.key_cache, chosen)
        return chosen

    def _rotated(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        turned, rest = x.split([self.rotary_width, self.width - self.rotary_width], -1)
        return torch.cat([rotate(turned, angles, self.interleaved), rest], -1)
