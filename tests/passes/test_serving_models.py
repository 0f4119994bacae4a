"""The passes on the serving models: one break a layer for indexer and attention, in any layer and with eager's bits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bcg_compiler as bcg

pytest.importorskip("transformers")

from bcg_compiler.models import serving, zoo


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    bcg.reset()
    with torch.inference_mode():
        yield
    bcg.reset()


def plan_of(name: str, **options: Any) -> bcg.Plan:
    """The plan of a serving model, after three batches that equal the uncompiled model's bit for bit."""
    config: Any = zoo.build(name, config={"index_topk": 16}, device="meta").model.config
    plain, other = (serving.build(config.to_dict(), pages=24, page_size=8, seed=1) for _ in range(2))
    compiled: Any = torch.compile(other, backend="bcg", fullgraph=True, options={"capture": "emulated", **options})
    pools = [serving.page_pool(model) for model in (plain, other)]
    for requests in ({0: 20, 1: 12}, {2: 1, 3: 31}, {3: 5, 0: 27}):
        results = []
        for model, pool in zip((plain, compiled), pools, strict=True):
            batch = pool.prefill(requests)
            ids = torch.arange(batch.tokens) % 200 + 3
            with batch.published():
                results.append(model(ids, batch.positions))
        assert torch.equal(*results)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and bcg.stats(compiled).replays == 2
    return program.plan


@pytest.mark.parametrize(
    ("name", "layers", "moe"),
    [("deepseek_v32", 2, 1), pytest.param("glm_moe_dsa", 3, 2, marks=pytest.mark.nightly)],
)
def test_indexer_and_attention_of_each_layer_are_one_break(name: str, layers: int, moe: int) -> None:
    plan = plan_of(name)
    assert [p.changes for p in plan.passes if p.name == "fuse_mla_bmm"] == [layers]
    assert dict(plan.reasons()) == {"dsa_indexer": layers, "attention": layers, "a2a_moe": moe}
    assert len(plan.breaks) == layers + moe
    together = [{r.code for r in step.reasons} for step in plan.breaks]
    assert together.count({"dsa_indexer", "attention"}) == layers and together.count({"a2a_moe"}) == moe


@pytest.mark.nightly
def test_without_the_pass_each_layer_has_a_break_and_a_segment_of_one_kernel_more() -> None:
    plan = plan_of("deepseek_v32", disable_passes=["fuse_mla_bmm"], min_segment_kernels=1)
    assert len(plan.breaks) == 2 * 2 + 1
    assert [step.kernels for step in plan.segments].count(1) == 2


@pytest.mark.nightly
def test_a_marked_indexer_takes_its_projections_along() -> None:
    """The declared break is in a module that is marked as a whole; the gate has a mark of its own."""
    plan = plan_of("deepseek_v32", mark=["dsa_indexer", "logits_gate"])
    assert {"dsa_indexer", "logits_gate", "attention", "a2a_moe"} == set(plan.reasons())
    assert len(plan.breaks) == 3
