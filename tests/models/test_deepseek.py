"""The serving models of the DeepSeek families: logits are those of transformers' own models, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bcg_compiler as bcg

pytest.importorskip("transformers")

from bcg_compiler.models import serving, zoo  # noqa: E402

YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=64,
    mscale=1.0,
    mscale_all_dim=0.7,
)

#: name → (zoo name, fields that differ)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 without query rank, greedy": ("deepseek_v2", dict(q_lora_rank=None, topk_method="greedy")),
    "deepseek_v3": ("deepseek_v3", dict(attention_bias=True)),
    "deepseek_v3 with YaRN, halves": ("deepseek_v3", dict(rope_parameters=YARN, rope_interleave=False)),
    "deepseek_v32": ("deepseek_v32", dict(rope_parameters=YARN)),
    "glm_moe_dsa": ("glm_moe_dsa", dict(index_topk=16)),
    "glm_moe_dsa that shares": ("glm_moe_dsa", dict(index_topk=16, indexer_types=["full", "shared", "full"])),
}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> Iterator[None]:
    torch.compiler.reset()
    yield


def saved(name: str, folder: Path, **kwargs: Any) -> Any:
    """transformers' own model of a name of MODELS, saved to a folder. Routing biases are drawn too: they begin as 0."""
    zoo_name, fields = MODELS[name]
    model: Any = zoo.build(zoo_name, config=fields).model
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder, **kwargs)
    return model


def tokens(lengths: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (length,), generator=generator) for length in lengths]


def expected(model: Any, prompts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts])


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_several_requests_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ours = serving.load(tmp_path, pages=16, page_size=8)
    prompts = tokens((33, 1, 20))
    batch = serving.page_pool(ours).prefill(dict(enumerate(map(len, prompts))))
    with batch.published():
        assert_close(ours(torch.cat(prompts), batch.positions), expected(theirs, prompts))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_with_a_prefix_give_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = serving.load(tmp_path, pages=16, page_size=8)
    pool = serving.page_pool(ours)
    prompts = tokens((40, 30))
    found: list[list[torch.Tensor]] = [[], []]
    at = [0, 0]
    # Chunks begin and end within pages; the second request comes later; the last one is a decoding step.
    for chunk in ({0: 13}, {0: 20, 1: 10}, {1: 20}, {0: 7}):
        batch = pool.prefill(chunk)
        ids = torch.cat([prompts[i][at[i] : at[i] + new] for i, new in chunk.items()])
        with batch.published():
            logits = ours(ids, batch.positions).split(list(chunk.values()))
        for (i, new), part in zip(chunk.items(), logits, strict=True):
            found[i].append(part)
            at[i] += new
    assert_close(torch.cat([*found[0], *found[1]]), expected(theirs, prompts))
