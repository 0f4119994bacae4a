"""One rank of several on one device: its program is captured and replayed, what peers give it is a record of theirs.

The ranks run uncompiled first, each in a thread, and what each of them gives to a gather is kept. Then rank 0 runs
compiled, and gets that in place of rows of other processes. On the CPU captures are emulated.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_compiler import PrefillRunner, Wanted, prefill
from bcg_compiler.distributed import Zigzag
from bcg_compiler.distributed.pipeline import PipelineProxy, Stage
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.models import serving
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.pages import PagePool

SIZES = dict(pages=64, page_size=16)
LADDER = (16, 32, 64, 128)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FIELDS: dict[str, dict[str, Any]] = {
    "gpt_oss": dict(
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
    ),
    "deepseek_v32": dict(
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        index_topk=32,
        index_n_heads=4,
        index_head_dim=64,
        first_k_dense_replace=1,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    ),
}

#: New tokens of each request of a batch: one that fills its bucket, one that is padded, one behind prefixes.
BATCHES: list[dict[str, int]] = [{"a": 64}, {"b": 37, "c": 11}, {"a": 9, "c": 30, "d": 1}]


def build(family: str, device: str, **how: Any) -> Any:
    fields: dict[str, Any] = dict(
        model_type=family, num_hidden_layers=2, rms_norm_eps=1e-6, max_position_embeddings=512
    )
    # In float32, rounding decides which tokens an indexer with random weights chooses.
    fields |= FIELDS[family]
    return serving.build(fields, **SIZES, device=device, dtype=torch.float64, **how).requires_grad_(False)


def batches(device: str) -> Iterator[tuple[PrefillBatch, Tensor]]:
    pool = PagePool(**SIZES, device=device)
    generator = torch.Generator().manual_seed(0)
    for requests in BATCHES:
        batch = pool.prefill(requests)
        yield batch, torch.randint(0, 256, (batch.tokens,), generator=generator).to(device)


def options(device: str) -> dict[str, Any]:
    return {
        "capture": "cuda" if device == "cuda" else "emulated",
        "segment_compiler": "eager",
        "min_segment_kernels": 1,
        "on_late_capture": "error",
    }


def capture(runner: PrefillRunner, device: str) -> None:
    report = runner.capture(PagePool(**SIZES, device=device).idle())
    assert len(report.rungs) == len(set(runner.rows.values())) and not report.dropped


def same(found: Tensor | None, wanted: Tensor, fills: bool) -> None:
    """Bit for bit where as many rows are computed as eagerly: else products may be summed in another order."""
    assert found is not None
    if fills:
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Together:
    """What ranks in threads of this process give each other, and a record of it."""

    def __init__(self, ranks: int) -> None:
        self.given: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.meet = threading.Barrier(ranks, timeout=120)


class ThreadRows:
    """``RowGather`` of one of those ranks."""

    def __init__(self, rank: int, together: Together) -> None:
        self.rank, self.size, self.together = rank, len(together.given), together

    def all_gather(self, rows: Tensor, longest: int) -> Tensor:
        given = self.together.given
        given[self.rank].append(_filled(rows, longest))
        self.together.meet.wait()
        return torch.stack([one[len(given[self.rank]) - 1] for one in given])


class RecordedRows:
    """``RowGather`` of rank 0: its own rows, and those that the others gave at that time. No rows in an idle call."""

    def __init__(self, together: Together) -> None:
        self.rank, self.size, self.count, self.together = 0, len(together.given), 0, together

    def all_gather(self, rows: Tensor, longest: int) -> Tensor:
        peers = [rows.new_zeros(0, *rows.shape[1:])] * (self.size - 1)
        if longest:
            peers = [given[self.count] for given in self.together.given[1:]]
            self.count += 1
        return torch.stack([_filled(rows, longest), *peers])


def _filled(rows: Tensor, longest: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])


def uncompiled(family: str, device: str, layout: Zigzag, together: Together) -> list[Tensor]:
    """Logits of rank 0 of all batches; all ranks run, in threads."""
    found: list[list[Tensor]] = [[] for _ in range(layout.size)]
    models = [build(family, device, context_parallel=True) for _ in range(layout.size)]

    def run(rank: int) -> None:
        try:
            prefill_all(rank)
        except BaseException:
            together.meet.abort()  # the others wait for this one
            raise

    def prefill_all(rank: int) -> None:
        model, gather = models[rank], ThreadRows(rank, together)
        with torch.inference_mode():
            for batch, ids in batches(device):
                local = batch.context_parallel(layout, gather)
                rows = PipelineProxy(local.share.split(model.model.embed_tokens(ids)))
                with local.published():
                    hidden = model.model(rows, local.positions).hidden_states
                found[rank].append(model.lm_head(local.share.restore(hidden)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(layout.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(one) == len(BATCHES) for one in found)
    return found[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", list(FIELDS))
@pytest.mark.parametrize("size", [2, 4])
def test_a_context_parallel_rank_is_captured_and_replays_what_it_computes_eagerly(
    family: str, device: str, size: int
) -> None:
    layout, together = Zigzag(size), Together(size)
    wanted = uncompiled(family, device, layout, together)
    peers = RecordedRows(together)
    ranks = Ranks(Parallel(cp=size, attention_does_cp=True), layout=layout, gather=peers)
    runner = serving.runner(
        build(family, device, context_parallel=True), ladder=LADDER, ranks=ranks, options=options(device)
    )
    capture(runner, device)
    alone = build(family, device)
    for (batch, ids), expected in zip(batches(device), wanted, strict=True):
        made = runner(batch, ids, wanted=Wanted(logits="all"))
        assert made.admission.replays
        same(made.logits, expected, fills=batch.tokens == 64)
        with torch.inference_mode(), batch.published():
            same(made.logits, alone(ids, batch.positions), fills=False)
    assert peers.count == len(together.given[0])
    runner.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", list(FIELDS))
def test_both_stages_of_a_pipeline_are_captured_and_replay_what_they_compute_eagerly(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [Stage.even(2, 2, i) for i in range(2)]
    eager = [build(family, device, stage=stage) for stage in stages]
    between: list[PipelineProxy] = []
    monkeypatch.setattr(prefill, "send", lambda proxy, *args, **kwargs: between.append(proxy))
    monkeypatch.setattr(prefill, "receive", lambda *args, **kwargs: between.pop())
    first, second = (
        serving.runner(
            build(family, device, stage=stage),
            ladder=LADDER,
            ranks=Ranks(Parallel(pp=2), stage=stage.index),
            options=options(device),
        )
        for stage in stages
    )
    for runner in (first, second):
        capture(runner, device)
    for batch, ids in batches(device):
        fills = batch.tokens == 64
        with torch.inference_mode(), batch.published():
            proxy = eager[0](ids, batch.positions)
            wanted = eager[1](proxy, batch.positions)
        assert first(batch, ids).admission.replays
        (sent,) = between
        assert _names(sent) == _names(proxy)
        for (_, found), (_, expected) in zip(sent.tensors(), proxy.tensors(), strict=True):
            same(found, expected, fills)
        between[:] = [proxy]
        made = second(batch, wanted=Wanted(logits="all"))
        assert made.admission.replays and not between
        same(made.logits, wanted, fills)
    for runner in (first, second):
        runner.close()


def _names(proxy: PipelineProxy) -> Sequence[str]:
    return [name for name, _ in proxy.tensors()]
