"""Multi-head latent attention (DeepSeek-V2, 2024) in absorbed form: the cache holds a latent, and is never expanded.

The up-projection of keys is applied to the query and that of values to the result, so that attention itself works on
latents: ``q · (w_kc c) = (q w_kc) · c``.
"""

from collections.abc import Mapping

import torch
from torch import nn

from bcg_compiler.models.layers.attention import mla_attention, sparse_mla_attention
from bcg_compiler.models.layers.basic import Linear, RMSNorm
from bcg_compiler.models.layers.checkpoint import Place
from bcg_compiler.models.layers.indexer import Indexer
from bcg_compiler.models.layers.planned import PlannedLatentAttention
from bcg_compiler.models.layers.rotary import Angles, rotate

#: Of the norms within attention, whatever the configuration says of those around it.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """One layer's attention. Rows are ``[tokens, hidden]`` in and out.

    Weights are those of a checkpoint but for ``kv_b_proj``, which is kept as ``w_kc`` ``[heads, nope width, rank]`` and
    ``w_vc`` ``[heads, rank, value width]``.
    """

    latent_cache: torch.Tensor
    rotary_cache: torch.Tensor

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        query_rank: int | None,
        rank: int,
        nope_width: int,
        rotary_width: int,
        value_width: int,
        scale: float,
        interleaved: bool,
        bias: bool,
        indexer: Indexer | None,
        planned: PlannedLatentAttention | None,
        pages: int,
        page_size: int,
    ) -> None:
        super().__init__()
        self.heads, self.rank = heads, rank
        self.nope_width, self.rotary_width, self.value_width = nope_width, rotary_width, value_width
        self.scale = scale
        self.interleaved = interleaved
        query_width = heads * (nope_width + rotary_width)
        if query_rank is None:
            self.q_proj = Linear(hidden, query_width)
        else:
            self.q_a_proj = Linear(hidden, query_rank, bias)
            self.q_a_layernorm = RMSNorm(query_rank, _EPS)
            self.q_b_proj = Linear(query_rank, query_width)
        self.query_rank = query_rank
        self.kv_a_proj_with_mqa = Linear(hidden, rank + rotary_width, bias)
        self.kv_a_layernorm = RMSNorm(rank, _EPS)
        self.w_kc = nn.Parameter(torch.empty(heads, nope_width, rank), requires_grad=False)
        self.w_vc = nn.Parameter(torch.empty(heads, rank, value_width), requires_grad=False)
        self.o_proj = Linear(heads * value_width, hidden, bias)
        self.indexer = indexer
        self.planned = planned
        self.register_buffer("latent_cache", torch.zeros(pages, page_size, rank), persistent=False)
        self.register_buffer("rotary_cache", torch.zeros(pages, page_size, rotary_width), persistent=False)

    def forward(
        self, x: torch.Tensor, angles: Angles, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result, and the tokens that it looked at: for the layers behind it that share them.

        ``chosen``: the tokens of an earlier layer, used if this one has no indexer; ``None`` for dense attention.
        """
        if self.query_rank is None:
            q_low, query = x, self.q_proj(x)
        else:
            q_low = self.q_a_layernorm(self.q_a_proj(x))
            query = self.q_b_proj(q_low)
        query = query.unflatten(-1, (self.heads, self.nope_width + self.rotary_width))
        q_nope, q_rotary = query.split([self.nope_width, self.rotary_width], -1)
        latent, k_rotary = self.kv_a_proj_with_mqa(x).split([self.rank, self.rotary_width], -1)
        latent = self.kv_a_layernorm(latent)
        q_rotary = rotate(q_rotary, angles, self.interleaved)
        k_rotary = rotate(k_rotary[:, None], angles, self.interleaved)[:, 0]
        out = x.new_empty(x.shape[0], self.heads, self.rank)
        if self.indexer is not None:
            chosen = self.indexer(x, q_low, angles)
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.w_kc).transpose(0, 1)
        caches = self.latent_cache, self.rotary_cache
        if chosen is None and self.planned is not None:
            self.planned.attend(q_latent, q_rotary, latent, k_rotary, *caches, out)
        elif chosen is None:
            mla_attention(q_latent, q_rotary, latent, k_rotary, *caches, out, self.scale)
        else:
            sparse_mla_attention(q_latent, q_rotary, latent, k_rotary, *caches, chosen, out, self.scale)
        values = torch.bmm(out.transpose(0, 1), self.w_vc).transpose(0, 1)
        return self.o_proj(values.flatten(1)), chosen

    @property
    def takes_parts(self) -> bool:
        """Whether it takes the parts of requests that a context-parallel rank holds: a captured run does not."""
        return self.planned is None

    def attend_unplanned(self) -> None:
        """Attend by the break that reads the batch of each call, though there is a plan: before the first call."""
        self.planned = None

    def checkpoint_places(self) -> Mapping[str, Place]:
        """``kv_b_proj`` of a checkpoint holds both up-projections, head by head."""
        widths = [self.nope_width, self.value_width]

        def put(weight: torch.Tensor) -> None:
            keys, values = weight.unflatten(0, (self.heads, sum(widths))).split(widths, 1)
            self.w_kc.copy_(keys)
            self.w_vc.copy_(values.transpose(1, 2))

        return {"kv_b_proj.weight": Place((self.heads * sum(widths), self.rank), put)}
