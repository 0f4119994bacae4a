"""Models by name, for the command line and the tests: small random ones, Hugging Face folders, or your own.

A name is one of

* a zoo name (``names()``): a small configuration of a transformers architecture with random weights;
* a folder with a Hugging Face ``config.json``: its safetensors weights if it holds any, random ones otherwise;
* ``package.module:factory``, or ``path/to/file.py:factory``: a callable without arguments that returns a module, or
  ``(module, make_inputs)``.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MakeInputs = Callable[[int, torch.Generator], dict[str, Any]]

_TOKENS: dict[str, Any] = dict(vocab_size=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_hidden_layers=2)
# An initializer_range near 1/sqrt(hidden_size) keeps every layer's effect on the output well above rounding.
_ENCODER = dict(_TOKENS, hidden_size=64, intermediate_size=128, num_attention_heads=4, initializer_range=0.1)
_DECODER = dict(_ENCODER, num_key_value_heads=2, head_dim=16, max_position_embeddings=16384)
_MOE = dict(_DECODER, num_experts_per_tok=2, moe_intermediate_size=32)
_MLA = dict(
    _MOE,
    num_key_value_heads=4,
    head_dim=8,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
)
_DEEPSEEK = dict(_MLA, first_k_dense_replace=1, n_shared_experts=1, n_group=2, topk_group=1)
# An index score is a weighted sum of one relu a head: with few heads many scores are exactly 0, and which of several
# equal scores top-k takes differs between kernels. With 12 heads that hardly happens at these sizes.
_DSA = dict(_DEEPSEEK, index_topk=16, index_n_heads=12, index_head_dim=16)
_GLM5 = dict(
    _DSA,
    model_type="glm_moe_dsa",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=3,
    q_lora_rank=64,
    kv_lora_rank=32,
    n_group=1,
    topk_group=1,
    index_topk=64,
)

# The fields of each architecture's configuration; model_type is the zoo name unless given.
_ZOO: dict[str, dict[str, Any]] = {
    "bert": dict(_ENCODER, max_position_embeddings=512),
    "deepseek_v2": dict(_DEEPSEEK, topk_method="group_limited_greedy"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DSA,
    "gemma3": dict(
        _DECODER,
        model_type="gemma3_text",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        query_pre_attn_scalar=16,
    ),
    "glm4_moe": dict(_MOE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1),
    "glm5": _GLM5,
    "glm_moe_dsa": _GLM5,
    "gpt_oss": dict(_MOE, num_local_experts=8, sliding_window=16, max_position_embeddings=131072),
    "kimi_linear": dict(
        _MLA,
        num_local_experts=8,
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=16,
        linear_num_heads=4,
    ),
    "llama": _DECODER,
    "llama4": dict(
        _DECODER,
        model_type="llama4_text",
        intermediate_size_mlp=128,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        attention_chunk_size=16,
    ),
    "longcat_flash": dict(_MLA, zero_expert_num=2, moe_topk=2, expert_ffn_hidden_size=32),
    "mamba2": dict(_DECODER, num_heads=8, state_size=16, n_groups=2, chunk_size=16),
    "minimax_m2": dict(_MOE, num_local_experts=8),
    "mixtral": dict(_MOE, num_local_experts=8),
    "nemotron_h": dict(
        _MOE,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        num_hidden_layers=4,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        moe_shared_expert_intermediate_size=32,
    ),
    "qwen3": _DECODER,
    "qwen3_moe": dict(_MOE, num_experts=8),
    "qwen3_next": dict(
        _MOE,
        layer_types=["linear_attention", "full_attention"],
        num_experts=8,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "t5": dict(_TOKENS, d_model=64, d_kv=16, d_ff=128, num_heads=4),
    "vit": dict(_ENCODER, image_size=32, patch_size=8),
    "whisper": dict(
        _TOKENS,
        d_model=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=64,
        decoder_start_token_id=1,
        init_std=0.1,
    ),
}

# What architectures call their number of layers, and their lists with one entry a layer.
_LAYER_COUNTS = {"num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layer"}
_LAYER_LISTS = {"layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "no_rope_layers"}

# What every configuration takes beside its fields.
_KEYWORDS = {"attn_implementation", "experts_implementation", "rope_theta"}


class ModelNotFound(ValueError):
    """A model's name is no zoo name, no folder with a ``config.json`` and no ``package.module:factory``."""


@dataclass(frozen=True)
class ZooModel:
    """A model in eval mode, and what to call it with.

    Attributes:
        model: the module, on the device and in the dtype asked of ``build``.
        make_inputs: ``make_inputs(length, generator)`` gives the keyword arguments of one prefill call of ``length``
            tokens, batch 1, on the model's device; the CPU generator decides the tokens. Learned positions cap the
            length; an image model ignores it.
        label: one line for people: name, class, number of parameters.
    """

    model: torch.nn.Module
    make_inputs: MakeInputs
    label: str


def names() -> list[str]:
    """The zoo's names, sorted."""
    return sorted(_ZOO)


def build(
    name: str,
    *,
    layers: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> ZooModel:
    """Build the model called ``name`` (see the module's docstring for the three kinds of name).

    Args:
        name: a zoo name, a folder, or ``package.module:factory``.
        layers: number of hidden layers, of the encoder and of the decoder alike. Lists with one entry a layer are
            cut, or repeated from their start.
        device: where model and inputs live. Weights are drawn on the CPU, so they are the same on every device. For
            "meta" the weights of a folder are not loaded.
        dtype: of floating-point weights and inputs.
        seed: of random weights.
        config: fields of the transformers configuration to override, e.g. ``{"experts_implementation": "eager"}``.

    Raises:
        ModelNotFound: nothing is called ``name``; the message has the nearest names. Also if a folder's ``model_type``
            is unknown to the transformers installed.
        ImportError: a zoo name or a folder, and transformers is not installed.
        ValueError: ``layers`` or ``config`` for a factory, a field that the configuration does not have, or a model
            whose inputs are unknown.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in _ZOO:
            model, make_inputs = _build_transformers(
                {"model_type": name}, {**_ZOO[name], **(config or {})}, layers, dtype
            )
        elif Path(name).is_dir():
            empty = torch.device(device).type == "meta"
            model, make_inputs = _build_folder(Path(name), dict(config or {}), layers, dtype, empty)
        elif ":" in name:
            if layers is not None or config:
                raise ValueError(f"{name!r} is a factory: it decides its own configuration, so drop layers and config")
            model, make_inputs = _build_factory(name)
            model = model.to(dtype)
        else:
            raise _not_found(name)
    if config:
        _check_fields(type(model.config), config)
    model = model.to(device).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    label = f"{name}: {type(model).__name__}, {parameters:,} parameters"
    return ZooModel(model, _on_device(make_inputs, torch.device(device)), label)


def fields(name: str, *, layers: int | None = None, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of the configuration of ``name``, a zoo name or a folder: what ``models.serving`` builds models of.

    Arguments and errors as of ``build``; ``ValueError`` for a factory, which has no configuration. A folder's fields
    are those of its file, and transformers is not needed to read them.
    """
    asked = dict(config or {})
    if name in _ZOO:
        found = _config({"model_type": name}, {**_ZOO[name], **asked}, layers)
    elif Path(name).is_dir():
        if layers is None and not asked:
            return _folder_fields(Path(name))
        found = _config(_folder_fields(Path(name)), dict(asked), layers)
    elif ":" in name:
        raise ValueError(f"{name!r} is a factory, which has no configuration; give a zoo name or a folder")
    else:
        raise _not_found(name)
    _check_fields(type(found), asked)
    return found.to_dict()


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"no model {name!r}{_nearest(name, _ZOO)}; give a zoo name ({', '.join(names())}), a folder with a "
        "config.json, or package.module:factory"
    )


def _folder_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no config.json; give the folder of a Hugging Face model")
    return json.loads(path.read_text())


def _build_folder(
    folder: Path, overrides: dict[str, Any], layers: int | None, dtype: torch.dtype, empty: bool
) -> tuple[torch.nn.Module, MakeInputs]:
    weights = folder if any(folder.glob("*.safetensors")) and not empty else None
    return _build_transformers(_folder_fields(folder), overrides, layers, dtype, weights)


def _build_transformers(
    fields: dict[str, Any],
    overrides: dict[str, Any],
    layers: int | None,
    dtype: torch.dtype,
    weights: Path | None = None,
) -> tuple[torch.nn.Module, MakeInputs]:
    """Build from a ``config.json``'s fields, overrides, and the folder of weights (None: random ones)."""
    config = _config(fields, overrides, layers)
    import transformers

    # Encoders (bert) and encoder-decoders (whisper) have causal variants too, which leave half of the model out.
    causal = getattr(config, "is_decoder", True) and not config.is_encoder_decoder
    causal = causal and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    if weights is None:
        model = auto.from_config(config, dtype=dtype)
    else:
        model = auto.from_pretrained(weights, config=config, dtype=dtype)
    return model, _prefill_inputs(model)


def _config(fields: dict[str, Any], overrides: dict[str, Any], layers: int | None) -> Any:
    """The configuration of transformers, of a ``config.json``'s fields and overrides."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError('this model needs transformers: pip install "bcg-compiler[models]"') from error

    # Architectures name this field differently: see _LAYER_COUNTS.
    overridden_layers = overrides.pop("num_hidden_layers", None)
    layers = overridden_layers if layers is None else layers
    given = {**fields, **overrides}
    model_type = given.pop("model_type", None)
    if model_type not in transformers.CONFIG_MAPPING:
        near = _nearest(str(model_type), transformers.CONFIG_MAPPING.keys())
        raise ModelNotFound(f"transformers {transformers.__version__} has no model_type {model_type!r}{near}")
    if layers is not None:
        given |= _layer_fields(given, transformers.CONFIG_MAPPING[model_type], layers)
    return transformers.AutoConfig.for_model(model_type, **given)


def _check_fields(config_class: Any, overrides: Mapping[str, Any]) -> None:
    """A configuration takes any keyword, so a misspelt field would silently change nothing."""
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map) | _KEYWORDS
    for key in overrides:
        if key not in known and not hasattr(config_class, key):
            raise ValueError(f"{config_class.__name__} has no field {key!r}{_nearest(key, known)}")


def _layer_fields(fields: dict[str, Any], config_class: type, layers: int) -> dict[str, Any]:
    """The fields that say how many layers there are, and the given lists with one entry a layer, for ``layers``."""
    known = {field.name for field in dataclasses.fields(config_class)}
    changed: dict[str, Any] = dict.fromkeys(_LAYER_COUNTS & known, layers)
    for key in _LAYER_LISTS & fields.keys():
        if given := fields[key]:
            changed[key] = [given[layer % len(given)] for layer in range(layers)]
    if not changed:
        raise ValueError(f"{config_class.__name__} has no known field for its number of layers; use config instead")
    return changed


def _prefill_inputs(model: Any) -> MakeInputs:
    """Inputs for what a transformers model names its main input, and decoder tokens if it has a decoder beside it."""
    config = model.config.get_text_config()
    main = model.main_input_name
    if main not in ("input_ids", "pixel_values", "input_features"):
        raise ValueError(f"{type(model).__name__} takes {main!r}, which cannot be made up; wrap it in a factory")
    token_inputs = ["input_ids"] if main == "input_ids" else []
    if config.is_encoder_decoder:
        token_inputs.append("decoder_input_ids")
    special = _special_ids(config)
    ids = torch.tensor([token for token in range(getattr(config, "vocab_size", 0)) if token not in special])
    limits = (getattr(config, field, None) for field in ("max_target_positions", "max_position_embeddings"))
    longest = min((limit for limit in limits if limit), default=sys.maxsize)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters

    def make_inputs(length: int, generator: torch.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {"use_cache": False} if takes_cache else {}
        if main != "input_ids":
            inputs[main] = torch.randn(_feature_shape(main, config), generator=generator).to(model.dtype)
        for key in token_inputs:
            inputs[key] = ids[torch.randint(len(ids), (1, min(length, longest)), generator=generator)]
        return inputs

    return make_inputs


def _feature_shape(name: str, config: Any) -> tuple[int, ...]:
    if name == "pixel_values":
        return (1, config.num_channels, config.image_size, config.image_size)
    # Audio: the encoder's convolutions halve the number of frames.
    return (1, config.num_mel_bins, 2 * config.max_source_positions)


def _special_ids(config: Any) -> set[int]:
    """The token ids with a meaning of their own, each of which is an int, a list of them, or None."""
    found: set[int] = set()
    for kind in ("pad", "bos", "eos", "decoder_start"):
        ids = getattr(config, f"{kind}_token_id", None)
        found.update(ids if isinstance(ids, list) else () if ids is None else (ids,))
    return found


def _build_factory(name: str) -> tuple[torch.nn.Module, MakeInputs]:
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path} for the model {name!r}")
        sys.path.insert(0, str(path.parent))  # for its own imports, as if it were run
        module_name = path.stem
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelNotFound(f"cannot import {module_name!r} for the model {name!r}: {error}") from error
    if not hasattr(module, attribute):
        raise ModelNotFound(f"module {module_name!r} has no {attribute!r}{_nearest(attribute, vars(module))}")
    made = getattr(module, attribute)()
    if isinstance(made, tuple):
        return made
    if not hasattr(made, "example_inputs"):
        raise ValueError(
            f"{name!r} gives no inputs: return (module, make_inputs), with make_inputs(length, generator) -> dict of "
            "keyword arguments, or give the module a method example_inputs(length) that returns such a dict"
        )
    return made, lambda length, generator: made.example_inputs(length)


def _on_device(make_inputs: MakeInputs, device: torch.device) -> MakeInputs:
    def moved(length: int, generator: torch.Generator) -> dict[str, Any]:
        inputs = make_inputs(length, generator)
        return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}

    return moved


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, known)
    return f" (did you mean {', '.join(matches)}?)" if matches else ""
