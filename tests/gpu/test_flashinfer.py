"""FlashInfer itself, where it is installed: each adapter against plain torch, eager and captured.

The first use of each kind of attention and dtype compiles for a minute.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.models.layers import attention, flashinfer, kernels, reference
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.flashinfer import LatentShape, PagedShape
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.models.layers.planned import planned_attention, planned_latent_attention

pytestmark = pytest.mark.gpu

PAGES, PAGE = 128, 16
LAYERS = 2
#: Of several requests, with prefixes, and with few tokens: MLA then has other clusters unless it is kept from it.
CHUNKS: tuple[dict[int, int], ...] = (
    {0: 200},
    {1: 100, 2: 37},
    {0: 1, 1: 60, 2: 1, 3: 190},
    {0: 2},
    {4: 256},
    {0: 17, 4: 3},
)


@pytest.fixture(autouse=True)
def _installed(clean: None) -> Iterator[None]:
    why = flashinfer.unavailable(torch.device("cuda"))
    if why:
        pytest.skip(f"FlashInfer: {why}")
    torch.compiler.reset()
    yield


class Paged(nn.Module):
    """Layers of grouped-query attention; ``how``: "planned", "unplanned" or "reference"."""

    row = (8, 128)

    def __init__(self, how: str, dtype: torch.dtype, window: int) -> None:
        super().__init__()
        self.how, self.window = how, window
        device = torch.device("cuda", torch.cuda.current_device())
        self.planned = planned_attention(PagedShape(8, 2, 128, 0.09, window, PAGE, PAGES, dtype, device))
        assert self.planned is not None
        for i in range(2 * LAYERS):
            self.register_buffer(f"cache{i}", torch.zeros(PAGES, PAGE, 2, 128, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            out = torch.empty_like(x)
            caches = self.get_buffer(f"cache{2 * layer}"), self.get_buffer(f"cache{2 * layer + 1}")
            args = x, x[:, :2].sin(), x[:, 2:4].cos(), *caches, out
            if self.how == "planned":
                self.planned.attend(*args)
            else:
                attention.paged_attention(*args, 0.09, self.window)
            x = x + out
        return x


class Latent(nn.Module):
    """Layers of absorbed MLA; ``how``: "planned", "unplanned" or "reference"."""

    row = (16, 512)

    def __init__(self, how: str, dtype: torch.dtype, window: int) -> None:
        super().__init__()
        self.how = how
        device = torch.device("cuda", torch.cuda.current_device())
        self.planned = planned_latent_attention(LatentShape(16, 512, 64, 0.05, PAGE, PAGES, dtype, device))
        assert self.planned is not None
        for i in range(LAYERS):
            self.register_buffer(f"latent{i}", torch.zeros(PAGES, PAGE, 512, dtype=dtype, device=device))
            self.register_buffer(f"rotary{i}", torch.zeros(PAGES, PAGE, 64, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            out = torch.empty_like(x)
            caches = self.get_buffer(f"latent{layer}"), self.get_buffer(f"rotary{layer}")
            args = x, x[..., :64].sin(), x[:, 0].cos(), x[:, 1, :64], *caches, out
            if self.how == "planned":
                self.planned.attend(*args)
            else:
                attention.mla_attention(*args, 0.05)
            x = x + out
        return x


#: (model, dtype, window); each is a kernel to compile, so most of them run at night.
CASES = [
    pytest.param(Paged, torch.bfloat16, 0, id="paged"),
    pytest.param(Latent, torch.bfloat16, 0, id="latent"),
    pytest.param(Paged, torch.float16, 0, id="paged-half", marks=pytest.mark.nightly),
    pytest.param(Paged, torch.bfloat16, 64, id="paged-window", marks=pytest.mark.nightly),
    pytest.param(Latent, torch.float16, 0, id="latent-half", marks=pytest.mark.nightly),
]


def batches() -> Iterator[PrefillBatch]:
    pool = PagePool(PAGES, PAGE, "cuda")
    for chunk in CHUNKS:
        yield pool.prefill(chunk)  # type: ignore[arg-type]


def call(model: Callable[[Tensor], Tensor], batch: PrefillBatch, row: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(batch.tokens)
    x = torch.randn(batch.tokens, *row, generator=generator, device="cuda").to(dtype)
    torch._dynamo.mark_dynamic(x, 0)
    with batch.published():
        return model(x)


def expected(kind: Any, dtype: torch.dtype, window: int) -> list[Tensor]:
    """What plain torch computes in the same dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "KERNELS", {name: found[-1:] for name, found in kernels.KERNELS.items()})
        model = kind("reference", dtype, window)
        return [call(model, batch, kind.row, dtype).clone() for batch in batches()]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found.float() - wanted.float()).abs().max() <= 2e-2 * wanted.abs().max().float()


@pytest.mark.parametrize("how", ["unplanned", "planned"])
@pytest.mark.parametrize(("kind", "dtype", "window"), CASES)
def test_eager_runs_equal_plain_torch(kind: Any, dtype: torch.dtype, window: int, how: str) -> None:
    model = kind(how, dtype, window)
    for batch, wanted in zip(batches(), expected(kind, dtype, window), strict=True):
        assert_close(call(model, batch, kind.row, dtype), wanted)


@pytest.mark.parametrize(("kind", "dtype", "window"), CASES)
def test_replays_with_one_plan_a_call_equal_plain_torch(kind: Any, dtype: torch.dtype, window: int) -> None:
    options: dict[str, Any] = {
        "ladder": [256],
        "limits": bcg.Limits(max_requests=8),
        "max_padding_factor": 200.0,
        "segment_compiler": "eager",
    }
    program: Any = torch.compile(kind("planned", dtype, window), backend="bcg", options=options)
    for _ in range(2):
        for batch, wanted in zip(batches(), expected(kind, dtype, window), strict=True):
            assert_close(call(program, batch, kind.row, dtype), wanted)
    stats = bcg.stats(program)
    assert (stats.breaks, stats.replays, stats.eager_runs) == (0, 2 * len(CHUNKS) - 1, {"warm_up": 1})


def test_calls_in_a_row_do_not_overtake_their_plans() -> None:
    """The device is kept busy: the host is ahead by a call, and a plan must not overwrite one that was not copied."""
    program: Any = torch.compile(
        Paged("planned", torch.bfloat16, 0),
        backend="bcg",
        options={"ladder": [256], "limits": bcg.Limits(max_requests=8), "max_padding_factor": 200.0},
    )
    wanted = expected(Paged, torch.bfloat16, 0)
    call(program, next(batches()), Paged.row, torch.bfloat16)
    busy = torch.randn(8192, 8192, device="cuda")
    found = []
    for batch in batches():
        for _ in range(4):
            busy = torch.tanh(busy @ busy)
        found.append(call(program, batch, Paged.row, torch.bfloat16))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine, theirs)


def test_the_library_is_in_use() -> None:
    assert kernels.in_use("cuda")["grouped_query_attention"] == "flashinfer"
    assert kernels.KERNELS["mla_attention"][-1].run is reference.mla_attention
