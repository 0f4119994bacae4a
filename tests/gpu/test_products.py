"""Products of one input in one launch, on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg
from bcg_compiler.lower.linears import launches, linears

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh() -> None:
    bcg.reset()
    torch.manual_seed(0)


@torch.inference_mode()
@pytest.mark.parametrize("depth", [144, 512])
@pytest.mark.parametrize("columns", [(512, 128, 128), (96, 1, 8), (64, 64)])
@pytest.mark.parametrize("rows", [1, 17, 100, 700, 3000])
def test_one_launch_gives_what_the_products_are(rows: int, columns: tuple[int, ...], depth: int) -> None:
    """Every tile is used for some of them."""
    check(rows, columns, depth)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [(0,), (0, 1, 2)])
def test_biases_are_added_before_a_result_is_rounded(biased: tuple[int, ...], dtype: torch.dtype) -> None:
    check(100, (512, 128, 130), 512, biased, dtype)


def check(
    rows: int,
    columns: tuple[int, ...],
    depth: int,
    biased: tuple[int, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Results are within a rounding of the products in float64, as those of cuBLAS are."""
    assert launches(rows, columns, dtype, CUDA)
    x = torch.randn(rows, depth, device=CUDA, dtype=dtype)
    weights = [torch.randn(wide, depth, device=CUDA, dtype=dtype) / depth**0.5 for wide in columns]
    biases = [torch.randn(len(w), device=CUDA, dtype=dtype) if at in biased else None for at, w in enumerate(weights)]
    for got, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(got, wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


class Projections(nn.Module):
    """Three products of one input, as in attention, of which two are narrow."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 4), nn.Linear(width, width // 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.k(x) * self.v(x)).repeat(1, 4)
        return x + self.out(F.silu(self.q(x)) * gate) / 4


def kernels(fn: Any, *args: Any) -> list[str]:
    """The names of the products that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        fn(*args)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    return [name for name in names if name == "linears" or "gemm" in name or "nvjet" in name]


@torch.inference_mode()
@pytest.mark.parametrize("ladder", [None, [64, 128, 1024, 16384]], ids=["exact", "ladder"])
def test_small_products_are_one_launch_in_each_bucket_where_they_are_small(ladder: list[int] | None) -> None:
    """Each bucket has a tile of its own, which is first launched while it is captured."""
    model = nn.Sequential(*(Projections() for _ in range(4))).cuda().bfloat16().requires_grad_(False)
    options: dict[str, Any] = {"segment_compiler": "inductor"} | ({"ladder": ladder} if ladder else {})
    compiled = torch.compile(model, backend="bcg", options=options)
    for rows, together in ((60, True), (16000, False), (1000, True), (128, True), (60, True)):
        for _ in range(3):
            x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
            if ladder:
                torch._dynamo.mark_dynamic(x, 0)
            with bcg.forward_context(live_rows=rows):
                torch.testing.assert_close(compiled(x), model(x), rtol=3e-2, atol=3e-2)
        with bcg.forward_context(live_rows=rows):
            seen = kernels(compiled, x)
        assert len(seen) == (8 if together else 16) and ("linears" in seen) == together, seen
    stats = bcg.stats(compiled)
    assert stats.eager_units == {}


@torch.inference_mode()
def test_the_first_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was compiled by the first call, a second in which nothing else was done."""
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **seen: compiled.append(seen["repr"]))
    model = Projections(width=640).cuda().bfloat16().requires_grad_(False)
    x = torch.randn(48, 640, device="cuda", dtype=torch.bfloat16)
    program = bcg.aot_compile(model, (x,), options={"segment_compiler": "inductor"})
    assert [name for name in compiled if name.startswith("linears")], compiled
    compiled.clear()
    for _ in range(3):
        torch.testing.assert_close(program(x), model(x), rtol=3e-2, atol=3e-2)
    assert compiled == []
    assert "linears" in kernels(program, x)
