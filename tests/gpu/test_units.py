"""Segments compiled by Inductor, captured on real CUDA graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    bcg.reset()
    torch.manual_seed(0)


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def running_sum(x: Tensor, out: Tensor) -> None:
    rows = bcg.current_context().live_rows
    out[:rows] = x[:rows].cumsum(0)


class Block(nn.Module):
    def __init__(self, width: int, breaks: bool) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(width))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.norm)
        if self.breaks:
            out = torch.empty_like(h)
            running_sum(h, out)
            h = out / 8
        gate, up = self.up(h).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, breaks: bool, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Block(width, breaks) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def prompt(rows: int) -> Tensor:
    ids = torch.randint(0, 100, (rows,), device="cuda")
    torch._dynamo.mark_dynamic(ids, 0)
    return ids


@torch.inference_mode()
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "breaks"])
@pytest.mark.parametrize("ladder", [None, [32, 64, 128]], ids=["exact", "ladder"])
@pytest.mark.parametrize("ahead", [False, True], ids=["dynamo", "ahead of time"])
def test_results_are_close_to_those_of_eager_code(breaks: bool, ladder: list[int] | None, ahead: bool) -> None:
    model = Model(breaks).cuda().eval().requires_grad_(False)
    options: dict[str, Any] = {"segment_compiler": "inductor"} | ({"ladder": ladder} if ladder else {})
    if ahead:
        compiled: Any = bcg.aot_compile(model, (prompt(40),), options=options)
    else:
        compiled = torch.compile(model, backend="bcg", options=options)
    for rows in (40, 40, 100, 64, 33, 100, 40, 128):
        ids = prompt(rows)
        with bcg.forward_context(live_rows=rows):
            torch.testing.assert_close(compiled(ids), model(ids), rtol=2e-3, atol=2e-3)
    stats = bcg.stats(compiled)
    assert stats.eager_units == {}
    assert stats.unique_units < stats.segments if breaks else stats.unique_units <= 3
    assert stats.replays >= (7 if ladder else 2)


@torch.inference_mode()
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "breaks"])
def test_units_for_exactly_one_bucket_are_captured_at_their_first_call(breaks: bool) -> None:
    """Their kernels must be tuned by then: tuning waits for the device."""
    model = Model(breaks).cuda().eval().requires_grad_(False)
    options = {"segment_compiler": "inductor", "ladder": [32, 64, 128], "specialized_buckets": [64]}
    compiled = torch.compile(model, backend="bcg", options=options)
    for rows in (40, 100, 64, 33, 20, 50):
        ids = prompt(rows)
        with bcg.forward_context(live_rows=rows):
            torch.testing.assert_close(compiled(ids), model(ids), rtol=2e-3, atol=2e-3)
    stats = bcg.stats(compiled)
    assert stats.eager_units == {} and set(stats.reasons) <= {"eager_break"}
    assert 0 < stats.specialized_units <= stats.unique_units
    assert stats.replays == 5
