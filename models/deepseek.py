"""DeepSeek-V2, DeepSeek-V3, DeepSeek-V3.2 and GLM-5 for serving: MLA over a paged cache, DSA, mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from bcg_compiler.distributed.pipeline import PipelineProxy, ProxyForm, Stage
from bcg_compiler.models.layers.all_to_all import AllToAll
from bcg_compiler.models.layers.basic import GatedMLP, RMSNorm
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.expert_parallel import open_all_to_all
from bcg_compiler.models.layers.flashinfer import LatentShape
from bcg_compiler.models.layers.indexer import Indexer
from bcg_compiler.models.layers.local_experts import local_experts
from bcg_compiler.models.layers.mla import LatentAttention
from bcg_compiler.models.layers.moe import ExpertParallel, MoE, Routing
from bcg_compiler.models.layers.planned import PlannedLatentAttention, planned_latent_attention
from bcg_compiler.models.layers.rotary import Angles, Rotary, RotaryConfig
from bcg_compiler.models.layers.staged import Handed, StageDecoder, StagedModel


@dataclass(frozen=True)
class DeepseekConfig:
    """The fields of a ``config.json`` that these models read, under the names of this module.

    ``routing`` is that of layers from ``dense_layers`` on. ``indexers[i]`` says whether layer ``i`` chooses tokens
    itself (DSA) or takes those of the layer before it; it is empty for dense attention.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    query_rank: int | None
    rank: int
    nope_width: int
    rotary_width: int
    value_width: int
    attention_bias: bool
    rotary: RotaryConfig
    interleaved: bool
    eps: float
    tied: bool
    mlp_width: int
    mlp_bias: bool
    sparse: tuple[bool, ...]
    expert_width: int
    shared_experts: int
    routing: Routing
    indexers: tuple[bool, ...] = ()
    index_heads: int = 0
    index_width: int = 0
    index_most: int = 0
    index_interleaved: bool = False

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return (self.nope_width + self.rotary_width) ** -0.5 * self.rotary.score_factor

    def shares_at(self, layer: int) -> bool:
        """Whether there is such a layer, and it looks at the tokens that a layer before it has chosen."""
        return layer < len(self.indexers) and not self.indexers[layer]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DeepseekConfig:
        """From the fields of a ``config.json`` of the four families.

        Raises ``ModelError`` for a field that is missing, or that asks for something that is not implemented.
        """
        try:
            return cls._of(fields)
        except KeyError as error:
            raise ModelError(f"The configuration of a {fields.get('model_type')} lacks the field {error}.") from None

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> DeepseekConfig:
        family = fields["model_type"]
        _check_supported(fields)
        layers = fields["num_hidden_layers"]
        v2, dsa = family == "deepseek_v2", family in ("deepseek_v32", "glm_moe_dsa")
        dense = fields.get("first_k_dense_replace", 0 if v2 else 3)
        kinds = fields.get("mlp_layer_types")
        grouped = fields.get("topk_method") != "greedy" and fields.get("n_group")
        return cls(
            vocab=fields["vocab_size"],
            hidden=fields["hidden_size"],
            layers=layers,
            heads=fields["num_attention_heads"],
            query_rank=fields["q_lora_rank"],
            rank=fields["kv_lora_rank"],
            nope_width=fields["qk_nope_head_dim"],
            rotary_width=fields["qk_rope_head_dim"],
            value_width=fields["v_head_dim"],
            attention_bias=bool(fields.get("attention_bias")),
            rotary=RotaryConfig.of(fields, fields["qk_rope_head_dim"]),
            interleaved=bool(fields.get("rope_interleave", True)),
            eps=fields["rms_norm_eps"],
            tied=bool(fields.get("tie_word_embeddings")),
            mlp_width=fields["intermediate_size"],
            mlp_bias=v2 and bool(fields.get("mlp_bias")),
            sparse=tuple(kind == "sparse" for kind in kinds) if kinds else tuple(i >= dense for i in range(layers)),
            expert_width=fields["moe_intermediate_size"],
            shared_experts=fields["n_shared_experts"],
            routing=Routing(
                experts=fields["n_routed_experts"],
                chosen=fields["num_experts_per_tok"],
                groups=fields["n_group"] if grouped else 1,
                best_groups=fields["topk_group"] if grouped else 1,
                bias_corrected=not v2,
                normalised=not v2 and bool(fields.get("norm_topk_prob", True)),
                factor=fields.get("routed_scaling_factor", 1.0),
            ),
            indexers=_indexers(fields, layers) if dsa else (),
            index_heads=fields["index_n_heads"] if dsa else 0,
            index_width=fields["index_head_dim"] if dsa else 0,
            index_most=fields["index_topk"] if dsa else 0,
            index_interleaved=family == "glm_moe_dsa",
        )

    def __post_init__(self) -> None:
        for name in ("sparse", "indexers") if self.indexers else ("sparse",):
            if (found := len(getattr(self, name))) != self.layers:
                raise ModelError(
                    f"The configuration has {self.layers} layers and says of {found} what they are ({name})."
                )
        if self.indexers and not self.indexers[0]:
            raise ModelError("The first layer takes the tokens of the layer before it: its indexer must be 'full'.")
        if self.indexers and self.query_rank is None:
            raise ModelError("An indexer reads the query of low rank: q_lora_rank must be given.")


#: Fields that change what a model computes, and the values that are implemented.
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", None),
    "quantization_config": (None,),
}


def _check_supported(fields: Mapping[str, Any]) -> None:
    for name, values in _IMPLEMENTED.items():
        if name in fields and fields[name] not in values:
            raise ModelError(f"{name} is {fields[name]!r}; implemented: {', '.join(map(repr, values))}.")


def _indexers(fields: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has an indexer of its own: a list, a pattern ("FFS"), or every so many layers (GLM-5.1)."""
    kinds = fields.get("indexer_types") or fields.get("index_topk_pattern")
    if kinds:
        return tuple(kind in ("full", "F") for kind in kinds)
    every, first = max(fields.get("index_topk_freq") or 1, 1), fields.get("index_skip_topk_offset", 2)
    return tuple(max(i - first + 1, 0) % every == 0 for i in range(layers))


class DecoderLayer(nn.Module):
    """Attention and an MLP or experts, each behind a norm and added to what goes in."""

    def __init__(
        self,
        config: DeepseekConfig,
        layer: int,
        planned: PlannedLatentAttention | None,
        pages: int,
        page_size: int,
        parallel: ExpertParallel,
    ) -> None:
        super().__init__()
        indexer = None
        if config.indexers and config.indexers[layer]:
            assert config.query_rank is not None  # DeepseekConfig refuses it
            indexer = Indexer(
                hidden=config.hidden,
                query_rank=config.query_rank,
                heads=config.index_heads,
                width=config.index_width,
                rotary_width=config.rotary_width,
                most=config.index_most,
                interleaved=config.index_interleaved,
                pages=pages,
                page_size=page_size,
            )
        self.self_attn = LatentAttention(
            hidden=config.hidden,
            heads=config.heads,
            query_rank=config.query_rank,
            rank=config.rank,
            nope_width=config.nope_width,
            rotary_width=config.rotary_width,
            value_width=config.value_width,
            scale=config.scale,
            interleaved=config.interleaved,
            bias=config.attention_bias,
            indexer=indexer,
            planned=planned,
            pages=pages,
            page_size=page_size,
        )
        self.mlp: nn.Module
        if config.sparse[layer]:
            self.mlp = MoE(config.hidden, config.expert_width, config.shared_experts, config.routing, parallel)
        else:
            self.mlp = GatedMLP(config.hidden, config.mlp_width, config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(
        self, x: torch.Tensor, angles: Angles, chosen: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``LatentAttention.forward``."""
        attended, chosen = self.self_attn(self.input_layernorm(x), angles, chosen)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), chosen


class Decoder(StageDecoder):
    """All layers, or those of a stage."""

    def __init__(
        self, config: DeepseekConfig, pages: int, page_size: int, parallel: ExpertParallel, stage: Stage | None
    ) -> None:
        planned = None
        if not config.indexers:  # all layers attend alike: they share a plan
            like = torch.empty(0)
            planned = planned_latent_attention(
                LatentShape(
                    config.heads,
                    config.rank,
                    config.rotary_width,
                    config.scale,
                    page_size,
                    pages,
                    like.dtype,
                    like.device,
                )
            )
        super().__init__(
            stage,
            config.layers,
            lambda i: DecoderLayer(config, i, planned, pages, page_size, parallel),
            vocab=config.vocab,
            hidden=config.hidden,
            eps=config.eps,
            tied=config.tied,
        )
        self.rotary = Rotary(config.rotary)
        self.hands_on_chosen = config.shares_at(self.stage.end)

    def forward(self, proxy: PipelineProxy, positions: torch.Tensor) -> Handed:
        """See ``StageDecoder``. ``topk_indices`` are handed on where the first layer behind reads them."""
        x, chosen = proxy.hidden_states, proxy.topk_indices
        angles = self.rotary(positions, x.dtype)
        rows = {}
        for i, layer in self.own_layers():
            x, chosen = layer(x, angles, chosen)
            rows[i] = x
        x = x if self.norm is None else self.norm(x)
        return self.handed(PipelineProxy(x, topk_indices=chosen if self.hands_on_chosen else None), rows)


class Deepseek(StagedModel):
    """The language model. Call it while a batch is published: ``with batch.published(): model(ids, batch.positions)``.

    Parameters have the names of a Hugging Face checkpoint. Every layer's cache has ``pages`` pages of ``page_size``.
    ``all_to_all`` and ``group`` share the routed experts out over ranks, see ``open_all_to_all``. Of a ``stage`` behind
    the first it has the parts only: ``LaterStage`` is what is called.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        pages: int,
        page_size: int,
        all_to_all: str | AllToAll = "none",
        group: ProcessGroup | None = None,
        stage: Stage | None = None,
    ) -> None:
        config = DeepseekConfig.of(fields)
        experts = config.routing.experts
        backend = open_all_to_all(all_to_all, experts=experts, hidden=config.hidden, group=group)
        local = local_experts(experts, (config.hidden, config.expert_width)) if all_to_all == "none" else None
        parallel = ExpertParallel.over(backend, local)
        decoder = Decoder(config, pages, page_size, parallel, stage)

        def form(border: str, layer: int) -> ProxyForm:
            topk = config.index_most if config.shares_at(layer) else 0
            return ProxyForm(border, config.hidden, torch.get_default_dtype(), topk=topk)

        super().__init__(decoder, form)
        self.config = config

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | PipelineProxy:
        """Logits ``[tokens, vocab]`` for the flattened new tokens of a batch; both inputs are int64 ``[tokens]``.

        Of a first stage that is not the last one: what the next one takes.
        """
        return self.from_ids(input_ids, positions)
