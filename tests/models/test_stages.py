"""Pipeline stages of the serving models, one after the other in one process: bits, parameters, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from bcg_compiler.distributed.pipeline import PipelineProxy, Stage  # noqa: E402
from bcg_compiler.errors import PipelineError  # noqa: E402
from bcg_compiler.models import serving, zoo  # noqa: E402
from bcg_compiler.models.layers.errors import ModelError  # noqa: E402

SIZES: dict[str, Any] = dict(pages=16, page_size=8)
LAYERS = 5
SHARED = dict(index_topk=8, indexer_types=["full", "full", "shared", "shared", "shared"])

#: name → (zoo name, fields that differ)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3, tied": ("deepseek_v3", dict(tie_word_embeddings=True)),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", SHARED),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, tied": ("gpt_oss", dict(tie_word_embeddings=True)),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def save(name: str, folder: Path) -> None:
    zoo_name, fields = MODELS[name]
    built: Any = zoo.build(zoo_name, layers=LAYERS, config=fields)
    built.model.save_pretrained(folder)


def cut(*ends: int) -> list[Stage]:
    bounds = zip((0, *ends), (*ends, LAYERS), strict=True)
    return [Stage(start=s, end=e, layers=LAYERS, index=i, stages=len(ends) + 1) for i, (s, e) in enumerate(bounds)]


def run(models: list[Any], chunks: list[dict[int, int]]) -> list[torch.Tensor]:
    """The logits of each batch; what comes out of a model is what the next one takes."""
    pool = serving.page_pool(models[0])
    found = []
    for seed, chunk in enumerate(chunks):
        batch = pool.prefill(chunk)
        x: Any = torch.randint(3, 256, (batch.tokens,), generator=torch.Generator().manual_seed(seed))
        with batch.published():
            for model in models:
                x = model(x, batch.positions)
        found.append(x)
    return found


CHUNKS = [{0: 13}, {0: 9, 1: 11}, {2: 7, 1: 12}, {0: 1, 1: 1, 2: 1}]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ends", [(3,), (2, 4)])
def test_stages_give_the_bits_of_the_whole_model(name: str, ends: tuple[int, ...], tmp_path: Path) -> None:
    save(name, tmp_path)
    whole = serving.load(tmp_path, **SIZES)
    stages = [serving.load(tmp_path, stage=stage, **SIZES) for stage in cut(*ends)]
    for found, wanted in zip(run(stages, CHUNKS), run([whole], CHUNKS), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_has_its_own_parameters_under_the_names_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    whole: Any = serving.load(tmp_path, **SIZES)
    wanted = whole.state_dict()
    held: list[str] = []
    for stage in cut(2, 2, 4):  # the second one has no layer
        model: Any = serving.load(tmp_path, stage=stage, **SIZES)
        assert len(model.model.layers) == LAYERS
        assert [i for i, layer in enumerate(model.model.layers) if layer is not None] == [
            *range(stage.start, stage.end)
        ]
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[key])
        held += model.state_dict()
    # A weight that is both embedding and head is needed at both ends.
    twice = {"model.embed_tokens.weight"} if "tied" in name else set()
    assert sorted(held) == sorted([*wanted, *twice])


def test_a_stage_without_layers_hands_on_what_it_takes(tmp_path: Path) -> None:
    save("glm_moe_dsa", tmp_path)
    stages = [serving.load(tmp_path, stage=stage, **SIZES) for stage in cut(3, 3)]
    whole = serving.load(tmp_path, **SIZES)
    assert torch.equal(run(stages, CHUNKS[:1])[0], run([whole], CHUNKS[:1])[0])
    with pytest.raises(ModelError, match="no layer here"):
        serving.page_pool(stages[1])


def test_proxies_have_the_tokens_only_where_they_are_read(tmp_path: Path) -> None:
    save("glm_moe_dsa", tmp_path)
    for end, topk in ((1, 0), (2, 8), (4, 8)):
        before, behind = (serving.load(tmp_path, stage=stage, **SIZES) for stage in cut(end))
        assert before.gives == behind.takes and behind.takes.topk == topk  # type: ignore[union-attr]
        assert before.takes is None and behind.gives is None


def test_random_weights_of_a_stage_are_those_of_the_whole_model(tmp_path: Path) -> None:
    save("glm_moe_dsa", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    whole = serving.build(fields, seed=3, **SIZES)
    stages = [serving.build(fields, seed=3, stage=stage, **SIZES) for stage in cut(2, 4)]
    assert torch.equal(run(stages, CHUNKS[:1])[0], run([whole], CHUNKS[:1])[0])


def test_loading_a_stage_lists_what_is_wrong_with_it_and_not_with_others(tmp_path: Path) -> None:
    save("deepseek_v3, tied", tmp_path)
    held = safetensors.load_file(tmp_path / "model.safetensors")
    for layer in (0, 1, 4):
        held[f"model.layers.{layer}.self_attn.old"] = held.pop(f"model.layers.{layer}.self_attn.kv_b_proj.weight")
    held["model.odd.weight"] = held.pop("model.norm.weight")
    safetensors.save_file(held, tmp_path / "model.safetensors")

    def wrong(stage: Stage) -> list[str]:
        with pytest.raises(ModelError) as caught:
            serving.load(tmp_path, stage=stage, **SIZES)
        return sorted(line.strip() for line in str(caught.value).splitlines()[1:])

    first, middle, last = cut(1, 4)
    odd = "of no use: model.odd.weight"  # nobody's
    assert wrong(first) == [
        "missing: model.layers.0.self_attn.kv_b_proj.weight",
        "of no use: model.layers.0.self_attn.old",
        odd,
    ]
    assert wrong(middle) == [
        "missing: model.layers.1.self_attn.kv_b_proj.weight",
        "of no use: model.layers.1.self_attn.old",
        odd,
    ]
    assert wrong(last) == [
        "missing: model.layers.4.self_attn.kv_b_proj.weight",
        "missing: model.norm.weight",
        "of no use: model.layers.4.self_attn.old",
        odd,
    ]


@pytest.mark.parametrize("name", ["glm_moe_dsa", "gpt_oss"])
def test_a_stage_of_another_number_of_layers_is_refused(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    with pytest.raises(ModelError, match=r"Stage 1 of 2 \(start 4, end 7\) is one of 7 layers, .* has 5"):
        serving.load(tmp_path, stage=Stage.even(7, 2, 1), **SIZES)


def test_a_proxy_that_a_stage_cannot_take_is_refused_compiled_or_not(tmp_path: Path) -> None:
    save("glm_moe_dsa", tmp_path)
    model: Any = serving.load(tmp_path, stage=cut(3)[1], **SIZES)
    batch = serving.page_pool(model).prefill({0: 5})
    hidden, topk = torch.randn(5, 128), torch.zeros(5, 8, dtype=torch.int32)
    wrong = {
        "lacks topk_indices": PipelineProxy(hidden),
        "hidden_states of the proxy between stages 0 and 1 of 2 is bfloat16": PipelineProxy(
            hidden.bfloat16(), topk_indices=topk
        ),
        "has 9 rows, and this call has 5": PipelineProxy(
            torch.randn(9, 128), topk_indices=torch.zeros(9, 8, dtype=torch.int32)
        ),
    }
    compiled = torch.compile(model, backend="bcg", options={"capture": "emulated"})
    for says, proxy in wrong.items():
        for called in (model, compiled):
            with batch.published(), pytest.raises(PipelineError, match=says):
                called(proxy, batch.positions)


def test_8_bit_keys_are_for_models_with_an_indexer_and_stages_of_them_that_have_none(tmp_path: Path) -> None:
    save("glm_moe_dsa", tmp_path)
    stages = [serving.load(tmp_path, stage=stage, fp8_index=True, **SIZES) for stage in cut(3)]
    (whole,) = run([serving.load(tmp_path, fp8_index=True, **SIZES)], CHUNKS[:1])
    assert torch.equal(run(stages, CHUNKS[:1])[0], whole)
