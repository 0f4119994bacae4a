"""The passes on the serving models: which breaks a layer has, and a tail, with the numbers of eager code."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.buckets import Admission
from bcg_compiler.distributed import Zigzag

pytest.importorskip("transformers")

from bcg_compiler.models import serving, zoo
from bcg_compiler.models.layers.batch import PrefillBatch


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


@dataclass
class OneRank:
    """A group of one rank, which keeps all that is gathered."""

    seen: list[torch.Tensor] = field(default_factory=list)
    rank, size = 0, 1

    def all_gather(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        self.seen.append(rows.clone())
        return rows[None]


@dataclass
class OneOfTwo:
    """A rank whose other one is not there, and gives what ``OneRank`` has seen of its rows."""

    rank: int
    layout: Zigzag
    batch: PrefillBatch
    seen: list[torch.Tensor]
    size = 2

    def all_gather(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        theirs = self.layout.split(self.seen.pop(0), self.batch.lengths, 1 - self.rank)
        found = rows.new_zeros(self.size, longest, *rows.shape[1:])
        found[self.rank, : len(rows)], found[1 - self.rank, : len(theirs)] = rows, theirs
        return found


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_a_context_parallel_model_is_a_body_and_a_tail(name: str) -> None:
    config: Any = zoo.build(name, device="meta").model.config
    layout = Zigzag(2)
    alone, whole, *ranks = (
        serving.build(config.to_dict(), pages=24, page_size=8, context_parallel=shared) for shared in (0, 1, 1, 1)
    )
    options = {"capture": "emulated", "segment_compiler": "eager", "ladder": [8, 16, 32]}
    compiled: Any = [torch.compile(model, backend="bcg", fullgraph=True, options=options) for model in ranks]
    pool = serving.page_pool(alone)
    for requests in ({0: 20, 1: 12}, {2: 1, 3: 31}, {3: 25, 0: 16}):
        batch, kept = pool.prefill(requests), OneRank()
        ids = torch.arange(batch.tokens) % 200 + 3
        with batch.published():
            wanted = alone(ids, batch.positions)
        with batch.context_parallel(Zigzag(1), kept).published():
            assert torch.allclose(whole(ids, batch.positions), wanted, atol=1e-4)
        for rank, model in enumerate(compiled):
            local = batch.context_parallel(layout, OneOfTwo(rank, layout, batch, list(kept.seen)))
            assert local.share is not None
            given = local.share.split(ids), local.positions
            for rows in given:
                torch._dynamo.mark_dynamic(rows, 0)
            bucket = min(bucket for bucket in (8, 16, 32) if bucket >= local.tokens)
            with local.published(), bcg.forward_context(admission=Admission(bucket, "", "", local.tokens)):
                logits = model(*given)
            assert logits.shape == wanted.shape and (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    (program,) = bcg.programs_of(compiled[0])  # one for both: they are of the same code
    assert program.plan is not None and program.plan.padding is not None
    assert program.eager_runs == {"warm_up": 1} and program.replays == 5
    assert {reason.code for reason in program.plan.steps[-1].reasons} == {"cp_gather_tail"}
    (tail,) = (p for p in program.plan.passes if p.name == "mark_cp_gather_tail")
    assert tail.changes and not tail.notes
