"""A run over ranks against the whole model; here in a world of one rank. Over several: ``tests/test_cli_ranks.py``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bcg_compiler.buckets import Ladder
from bcg_compiler.debug import rank_run, screen
from bcg_compiler.debug.rank_run import RanksReport, compare_over_ranks
from bcg_compiler.debug.rank_view import ranks_view
from bcg_compiler.debug.served import ServedModel
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.models import serving

#: A GPT-OSS of one layer: the smallest model that there is.
FIELDS = dict(
    model_type="gpt_oss",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=16,
    layer_types=["full_attention"],
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    initializer_range=0.1,
    intermediate_size=16,
    num_local_experts=4,
    num_experts_per_tok=2,
)


@pytest.fixture(autouse=True)
def world(tmp_path: Path, clean: None) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run() -> RanksReport:
    model = ServedModel("small", FIELDS, None, torch.float32, torch.device("cpu"))
    how: dict[str, Any] = dict(options={"capture": "emulated"}, timeout=30)
    return compare_over_ranks(model, [20, 50, 9, 33], parallel=Parallel(), ladder=Ladder([16, 32]), **how)


def said(report: RanksReport, capsys: pytest.CaptureFixture[str]) -> str:
    screen.console().print(ranks_view(report))
    return " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    report = run()
    (rank,) = report.ranks
    assert report.equal and rank.captures == 2 and report.buckets == {16: 16, 32: 32}
    assert rank.replays + sum(rank.eager_runs.values()) == report.batches and rank.replays > 0
    assert rank.compared == report.batches + 2  # the logits of each call, and both caches afterwards
    words = said(report, capsys)
    assert "2 buckets: 16, 32" in words and f"EQUAL {rank.compared} tensors of {report.batches} calls" in words


@pytest.mark.parametrize("broken", ["lm_head", "self_attn"])
def test_a_run_that_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    """What a rank holds is other than the whole model: in what makes logits, or in what is kept in caches."""
    runner = serving.runner

    def other(model: Any, **how: Any) -> Any:
        part = model.lm_head if broken == "lm_head" else model.model.layers[0].self_attn.v_proj
        part.weight.data.mul_(1.01)
        return runner(model, **how)

    monkeypatch.setattr(rank_run.serving, "runner", other)
    report = run()
    assert not report.equal
    (rank,) = report.ranks
    where = {(mismatch.difference.where, mismatch.batch is None) for mismatch in rank.mismatches}
    caches = {("model.layers.0.self_attn.value_cache", True)} if broken == "self_attn" else set()
    assert where == {("logits", False)} | caches
    words = said(report, capsys)
    assert "DIFFERENT" in words and "rank 0, call 0: logits" in words and "EQUAL" not in words
