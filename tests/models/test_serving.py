"""Configurations and checkpoints: what is loaded, and what is refused with everything that is wrong named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import bcg_compiler as bcg  # noqa: E402
from bcg_compiler.models import serving, zoo  # noqa: E402
from bcg_compiler.models.layers.checkpoint import places_of  # noqa: E402
from bcg_compiler.models.layers.errors import ModelError  # noqa: E402

SIZES: dict[str, Any] = dict(pages=4, page_size=8)
DSA: dict[str, Any] = dict(index_topk=4, index_n_heads=1, index_head_dim=8)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a small DeepSeek-V3."""
    built: Any = zoo.build("deepseek_v3", layers=2)
    built.model.save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.load_file(folder / "model.safetensors")


def save(folder: Path, held: dict[str, torch.Tensor]) -> None:
    safetensors.save_file(held, folder / "model.safetensors")


def logits(model: Any) -> torch.Tensor:
    batch = serving.page_pool(model).prefill({0: 5})
    with batch.published():
        return model(torch.arange(3, 8), batch.positions)


def test_an_unknown_family_is_answered_with_the_nearest(folder: Path) -> None:
    change(folder, model_type="deepseek_v33")
    with pytest.raises(ModelError, match=r"family 'deepseek_v33'; did you mean .*deepseek_v3"):
        serving.load(folder, **SIZES)
    change(folder, model_type="mamba")
    with pytest.raises(ModelError, match=r"family 'mamba'; there are deepseek_v2, .*glm_moe_dsa"):
        serving.load(folder, **SIZES)


def test_a_folder_without_config_or_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights: there is no \*\.safetensors"):
        serving.load(folder, **SIZES)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks files that its index names: one\.safetensors"):
        serving.load(folder, **SIZES)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        serving.load(folder, **SIZES)


def test_missing_and_needless_tensors_are_all_listed(folder: Path) -> None:
    held = tensors(folder)
    for name in ("model.layers.0.self_attn.kv_b_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"):
        held[name + "_old"] = held.pop(name)
    save(folder, held)
    with pytest.raises(ModelError) as caught:
        serving.load(folder, **SIZES)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  missing: model.layers.0.self_attn.kv_b_proj.weight",
        "  missing: model.layers.1.mlp.experts.3.up_proj.weight",
        "  of no use: model.layers.0.self_attn.kv_b_proj.weight_old",
        "  of no use: model.layers.1.mlp.experts.3.up_proj.weight_old",
    ]


def test_a_long_list_is_cut(folder: Path) -> None:
    save(folder, {"lm_head.weight": tensors(folder)["lm_head.weight"]})
    with pytest.raises(ModelError, match=r"\n  and \d+ more$"):
        serving.load(folder, **SIZES)


def test_tensors_of_another_shape_or_type_are_all_listed(folder: Path) -> None:
    held = tensors(folder)
    held["model.norm.weight"] = torch.ones(65)
    held["lm_head.weight"] = held["lm_head.weight"].to(torch.int8)
    held["model.layers.1.mlp.experts.0.down_proj.weight"] = torch.ones(64, 32).to(torch.float8_e4m3fn)
    save(folder, held)
    with pytest.raises(ModelError) as caught:
        serving.load(folder, **SIZES)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  of another shape: model.norm.weight is [65] and not [64]",
        "  of another type: lm_head.weight is int8, which is not loaded",
        "  of another type: model.layers.1.mlp.experts.0.down_proj.weight is float8_e4m3fn, which is not loaded",
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(num_experts_per_tok=9), "goes to 9 experts and there are 8"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config is .*fp8"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'; implemented: 'silu'"),
        (dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "rope_type is 'longrope'"),
        (dict(mlp_layer_types=["dense"]), "has 2 layers and says of 1 what they are"),
        (dict(model_type="deepseek_v32"), "deepseek_v32 lacks the field 'index_n_heads'"),
        (dict(DSA, model_type="glm_moe_dsa", indexer_types=["shared"] * 2), "indexer must be 'full'"),
        (dict(DSA, model_type="deepseek_v32", q_lora_rank=None), "q_lora_rank must be given"),
    ],
)
def test_a_configuration_that_is_not_implemented_is_refused(folder: Path, fields: dict[str, Any], says: str) -> None:
    change(folder, **fields)
    with pytest.raises(ModelError, match=says):
        serving.load(folder, **SIZES)


def test_a_cache_without_pages_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="pages=0, page_size=64"):
        serving.load(folder, pages=0)


def test_layers_that_predict_several_tokens_are_left_out(folder: Path) -> None:
    wanted = logits(serving.load(folder, **SIZES))
    save(folder, {**tensors(folder), "model.layers.2.eh_proj.weight": torch.ones(2)})
    assert torch.equal(logits(serving.load(folder, **SIZES)), wanted)
    change(folder, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=re.escape("of no use: model.layers.2.eh_proj.weight")):
        serving.load(folder, **SIZES)


def test_tied_embeddings_are_one_parameter(folder: Path) -> None:
    held = tensors(folder)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save(folder, held)
    wanted = logits(serving.load(folder, **SIZES))
    del held["lm_head.weight"]
    save(folder, held)
    change(folder, tie_word_embeddings=True)
    model: Any = serving.load(folder, **SIZES)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), wanted)


def test_a_model_is_loaded_in_the_type_of_its_configuration_or_another(folder: Path) -> None:
    wanted = logits(serving.load(folder, **SIZES))
    half = serving.load(folder, **SIZES, dtype=torch.bfloat16)
    assert logits(half).dtype == torch.bfloat16
    # Routing is computed in float32, rotary angles too.
    assert {name for name, tensor in half.state_dict().items() if tensor.dtype == torch.float32} == {
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    }
    assert (logits(half).float() - wanted).abs().max() < 0.1 * wanted.abs().max()
    change(folder, dtype="bfloat16")
    assert torch.equal(logits(serving.load(folder, **SIZES)), logits(half))


def test_random_weights_depend_on_the_seed_only(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    first, again, other = (serving.build(fields, seed=seed, **SIZES) for seed in (1, 1, 2))
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_a_model_of_full_size_needs_no_memory_on_meta(name: str) -> None:
    import transformers

    fields = transformers.CONFIG_MAPPING[name]().to_dict()
    model = serving.empty(fields, pages=1024, device="meta", dtype=torch.bfloat16)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert len(model.model.layers) in (61, 78) and 600 < billions < 800  # type: ignore[union-attr,arg-type]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert len(places_of(model)) > 256 * 3 * 58


def test_breaks_of_the_models_here_are_shown_with_their_line() -> None:
    """Frames of the whole package were left out, its models included: every break had an unknown line."""
    built: Any = zoo.build("deepseek_v3", layers=2)
    model = serving.build(built.model.config.to_dict(), **SIZES)
    compiled = torch.compile(model, backend="bcg", options={"capture": "off"})
    batch = serving.page_pool(model).prefill({0: 5})
    with batch.published():
        compiled(torch.arange(3, 8), batch.positions)
    (program,) = bcg.programs_of(compiled)
    lines = [reason.source for step in program.plan.breaks for reason in step.reasons]
    assert lines and all(line is not None and "/models/layers/" in line.file for line in lines)
