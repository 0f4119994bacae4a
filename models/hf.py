"""Any causal language model of transformers for serving: its attention calls become breaks over a paged cache.

transformers calls attention by name, through a registry. The function registered here writes the new keys and values
into the cache of the layer and attends for the requests of the published batch, whatever model it is called from; all
else is captured. Nothing in it is for one model. What it cannot be for is found by a probe, a call of the model with
two tokens, in which each layer must attend through the registry, once, causally or within a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bcg_compiler.distributed.pipeline import Stage
from bcg_compiler.models.layers.attention import paged_attention
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.flashinfer import PagedShape
from bcg_compiler.models.layers.planned import PlannedAttention, planned_attention

#: The names in transformers' registry: of the attention, and of the probe's stand-in for it.
_PAGED, _PROBE = "bcg_paged", "bcg_probe"

#: What models hand to attention that does not change what it computes here: nothing is dropped in eval mode, and what
#: a token sees is checked by the probe and taken from the batch.
_OF_NO_EFFECT = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


class PagedCausalLM(nn.Module):
    """A model of transformers, called with flattened tokens while a batch is published.

    ``with batch.published(): model(ids, batch.positions)``; ``serving.page_pool(model)`` makes the batches. Made by
    ``paged`` or ``load``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits ``[tokens, vocab]`` for the flattened new tokens of a batch; both inputs are int64 ``[tokens]``."""
        return self.model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False).logits[0]


def paged(model: Any, *, pages: int, page_size: int = 64) -> PagedCausalLM:
    """Give every attention module of a transformers model a cache of ``pages`` pages, and let it attend through it.

    The model is taken over: its attention implementation is another one from here on, and it is in eval mode. Raises
    ``ModelError``, and changes nothing, if it mixes tokens in another way than by causal attention, also within a
    window, with or without sinks.
    """
    if pages < 1 or page_size < 1:
        raise ModelError(f"A cache needs at least one page of one token: pages={pages}, page_size={page_size}.")
    found = _probe(model.eval())
    plans: dict[PagedShape | None, PlannedAttention | None] = {}
    for layer in found:
        shape = layer.shape(pages, page_size)
        if shape not in plans:
            plans[shape] = None if shape is None else planned_attention(shape)
        layer.module.paged_plan = plans[shape]
        for name, heads, width in (("key", layer.key_heads, layer.key_width), ("value", layer.key_heads, layer.width)):
            cache = torch.zeros(pages, page_size, heads, width, dtype=layer.dtype, device=layer.device)
            layer.module.register_buffer(f"paged_{name}_cache", cache, persistent=False)
    _registry().register(_PAGED, _attend)
    model.set_attn_implementation(_PAGED)
    return PagedCausalLM(model)


def load(
    folder: Path | str,
    *,
    pages: int,
    page_size: int = 64,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    stage: Stage | None = None,
) -> PagedCausalLM:
    """``paged`` of the model of a Hugging Face folder. ``dtype``: that of the configuration unless given.

    Raises ``ModelError`` for a ``stage`` of several.
    """
    if stage is not None and stage.stages > 1:
        raise ModelError(
            f"{stage} is no model of its own here: what transformers does around the layers (scales of embeddings, "
            f"masks, norms, what each layer returns) differs from model to model, and cutting it would take code for "
            f"each. models.serving cuts the families that it has."
        )
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), **given)
    return paged(model.to(device), pages=pages, page_size=page_size)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the registry wants it: ``[1, heads, tokens, width]`` in, ``[1, tokens, heads, width]`` out."""
    query, key, value = (given[0].transpose(0, 1) for given in (query, key, value))
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    scale = _scale(query, scaling)
    caches = module.paged_key_cache, module.paged_value_cache
    if module.paged_plan is not None:
        module.paged_plan.attend(query, key, value, *caches, out)
        return out[None], None
    paged_attention(query, key, value, *caches, out, scale, sliding_window or 0, s_aux)
    return out[None], None


def _scale(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)


@dataclass(frozen=True, eq=False)
class _Layer:
    """An attention module as the probe has seen it: what its cache must hold of a token, and how it attends.

    ``scale`` and ``window`` as of ``paged_attention``.
    """

    module: Any
    heads: int
    key_heads: int
    key_width: int
    width: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    window: int
    sinks: bool

    def shape(self, pages: int, page_size: int) -> PagedShape | None:
        """By which layers share a plan; ``None`` if no library plans such attention."""
        if self.sinks or self.key_width != self.width:
            return None
        cache = page_size, pages, self.dtype, self.device
        return PagedShape(self.heads, self.key_heads, self.width, self.scale, self.window, *cache)


@dataclass(frozen=True)
class _Mask:
    """What transformers would make a mask of: a function of batch, head, and the positions of two tokens."""

    sees: Callable[..., Any]


def _probe(model: Any) -> list[_Layer]:
    """All attention modules of a model, in the order of their calls. Raises ``ModelError`` if it cannot be served."""
    config = model.config.get_text_config()
    who = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_hidden_layers"):
        raise ModelError(f"{who} is no causal language model of layers: it cannot be served over a paged cache.")
    found: list[_Layer] = []

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        refused = _why_not(module, attention_mask, given)
        if refused is None and any(layer.module is module for layer in found):
            refused = "it attends twice with the same module, which would need two caches"
        if refused is not None:
            raise ModelError(f"{who}, {_path(model, module)}: {refused}. It cannot be served over a paged cache.")
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        how = _scale(query, given.get("scaling")), given.get("sliding_window") or 0, given.get("s_aux") is not None
        found.append(_Layer(module, *sizes, key.dtype, key.device, *how))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    with _probing(model, attend), torch.no_grad():
        try:
            model(input_ids=ids, position_ids=torch.arange(2, device=ids.device)[None], use_cache=False)
        except ModelError:
            raise
        except Exception as error:  # it works on its mask, say, which is none here
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ModelError(
                f"{who} does not go through with attention and masks of ours ({what}): it cannot be served over a "
                f"paged cache."
            ) from error
    if len(found) != config.num_hidden_layers:
        raise ModelError(
            f"{who} has {config.num_hidden_layers} layers, of which {len(found)} attend through transformers' "
            f"registry. The others would mix the tokens of requests: it cannot be served over a paged cache."
        )
    return found


@contextmanager
def _probing(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    from transformers import AttentionMaskInterface

    before = model.config._attn_implementation
    _registry().register(_PROBE, attend)
    AttentionMaskInterface.register(_PROBE, lambda *_, mask_function, **__: _Mask(mask_function))
    try:
        model.set_attn_implementation(_PROBE)
        yield
    finally:
        model.set_attn_implementation(before)


def _why_not(module: Any, mask: Any, given: dict[str, Any]) -> str | None:
    """What speaks against paged attention for a call of the registry's function."""
    taken = {"scaling", "sliding_window", "s_aux"}
    unknown = [name for name, value in given.items() if value is not None and name not in taken | _OF_NO_EFFECT]
    if unknown:
        return f"its attention is given {', '.join(unknown)}, which is not implemented"
    if not given.get("is_causal", getattr(module, "is_causal", True)):
        return "its attention is not causal"
    if mask is None:
        return None
    if not isinstance(mask, _Mask):
        return "it makes a mask of its own"
    window = given.get("sliding_window") or 0
    if not _sees_as_expected(mask.sees, window):
        return f"a token sees others than those before it{f' within {window}' if window else ''}"
    return None


def _sees_as_expected(sees: Callable[..., Any], window: int) -> bool:
    """Whether a mask is causal, within a window if there is one: by pairs of positions near all that could matter."""
    at = torch.tensor([0, 1, 2, 7, 100, 4099, 100_003, *(window + d for d in (-1, 0, 1))]).clamp(min=0)
    back = torch.tensor([-100, -1, 0, 1, 2, 63, 1024, 8192, 100_000, *(window + d for d in (-1, 0, 1))])
    query, key = (t.flatten() for t in torch.broadcast_tensors(at[:, None], at[:, None] - back))
    query, key = query[key >= 0], key[key >= 0]
    wanted = (key <= query) & ((key > query - window) if window else torch.tensor(True))
    try:
        found = torch.stack([torch.as_tensor(sees(0, 0, q, k)).bool() for q, k in zip(query, key, strict=True)])
    except Exception:  # a mask that depends on the tokens of this call
        return False
    return torch.equal(found, wanted)


def _path(model: nn.Module, module: nn.Module) -> str:
    return next((path for path, other in model.named_modules() if other is module), type(module).__name__)


def _registry() -> Any:
    from transformers import AttentionInterface

    return AttentionInterface
