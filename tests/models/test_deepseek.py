"""The serving models of the DeepSeek families: logits are those of transformers' own models, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bcg_compiler as bcg

pytest.importorskip("transformers")

from bcg_compiler.models import serving, zoo

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
    "deepseek_v2 without query rank, greedy": (
        "deepseek_v2",
        dict(q_lora_rank=None, topk_method="greedy", norm_topk_prob=True),
    ),
    "deepseek_v3": ("deepseek_v3", dict(attention_bias=True)),
    "deepseek_v3 with YaRN, halves": ("deepseek_v3", dict(rope_parameters=YARN, rope_interleave=False)),
    "deepseek_v32": ("deepseek_v32", dict(rope_parameters=YARN)),
    "glm_moe_dsa": ("glm_moe_dsa", dict(index_topk=16)),
    "glm_moe_dsa that shares": ("glm_moe_dsa", dict(index_topk=16, indexer_types=["full", "shared", "full"])),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def anew(clean: None) -> None:
    """Nothing that Dynamo has compiled before."""
    torch.compiler.reset()


def saved(name: str, folder: Path, **kwargs: Any) -> Any:
    """The model of transformers of a name of MODELS, saved to a folder. Routing biases, which begin as 0, are drawn."""
    zoo_name, fields = MODELS[name]
    model: Any = zoo.build(zoo_name, config=fields).model
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    model.save_pretrained(folder, **kwargs)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_several_requests_are_those_of_transformers(serve: Any, name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ours = serving.load(tmp_path, pages=16, page_size=8)
    prompts = serve.tokens((33, 1, 20))
    batch = serving.page_pool(ours).prefill(dict(enumerate(map(len, prompts))))
    with batch.published():
        serve.assert_close(ours(torch.cat(prompts), batch.positions), serve.expected(theirs, prompts))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_with_a_prefix_give_the_logits_of_the_whole(serve: Any, name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = serving.load(tmp_path, pages=16, page_size=8)
    pool = serving.page_pool(ours)
    prompts = serve.tokens((40, 30))
    # Chunks begin and end within pages; the second request comes later; the last one is a decoding step.
    chunks = ({0: 13}, {0: 20, 1: 10}, {1: 20}, {0: 7})
    serve.assert_close(serve.in_chunks(ours, pool, prompts, chunks), serve.expected(theirs, prompts))


#: A batch of each, in turn: new requests, longer prefixes, other lengths, contexts that fit in top-k and not.
BATCHES = ({0: 9, 1: 5}, {0: 20, 2: 12}, {1: 3, 2: 1, 3: 24}, {3: 20, 4: 9}, {0: 1, 1: 1, 2: 1})


def fields_of(name: str) -> dict[str, Any]:
    zoo_name, changed = MODELS[name]
    config: Any = zoo.build(zoo_name, config=changed, device="meta").model.config
    return config.to_dict()


def pair(name: str, fp8_index: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """A model, the same once more, and that one compiled."""
    sizes = dict(pages=24, page_size=8, seed=1)
    plain, other = (serving.build(fields_of(name), **sizes, fp8_index=fp8_index) for _ in range(2))
    given = {"capture": "emulated", "segment_compiler": "eager", **options}
    return plain, other, torch.compile(other, backend="bcg", fullgraph=True, options=given)


SPARSE = ["linear", "choose_tokens", "sparse_mla_attention"]  # the gate's projection, marked, is part of the break

#: What the breaks of each model hold.
BREAKS = {
    "deepseek_v2": [["mla_attention"], ["mla_attention"], ["routed_experts"]],
    "deepseek_v3": [["mla_attention"], ["mla_attention"], ["routed_experts"]],
    "deepseek_v32": [SPARSE, SPARSE, ["routed_experts"]],
    "glm_moe_dsa that shares": [SPARSE, SPARSE[2:], ["routed_experts"], SPARSE, ["routed_experts"]],
}

COMPILED = [
    pytest.param("deepseek_v2", marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", marks=pytest.mark.nightly),
    "deepseek_v32",
    pytest.param("glm_moe_dsa that shares", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_uncompiled_bit_for_bit(serve: Any, name: str, anew: None) -> None:
    plain, other, compiled = pair(name)
    pools = serving.page_pool(plain), serving.page_pool(other)
    for seed, requests in enumerate((*BATCHES, BATCHES[0], BATCHES[0])):
        assert torch.equal(serve.call(compiled, pools[1], requests, seed), serve.call(plain, pools[0], requests, seed))
    for (key, buffer), wanted in zip(other.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, wanted), key
    stats = bcg.stats(compiled)
    assert (stats.graphs, stats.replays > 0, stats.recaptures) == (1, True, 0)


@pytest.mark.parametrize("name", COMPILED)
def test_padded_rows_are_shown_never_to_reach_live_ones(serve: Any, name: str, anew: None) -> None:
    mark = ["logits_gate"] if BREAKS[name][0] == SPARSE else []
    plain, other, compiled = pair(name, ladder=[16, 32, 64], mark=mark)
    pools = serving.page_pool(plain), serving.page_pool(other)
    # The first call warms up, with its own rows. Matrix products of other sizes may add up in another order.
    for seed, (requests, bucket) in enumerate(zip(BATCHES, (None, 32, 32, 32, 16), strict=True)):
        found = serve.call(compiled, pools[1], requests, seed)
        if seed == 0:
            report = bcg.capture(compiled)  # runs no body: no batch is published
            assert [rung.rows for rung in report.rungs if not rung.error] == [64, 32, 16]
        assert torch.equal(found, serve.call(plain, pools[0], requests, seed, rows=bucket))
    (program,) = bcg.programs_of(compiled)
    (rows,) = program.plan.rows
    assert rows.kind == "row_wise" and not program.plan.unpadded
    steps = [[node.op.rpartition(".")[2] for node in s.nodes] for s in program.plan.steps if s.kind == "break"]
    named = {op for step in BREAKS[name] for op in step}
    assert [[op for op in step if op in named] for step in steps] == BREAKS[name]
    assert bcg.stats(compiled).eager_runs == {"warm_up": 1}


def test_an_index_of_8_bits_is_rounded_in_the_segment_and_padded(serve: Any, anew: None) -> None:
    plain, other, compiled = pair("deepseek_v32", fp8_index=True, ladder=[16, 32, 64])
    pools = serving.page_pool(plain), serving.page_pool(other)
    for seed, (requests, bucket) in enumerate(zip(BATCHES, (None, 32, 32, 32, 16), strict=True)):
        found = serve.call(compiled, pools[1], requests, seed)
        assert torch.equal(found, serve.call(plain, pools[0], requests, seed, rows=bucket))
    (program,) = bcg.programs_of(compiled)
    assert not program.plan.unpadded
    in_segments = {node.op for step in program.plan.segments for node in step.nodes}
    in_breaks = {node.op for step in program.plan.steps if step.kind == "break" for node in step.nodes}
    assert ".amax" in in_segments and ".amax" not in in_breaks
