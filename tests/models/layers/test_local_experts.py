"""Experts of a rank that holds all of them: a part of a segment, and rows that only fill a bucket go to none."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.models.layers import grouped, kernels
from bcg_compiler.models.layers.local_experts import LocalExperts, local_experts

COUNT, HIDDEN, WIDTH, CHOSEN = 4, 16, 8, 2
CPU = torch.device("cpu")
GATED, CLAMPED = "gated", "clamped"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products count as available."""
    monkeypatch.setattr(grouped, "unavailable", lambda device: "")
    chosen = kernels.Kernel("torch grouped", grouped.experts, kernels._nothing, grouped.refuses)
    monkeypatch.setitem(kernels.KERNELS, "experts", (chosen, *kernels.KERNELS["experts"][1:]))


class Layers(nn.Module):
    """Three layers of experts that each row finds by its own numbers."""

    def __init__(self, kind: str, local: LocalExperts | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.local = local
        up = (COUNT, 2 * WIDTH, HIDDEN) if kind == GATED else (COUNT, HIDDEN, 2 * WIDTH)
        down = (COUNT, HIDDEN, WIDTH) if kind == GATED else (COUNT, WIDTH, HIDDEN)
        self.up, self.down = (nn.Parameter(torch.randn(shape).bfloat16(), False) for shape in (up, down))
        biases = ((COUNT, 2 * WIDTH), (COUNT, HIDDEN))
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(shape).bfloat16(), False) for shape in biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            weights, ids = x[:, :COUNT].float().softmax(-1).topk(CHOSEN)
            out = torch.empty_like(x)
            assert self.local is not None
            if self.kind == GATED:
                self.local.gated(x, ids, weights, self.up, self.down, out)
            else:
                self.local.clamped(x, ids, weights, self.up, self.up_bias, self.down, self.down_bias, out, 1.7, 2.0)
            x = (x + out).tanh()
        return x


def rows(count: int) -> torch.Tensor:
    x = torch.randn(count, HIDDEN).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    return x


@pytest.mark.parametrize("kind", [GATED, CLAMPED])
@pytest.mark.parametrize("ladder", [[8, 16], None])
def test_one_segment_gives_what_eager_gives(kind: str, ladder: list[int] | None, on_cpu: None) -> None:
    model = Layers(kind, local_experts_in_bfloat16())
    options = {"capture": "emulated", "ladder": ladder, "max_padding_factor": 8.0}
    compiled: Any = torch.compile(model, backend="bcg", options=options)
    for count in (5, 5, 8, 2, 16, 11, 8, 3):
        x = rows(count)
        assert torch.equal(compiled(x), model(x))
    stats = bcg.stats(compiled)
    assert (stats.segments, stats.breaks) == (stats.graphs, 0)
    assert stats.replays >= (7 if ladder else 2)


def test_padded_rows_go_to_no_expert(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would all go to one: it would be the slowest, at each replay."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(
        "bcg_compiler.models.layers.local_experts.kernels.run", lambda name, device, x, ids, *rest: given.append(ids)
    )
    local = LocalExperts(CPU)
    x = torch.ones(4, HIDDEN).bfloat16()
    ids = torch.zeros(4, 1, dtype=torch.int64)
    for live, capturing in ((4, True), (3, False), (4, False), (1, False)):
        with bcg.forward_context(bucket_rows=4, live_rows=live, capturing=capturing):
            local.prepare()
            local._run(x, ids, ids, None, x)  # type: ignore[arg-type]
        assert given[-1].flatten().tolist() == [0] * live + [-1] * (4 - live)
    with bcg.forward_context(bucket_rows=None, capturing=False):
        local.prepare()
        local._run(x, ids, ids, None, x)  # type: ignore[arg-type]
    assert given[-1].tolist() == [[0]] * 4, "of a program without a ladder, which pads nothing"


def test_without_grouped_products_experts_are_a_break(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_experts(COUNT, (HIDDEN, WIDTH)) is None, "float32"
    assert local_experts_in_bfloat16() is not None
    monkeypatch.setattr(grouped, "unavailable", lambda device: "it needs an NVIDIA GPU")
    assert local_experts_in_bfloat16() is None


def test_a_copy_of_a_model_plans_for_itself(on_cpu: None) -> None:
    model = Layers(GATED, local_experts_in_bfloat16())
    assert copy.deepcopy(model).local is not model.local


def local_experts_in_bfloat16() -> LocalExperts | None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return local_experts(COUNT, (HIDDEN, WIDTH))
    finally:
        torch.set_default_dtype(before)
