"""GPT-OSS for serving: attention with sinks and sliding windows over a paged cache, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.distributed.pipeline import PipelineProxy, ProxyForm, Stage
from bcg_compiler.models.layers.attention import paged_attention
from bcg_compiler.models.layers.basic import Linear, RMSNorm
from bcg_compiler.models.layers.batch import live_batch
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.experts import ClampedExperts
from bcg_compiler.models.layers.kernels import run
from bcg_compiler.models.layers.local_experts import LocalExperts, local_experts
from bcg_compiler.models.layers.rotary import Angles, Rotary, RotaryConfig, rotate
from bcg_compiler.models.layers.staged import Handed, StageDecoder, StagedModel


@dataclass(frozen=True)
class GptOssConfig:
    """The fields of a ``config.json`` that this model reads, under the names of this module.

    ``windows[i]`` is how many tokens a token of layer ``i`` sees, itself included; 0 for all before it. ``alpha`` and
    ``limit`` are of the gate (``experts.clamped_gate``). Raises ``ModelError`` for what cannot be.
    """

    vocab: int
    hidden: int
    heads: int
    key_heads: int
    head_width: int
    windows: tuple[int, ...]
    attention_bias: bool
    rotary: RotaryConfig
    eps: float
    tied: bool
    experts: int
    chosen: int
    expert_width: int
    alpha: float
    limit: float

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> GptOssConfig:
        """From the fields of a ``config.json``.

        Raises ``ModelError`` for a field that is missing, or that asks for something that is not implemented.
        """
        if fields.get("quantization_config") is not None:
            raise ModelError(
                "The checkpoint is quantised (quantization_config), which is not implemented: dequantise it, with "
                "transformers' Mxfp4Config(dequantize=True) and save_pretrained."
            )
        try:
            layers, width = fields["num_hidden_layers"], fields["head_dim"]
            kinds = fields.get("layer_types") or (["sliding_attention", "full_attention"] * layers)[:layers]
            return cls(
                vocab=fields["vocab_size"],
                hidden=fields["hidden_size"],
                heads=fields["num_attention_heads"],
                key_heads=fields["num_key_value_heads"],
                head_width=width,
                windows=_windows(kinds, layers, fields["sliding_window"]),
                attention_bias=bool(fields.get("attention_bias", True)),
                rotary=RotaryConfig.of(fields, width),
                eps=fields["rms_norm_eps"],
                tied=bool(fields.get("tie_word_embeddings")),
                experts=fields["num_local_experts"],
                chosen=fields["num_experts_per_tok"],
                expert_width=fields["intermediate_size"],
                alpha=float(fields.get("swiglu_alpha", 1.702)),
                limit=float(fields.get("swiglu_limit", 7.0)),
            )
        except KeyError as error:
            raise ModelError(f"The configuration of a gpt_oss lacks the field {error}.") from None

    def __post_init__(self) -> None:
        if self.chosen > self.experts:
            raise ModelError(f"Each token goes to {self.chosen} experts and there are {self.experts}.")
        if self.heads % self.key_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.key_heads} key heads equally.")


def _windows(kinds: Sequence[str], layers: int, window: int) -> tuple[int, ...]:
    of_kind = {"sliding_attention": window, "full_attention": 0}
    if len(kinds) != layers:
        raise ModelError(f"The configuration has {layers} layers and says of {len(kinds)} what they are (layer_types).")
    if unknown := set(kinds) - set(of_kind):
        raise ModelError(f"layer_types has {min(unknown)!r}; implemented: {', '.join(map(repr, of_kind))}.")
    return tuple(of_kind[kind] for kind in kinds)


class Attention(nn.Module):
    """Grouped-query attention, with a score a head for looking nowhere (a sink). Rows are ``[tokens, hidden]``."""

    #: It takes the parts of requests that a context-parallel rank holds.
    takes_parts = True

    key_cache: torch.Tensor
    value_cache: torch.Tensor

    def __init__(self, config: GptOssConfig, layer: int, pages: int, page_size: int) -> None:
        super().__init__()
        width, bias = config.head_width, config.attention_bias
        self.width = width
        self.window = config.windows[layer]
        self.q_proj = Linear(config.hidden, config.heads * width, bias)
        self.k_proj = Linear(config.hidden, config.key_heads * width, bias)
        self.v_proj = Linear(config.hidden, config.key_heads * width, bias)
        self.o_proj = Linear(config.heads * width, config.hidden, bias)
        self.sinks = nn.Parameter(torch.empty(config.heads), requires_grad=False)
        for name in ("key_cache", "value_cache"):
            cache = torch.zeros(pages, page_size, config.key_heads, width)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.width)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, angles, False), rotate(key, angles, False)
        out = torch.empty_like(query)
        scale = self.width**-0.5
        paged_attention(query, key, value, self.key_cache, self.value_cache, out, scale, self.window, self.sinks)
        return self.o_proj(out.flatten(1))


@bcg.eager_break(reason="a2a_moe", mutates_args=("out",), reads_live_rows=True)
def clamped_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    out: torch.Tensor,
    alpha: float,
    limit: float,
) -> None:
    """Send each live row to its experts, run them, and bring back the weighted sum: one break, as its sizes are data.

    ``hidden`` and ``out`` ``[rows, hidden]``, ``ids`` int64 and ``weights`` ``[rows, chosen]``, ``gate_up`` ``[experts,
    hidden, 2 * width]`` with a bias ``[experts, 2 * width]``, ``down`` ``[experts, width, hidden]`` with a bias
    ``[experts, hidden]``.
    """
    live = slice(live_batch(hidden).tokens)
    group = ClampedExperts(gate_up, gate_up_bias, down, down_bias, alpha, limit)
    run("experts", hidden.device, hidden[live], ids[live], weights[live], group, out[live])


class Experts(nn.Module):
    """The weights of all experts, as checkpoints hold them."""

    def __init__(self, config: GptOssConfig, local: LocalExperts | None) -> None:
        super().__init__()
        count, hidden, width = config.experts, config.hidden, config.expert_width
        self.local = local
        self.alpha, self.limit = config.alpha, config.limit
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * width), requires_grad=False)
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, width, hidden), requires_grad=False)
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden), requires_grad=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x`` ``[rows, hidden]``, ``ids`` and ``weights`` ``[rows, chosen]``; ``[rows, hidden]``."""
        out = torch.empty_like(x)
        gate_up, down = (self.gate_up_proj, self.gate_up_proj_bias), (self.down_proj, self.down_proj_bias)
        run = clamped_experts if self.local is None else self.local.clamped
        run(x, ids, weights, *gate_up, *down, out, self.alpha, self.limit)
        return out


class MoE(nn.Module):
    """A router and its experts: a token's weights are the softmax of its best scores."""

    def __init__(self, config: GptOssConfig, local: LocalExperts | None) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.router = Linear(config.hidden, config.experts, bias=True)
        self.experts = Experts(config, local)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` in and out."""
        scores, ids = self.router(x).topk(self.chosen, dim=-1)
        return self.experts(x, ids, scores.softmax(-1))


class DecoderLayer(nn.Module):
    """Attention and experts, each behind a norm and added to what goes in."""

    def __init__(
        self, config: GptOssConfig, layer: int, local: LocalExperts | None, pages: int, page_size: int
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, pages, page_size)
        self.mlp = MoE(config, local)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(StageDecoder):
    """All layers, or those of a stage."""

    def __init__(self, config: GptOssConfig, pages: int, page_size: int, stage: Stage | None) -> None:
        local = local_experts(config.experts, (config.hidden, config.expert_width))
        super().__init__(
            stage,
            len(config.windows),
            lambda i: DecoderLayer(config, i, local, pages, page_size),
            vocab=config.vocab,
            hidden=config.hidden,
            eps=config.eps,
            tied=config.tied,
        )
        self.rotary = Rotary(config.rotary)

    def forward(self, proxy: PipelineProxy, positions: torch.Tensor) -> Handed:
        """See ``StageDecoder``."""
        x = proxy.hidden_states
        angles = self.rotary(positions, x.dtype)
        rows = {}
        for i, layer in self.own_layers():
            rows[i] = x = layer(x, angles)
        return self.handed(PipelineProxy(x if self.norm is None else self.norm(x)), rows)


class GptOss(StagedModel):
    """The language model. Call it while a batch is published: ``with batch.published(): model(ids, batch.positions)``.

    Parameters have the names of a Hugging Face checkpoint. Every layer's cache has ``pages`` pages of ``page_size``. Of
    a ``stage`` behind the first it has the parts only: ``LaterStage`` is what is called.
    """

    def __init__(self, fields: Mapping[str, Any], *, pages: int, page_size: int, stage: Stage | None = None) -> None:
        config = GptOssConfig.of(fields)

        def form(border: str, layer: int) -> ProxyForm:
            return ProxyForm(border, config.hidden, torch.get_default_dtype())

        super().__init__(Decoder(config, pages, page_size, stage), form)
        self.config = config

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | PipelineProxy:
        """Logits ``[tokens, vocab]`` for the flattened new tokens of a batch; both inputs are int64 ``[tokens]``.

        Of a first stage that is not the last one: what the next one takes.
        """
        return self.from_ids(input_ids, positions)
