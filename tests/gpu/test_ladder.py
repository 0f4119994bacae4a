"""Padded programs on real CUDA graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg

pytestmark = pytest.mark.gpu

LADDER = [16, 64, 128, 256]


@pytest.fixture(autouse=True)
def fresh() -> None:
    bcg.reset()
    torch.manual_seed(0)


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def running_mean(x: Tensor, out: Tensor) -> None:
    rows = bcg.current_context().live_rows
    out[:rows] = x[:rows].cumsum(0) / torch.arange(1, rows + 1, device=x.device)[:, None]


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(100, width), nn.Embedding(512, width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids: Tensor, places: Tensor, keep: Tensor) -> Tensor:
        h = (self.words(ids) + self.places(places)) * keep[:, None]
        for linear in self.linears:
            out = torch.empty_like(h)
            running_mean(linear(h), out)
            h = F.silu(out) + h
        return h


def inputs(rows: int, stride: int = 1) -> tuple[Tensor, ...]:
    """Of three dtypes, and none a multiple of the kernel's block."""
    ids = torch.randint(0, 100, (rows * stride,), device="cuda")[::stride]
    places = torch.arange(rows, device="cuda", dtype=torch.int32)
    keep = torch.rand(rows, device="cuda") > 0.3
    for tensor in (ids, places, keep):
        torch._dynamo.mark_dynamic(tensor, 0)
    return ids, places, keep


def compiled_and_eager(**options: Any) -> tuple[Any, Any]:
    model = Model().cuda().eval().requires_grad_(False)

    def eager(*args: Tensor) -> Any:
        with bcg.forward_context(live_rows=args[0].shape[0]):
            return model(*args)

    return torch.compile(model, backend="bcg", options={"ladder": LADDER, **options}), eager


@torch.inference_mode()
def check(compiled: Any, eager: Any, *args: Tensor) -> None:
    torch.testing.assert_close(compiled(*args), eager(*args), rtol=1e-5, atol=1e-5)


def test_any_length_gives_the_results_of_eager_code() -> None:
    compiled, eager = compiled_and_eager()
    for rows in (50, 3, 256, 128, 200, 16, 33, 255, 300, 17, 9):
        check(compiled, eager, *inputs(rows))
    stats = bcg.stats(compiled)
    assert stats.captures <= len(LADDER)
    assert stats.eager_runs == {"warm_up": 1, "too_long": 1, "padding": 1}


def test_all_slots_of_a_step_are_filled_by_one_kernel() -> None:
    pytest.importorskip("triton")
    compiled, eager = compiled_and_eager()
    for rows in (50, 60):
        check(compiled, eager, *inputs(rows))
    program = next(p for p in bcg.programs_of(compiled) if p.replays)
    (text,) = program.replay_sources
    assert "fill_0(rows, a" in text and ".copy_(" not in text


def test_inputs_that_are_not_contiguous_are_filled_all_the_same() -> None:
    compiled, eager = compiled_and_eager()
    with torch.inference_mode():
        compiled(*inputs(50))
    bcg.capture(compiled, progress=False)
    for rows in (60, 30, 256):
        check(compiled, eager, *inputs(rows, stride=2))


def test_replays_of_other_buckets_and_churn_between_change_nothing() -> None:
    compiled, eager = compiled_and_eager()
    with torch.inference_mode():
        compiled(*inputs(50))
        bcg.capture(compiled, progress=False)
        for rows in (256, 128, 256, 16, 256):
            args = inputs(rows)
            assert torch.equal(compiled(*args), eager(*args))
            junk = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(32)]
            del junk


def test_buckets_below_the_largest_take_almost_no_memory() -> None:
    def measured(ladder: list[int]) -> tuple[int, int]:
        model = Model(1024, 6).cuda().eval().requires_grad_(False)
        compiled = torch.compile(model, backend="bcg", options={"ladder": ladder})
        with torch.inference_mode():
            compiled(*inputs(200))
        report = bcg.capture(compiled, progress=False)
        bcg.reset()
        return report.measured_bytes, report.forecast_bytes

    largest, forecast = measured([2048])
    ladder, ladder_forecast = measured([64, 128, 256, 512, 768, 1024, 1536, 2048])
    assert ladder <= 1.10 * largest
    assert ladder_forecast == pytest.approx(ladder, rel=0.10)
    assert forecast == pytest.approx(largest, rel=0.10)


def test_a_bucket_that_runs_out_of_memory_is_dropped_and_the_others_serve() -> None:
    compiled, eager = compiled_and_eager(max_padding_factor=1000)
    free, _ = torch.cuda.mem_get_info()
    too_large = int(free / 64 / 4 * 1.2)
    with torch.inference_mode():
        compiled(*inputs(50))
    report = bcg.capture(compiled, [64, 128, too_large], progress=False)
    assert [rung.rows for rung in report.dropped] == [too_large]
    assert "memory" in str(report)
    check(compiled, eager, *inputs(100))
    assert bcg.admission(compiled, rows=200).reason == "too_long"
