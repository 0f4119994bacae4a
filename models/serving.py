"""Serving models by the family that a configuration names: built with random weights, or loaded from a folder."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.distributed.pipeline import Stage, exchange_stages
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.models.deepseek import Deepseek
from bcg_compiler.models.gpt_oss import GptOss
from bcg_compiler.models.layers.checkpoint import load_weights
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.expert_parallel import NAMES
from bcg_compiler.models.layers.indexer import Indexer
from bcg_compiler.models.layers.mla import LatentAttention
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.models.layers.staged import LaterStage, StagedModel, is_of_another_stage

#: ``model_type`` of a ``config.json`` → the model, made of its fields, ``pages`` and ``page_size``.
FAMILIES: dict[str, Callable[..., StagedModel]] = {
    "deepseek_v2": Deepseek,
    "deepseek_v3": Deepseek,
    "deepseek_v32": Deepseek,
    "glm_moe_dsa": Deepseek,
    "gpt_oss": GptOss,
}


def empty(
    fields: Mapping[str, Any],
    *,
    pages: int,
    page_size: int = 64,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    fp8_index: bool = False,
    context_parallel: bool = False,
    stage: Stage | None = None,
    **parallel: Any,
) -> nn.Module:
    """A model of the configuration with weights that hold nothing: for "meta", or to be filled.

    ``fields`` are those of a ``config.json``. ``fp8_index``: the caches of indexers hold 8 bits a number, as those of
    published models do; chosen tokens are then not quite those of transformers. ``context_parallel``: the model is for
    batches of one context-parallel rank (``PrefillBatch.context_parallel``), and gives the logits of the whole batch;
    attention is not planned, as a plan that is captured has no place for what ranks tell each other. ``stage``: only
    the layers of a pipeline stage, and what it has beside them (``layers.staged``). ``parallel``: ``all_to_all`` and
    ``group``, which share the routed experts out over ranks (``layers.expert_parallel.open_all_to_all``). Raises
    ``ModelError`` for a family that is not here, with the nearest, for ``fp8_index`` without an indexer, and for a
    stage of other layers.
    """
    family = _family(fields, parallel)
    if pages < 1 or page_size < 1:
        raise ModelError(f"A cache needs at least one page of one token: pages={pages}, page_size={page_size}.")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = FAMILIES[family](fields, pages=pages, page_size=page_size, stage=stage, **parallel).eval()
    finally:
        torch.set_default_dtype(before)
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    if fp8_index and not getattr(model.config, "indexers", ()):
        raise ModelError(
            f"fp8_index=True is for models with an indexer, and a {family} of this configuration has none."
        )
    for indexer in indexers if fp8_index else ():
        indexer.pack_keys()
    model.gathers = context_parallel
    for module in model.modules() if context_parallel else ():
        if isinstance(module, LatentAttention):
            module.attend_unplanned()
    return model if model.stage.is_first else LaterStage(model).eval()


def _family(fields: Mapping[str, Any], parallel: Mapping[str, Any]) -> str:
    """The family of a configuration, if there is a model of it that ``parallel`` can be done with."""
    family = str(fields.get("model_type"))
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES)
        offered = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(FAMILIES)}."
        raise ModelError(f"There is no serving model of the family {family!r}; {offered}")
    if parallel and FAMILIES[family] is not Deepseek:
        raise ModelError(
            f"The experts of a {family} are not shared out over ranks yet: leave out {' and '.join(parallel)}."
        )
    return family


def build(fields: Mapping[str, Any], *, seed: int = 0, stage: Stage | None = None, **kwargs: Any) -> nn.Module:
    """A model of the configuration with random weights, drawn on its own device; arguments as of ``empty``.

    A ``stage`` has the weights that the whole model has, and so have experts that are shared out over ranks.
    """
    model = empty(fields, stage=stage, **kwargs)
    of_one_rank = {name: value for name, value in kwargs.items() if name not in ("all_to_all", "group")}
    whole = dict(empty(fields, **{**of_one_rank, "device": "meta"}).named_parameters())
    seeds = {name: seed + i for i, name in enumerate(whole)}
    spread = float(fields.get("initializer_range", 0.02))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(seeds[name])
            # Weights of norms are around 1: they are the ones of one dimension.
            mean = 1.0 if parameter.dim() == 1 else 0.0
            if parameter.shape == whole[name].shape:
                parameter.normal_(mean, spread, generator=generator)
            else:
                drawn = torch.empty_like(whole[name], device=parameter.device).normal_(
                    mean, spread, generator=generator
                )
                shard: Any = model.get_submodule(name.rpartition(".")[0]).shard
                parameter.copy_(drawn[shard.first : shard.first + shard.count])
    return model


def load(
    folder: Path | str,
    *,
    pages: int,
    page_size: int = 64,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    fp8_index: bool = False,
    context_parallel: bool = False,
    stage: Stage | None = None,
    **parallel: Any,
) -> nn.Module:
    """A model with the weights of a Hugging Face folder: ``config.json`` and safetensors, in one file or several.

    ``dtype``: that of the configuration unless given; all else as of ``empty``: a rank loads the layers and the experts
    that it holds. Raises ``ModelError`` if the family is not here, or the tensors are
    not those of the configuration (see ``load_weights``); those of other stages are not looked at.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give the folder of a Hugging Face model.")
    fields = json.loads(path.read_text())
    if dtype is None:
        dtype = getattr(torch, fields.get("dtype") or fields.get("torch_dtype") or "float32")
    model: Any = empty(
        fields,
        pages=pages,
        page_size=page_size,
        device=device,
        dtype=dtype,
        fp8_index=fp8_index,
        context_parallel=context_parallel,
        stage=stage,
        **parallel,
    )
    # Layers behind the last one predict several tokens at once: they are a model of their own.
    count = fields["num_hidden_layers"]
    more = fields.get("num_nextn_predict_layers") or 0

    def ignored(name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is not None and count <= int(layer[1]) < count + more:
            return True
        return is_of_another_stage(name, model.model)

    load_weights(model, folder, ignored)
    return model


def layout(fields: Mapping[str, Any], **given: Any) -> Parallel:
    """The layout of a model of this configuration over ranks, with what the model declares of itself.

    ``given``: fields of ``Parallel``: the sizes, and whatever is chosen; the model's word counts for all others. Rows
    travel to experts by the all-to-all backend "torch" unless another one is named. Raises ``RankError`` for what is no
    field of a layout, and ``ModelError`` for a family that is not here, and for experts that cannot be shared out.
    """
    asked = Parallel.parse(given)
    backend = asked.all_to_all if "all_to_all" in given or asked.ep == 1 else "torch"
    _family(fields, {"ep": asked.ep} if asked.ep > 1 else {})
    model: Any = empty(fields, pages=1, page_size=1, device="meta", context_parallel=asked.cp > 1)
    attentions = [layer.self_attn for _, layer in model.model.own_layers()]
    declared: dict[str, Any] = dict(
        attention_does_cp=all(getattr(attention, "takes_parts", False) for attention in attentions),
        all_to_all=backend,
        # Those that are here do, and one of somebody else's is refused unless it does: ``open_all_to_all``.
        all_to_all_declared=backend in NAMES,
        dense_mla=any(isinstance(attention, LatentAttention) for attention in attentions)
        and not any(isinstance(module, Indexer) for module in model.modules()),
        # Attention is a break that reads the batch of each call, or runs by a plan that was made of it.
        prefix_captured=True,
    )
    return replace(asked, **{name: value for name, value in declared.items() if name not in given})


def runner(model: Any, *, ladder: Any, ranks: Ranks | None = None, **how: Any) -> bcg.PrefillRunner:
    """What runs batches of a model of this module, or of a stage of it, on one of several ranks or alone.

    ``model`` is built with ``stage=ranks.layers(...)``, and with ``context_parallel=True`` where a batch is shared out.
    ``how``: other arguments of ``bcg.PrefillRunner``. Collective over a pipeline: raises ``PipelineError`` on all its
    ranks if their stages do not make up the model.
    """
    if ranks is not None and ranks.pipeline is not None:
        exchange_stages(model.stage, ranks.pipeline)
    decoder = model.model
    return bcg.PrefillRunner(
        decoder,
        ladder=ladder,
        embed=decoder.embed_tokens if model.stage.is_first else None,
        tail=model.lm_head,
        ranks=ranks,
        takes=model.takes,
        gives=model.gives,
        **how,
    )


def page_pool(model: nn.Module) -> PagePool:
    """The pages of a model's cache, none of them in use. Raises ``ModelError`` for a stage without layers."""
    cache = next((buffer for name, buffer in model.named_buffers() if name.endswith("_cache")), None)
    if cache is None:
        raise ModelError("The model has no layer here, and so no cache to share out pages of.")
    return PagePool(cache.shape[0], cache.shape[1], cache.device)
