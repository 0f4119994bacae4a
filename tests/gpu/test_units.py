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


class Apart(nn.Module):
    """Operations of several forms that do not wait for each other, as around attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        low, high = k.chunk(2, -1)
        turned = torch.cat([-high, low], -1) * 0.5 + k
        mask = torch.arange(q.shape[0], device=q.device)[:, None] >= torch.arange(q.shape[0], device=q.device)
        return q.sin() * 2, turned.repeat_interleave(3, dim=0), v.transpose(0, 1).contiguous(), mask * 1.0


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
def test_what_does_not_wait_for_each_other_is_few_launches(dynamic: bool, dtype: torch.dtype) -> None:
    """Two launches cost more than the work of such a kernel, so independent ones are put into one."""
    compiled = torch.compile(Apart(), backend="bcg", options={"segment_compiler": "inductor"}, dynamic=dynamic)
    for rows in (48, 48, 48, 100, 100, 7, 7):
        given = [torch.randn(rows, 64, device="cuda", dtype=dtype) for _ in range(3)]
        for got, want in zip(compiled(*given), Apart()(*given), strict=True):
            torch.testing.assert_close(got, want)
    assert bcg.stats(compiled).eager_units == {} and bcg.stats(compiled).replays
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        compiled(*given)
        torch.cuda.synchronize()
    launches = [event.name for event in seen.events() if event.name.startswith("triton_")]
    assert 1 <= len(launches) <= 2, launches


@torch.inference_mode()
def test_kernels_are_found_in_the_caches_with_their_graphs() -> None:
    """Each graph is put there with its own kernels, although several are lowered before any of them is compiled."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    model, seen = Model(breaks=True).cuda().requires_grad_(False), []
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(model, backend="bcg", options={"segment_compiler": "inductor"})
            for rows in (7, 7, 12):
                ids = prompt(rows)
                with bcg.forward_context(live_rows=rows):
                    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-3, atol=1e-3)
            found = counters["inductor"]
            seen.append((found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]))
            kernels = found["triton_bundler_save_static_autotuner"], found["triton_bundler_load_static_autotuner"]
            assert bcg.stats(compiled).eager_units == {} and kernels[len(seen) - 1] > 0, kernels
    assert seen == [(seen[0][0], 0), (0, seen[0][0])]
