"""Every zoo model runs; layers, overrides, folders and factories do what ``build`` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bcg_compiler.models import zoo

pytest.importorskip("transformers")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def output(built: zoo.ZooModel, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Logits, or hidden states of a model without a head: ``[1, length, ...]``."""
    with torch.no_grad():
        return built.model(**built.make_inputs(length, generator(seed)))[0]


def config_of(built: zoo.ZooModel) -> Any:
    return built.model.config


@pytest.mark.parametrize("name", zoo.names())
def test_zoo_model_runs_at_two_lengths_and_depends_on_its_inputs(name: str) -> None:
    built = zoo.build(name)
    assert not built.model.training
    assert name in built.label
    for length in (5, 70):  # below and above the sliding windows, the chunks and the indexers' top-k
        first, second = output(built, length, seed=0), output(built, length, seed=1)
        assert first.shape[:2] == (1, 17 if name == "vit" else length)
        assert first.isfinite().all()
        assert (first - second).abs().max() > 1e-2


@pytest.mark.parametrize("name", zoo.names())
def test_layers_sets_the_number_of_layers(name: str) -> None:
    for layers in (1, 5):
        built = zoo.build(name, layers=layers)
        assert {len(stack) for stack in stacks(built.model)} == {layers}
        assert output(built).isfinite().all()


def stacks(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The model's stacks of layers: its outermost module lists (an encoder-decoder has two)."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    return [module for path, module in lists.items() if not any(path.startswith(f"{other}.") for other in lists)]


def test_weights_depend_on_the_seed_only() -> None:
    state = torch.get_rng_state()
    same, again, other = zoo.build("llama"), zoo.build("llama"), zoo.build("llama", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(output(same), output(again))
    assert not torch.equal(output(same), output(other))


def test_inputs_depend_on_the_generator_only_and_avoid_special_tokens() -> None:
    built = zoo.build("llama")
    ids = built.make_inputs(2000, generator())["input_ids"]
    assert torch.equal(ids, built.make_inputs(2000, generator())["input_ids"])
    assert (ids.min(), ids.max()) == (3, 255)  # 0, 1 and 2 are padding, begin and end


def test_learned_positions_cap_the_length() -> None:
    assert zoo.build("bert").make_inputs(1000, generator())["input_ids"].shape == (1, 512)


def test_inputs_follow_dtype_and_device() -> None:
    built = zoo.build("whisper", dtype=torch.bfloat16, device="meta")
    features = built.make_inputs(4, generator())["input_features"]
    assert (features.dtype, features.device.type) == (torch.bfloat16, "meta")
    assert next(built.model.parameters()).device.type == "meta"


def test_config_overrides_reach_the_model() -> None:
    built = zoo.build("glm5", config={"experts_implementation": "eager", "num_hidden_layers": 5, "index_topk": 7})
    config = config_of(built)
    assert config._experts_implementation == "eager"
    assert config.index_topk == 7
    assert config.mlp_layer_types == ["dense"] + 4 * ["sparse"]


def test_glm5_attends_sparsely() -> None:
    """The indexer keeps 64 tokens: later rows differ from dense attention, rows with no more than 64 do not."""
    sparse = zoo.build("glm5", layers=1)
    dense = zoo.build("glm5", layers=1, config={"index_topk": 200})
    differs = (output(sparse, 200) - output(dense, 200)).abs().amax(-1)[0] > 1e-4
    assert not differs[:64].any()
    assert differs[100:].all()


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm5", "whisper"])
@pytest.mark.parametrize("shard", ["1GB", "200KB"])
def test_folder_gives_the_saved_model(name: str, shard: str, tmp_path: Path) -> None:
    built = zoo.build(name, seed=3)
    model: Any = built.model
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "200KB")
    assert torch.equal(output(zoo.build(str(tmp_path))), output(built))


def test_folder_without_weights_gets_random_ones(tmp_path: Path) -> None:
    built = zoo.build("gemma3", layers=4)
    config_of(built).save_pretrained(tmp_path)
    assert torch.equal(output(zoo.build(str(tmp_path))), output(built))
    cut = zoo.build(str(tmp_path), layers=3)
    assert config_of(cut).layer_types == ["sliding_attention", "full_attention", "sliding_attention"]


def test_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(zoo.ModelNotFound, match=r"has no config\.json"):
        zoo.build(str(tmp_path))


def test_folder_of_an_unknown_architecture_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(zoo.ModelNotFound, match=r"no model_type 'lama' \(did you mean .*llama"):
        zoo.build(str(tmp_path))


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(zoo.ModelNotFound, match=r"no model 'qwen3_mo' \(did you mean qwen3_moe"):
        zoo.build("qwen3_mo")


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module with three factories."""
    (tmp_path / "user_models.py").write_text(
        "import torch\n"
        "class Doubler(torch.nn.Linear):\n"
        "    def example_inputs(self, length):\n"
        "        return {'input': torch.ones(1, length, 4)}\n"
        "def with_method(): return Doubler(4, 8)\n"
        "def with_inputs():\n"
        "    return torch.nn.Linear(4, 8), lambda length, g: {'input': torch.rand(1, length, 4, generator=g)}\n"
        "def bare(): return torch.nn.Linear(4, 8)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_models", raising=False)
    return "user_models"


@pytest.mark.parametrize("factory", ["with_method", "with_inputs"])
def test_factory_gives_model_and_inputs(factories: str, factory: str) -> None:
    built = zoo.build(f"{factories}:{factory}")
    assert output(built, 6).shape == (6, 8)
    assert torch.equal(output(built), output(zoo.build(f"{factories}:{factory}")))


def test_factory_without_inputs_says_what_to_add(factories: str) -> None:
    with pytest.raises(ValueError, match=r"example_inputs\(length\)"):
        zoo.build(f"{factories}:bare")


def test_factory_takes_no_layers(factories: str) -> None:
    with pytest.raises(ValueError, match="drop layers"):
        zoo.build(f"{factories}:with_method", layers=2)


def test_factory_that_is_not_there(factories: str) -> None:
    with pytest.raises(zoo.ModelNotFound, match=r"no 'with_metod' \(did you mean with_method"):
        zoo.build(f"{factories}:with_metod")
    with pytest.raises(zoo.ModelNotFound, match="cannot import 'no_such_module'"):
        zoo.build("no_such_module:factory")


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "bcg-compiler\[models\]"'):
        zoo.build("llama")


def test_a_field_that_the_configuration_does_not_have_is_refused() -> None:
    """A configuration takes any keyword: a misspelt one changed nothing, in silence."""
    with pytest.raises(ValueError, match=r"LlamaConfig has no field 'hiden_size' \(did you mean hidden_size"):
        zoo.build("llama", config={"hiden_size": 32})
    zoo.build("llama", config={"attn_implementation": "eager", "rope_theta": 500.0})


def test_weights_of_a_folder_are_not_loaded_on_meta(tmp_path: Path) -> None:
    config_of(zoo.build("llama", layers=1)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert next(zoo.build(str(tmp_path), device="meta").model.parameters()).is_meta
