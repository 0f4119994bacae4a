"""Experts by grouped products on the GPU: against the reference, in bfloat16, without waiting for the device."""

from typing import Any

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.models.layers import kernels, reference
from bcg_compiler.models.layers.experts import ClampedExperts, ExpertGroup, GatedExperts
from bcg_compiler.models.layers.local_experts import LocalExperts

pytestmark = pytest.mark.gpu

CUDA = "cuda"
COUNT, HIDDEN, WIDTH, TOKENS, CHOSEN = 16, 512, 256, 300, 4


def gated() -> ExpertGroup:
    return GatedExperts(_weight(COUNT, 2 * WIDTH, HIDDEN), _weight(COUNT, HIDDEN, WIDTH))


def clamped() -> ExpertGroup:
    up = _weight(COUNT, HIDDEN, 2 * WIDTH), _weight(COUNT, 2 * WIDTH)
    return ClampedExperts(*up, _weight(COUNT, WIDTH, HIDDEN), _weight(COUNT, HIDDEN), alpha=1.7, limit=7.0)


def _weight(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * 0.05).bfloat16()


@pytest.mark.parametrize("group", ["gated", "clamped"])
@pytest.mark.parametrize("first", [0, -5])  # ids below 0 are experts of other ranks
def test_grouped_products_are_the_reference_and_the_host_waits_for_nothing(group: str, first: int) -> None:
    torch.manual_seed(0)
    experts: ExpertGroup = globals()[group]()
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(TOKENS, COUNT - first, device="cuda").topk(CHOSEN).indices + first
    ids, weights = ids.clamp(min=-1), torch.rand(TOKENS, CHOSEN, device="cuda")
    found, wanted = torch.full_like(x, torch.nan), torch.empty_like(x)
    args = x, ids, weights, experts
    assert kernels.kernel("experts", x.device, *args, found).name == "torch grouped"
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.run("experts", x.device, *args, found)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference.experts(*args, wanted)
    assert (found.float() - wanted.float()).abs().max() <= 2e-2 * wanted.float().abs().max()


@pytest.mark.parametrize("segment_compiler", ["eager", "inductor"])
def test_experts_of_one_rank_are_a_part_of_the_segment(segment_compiler: str) -> None:
    torch.manual_seed(0)
    up, down, local = _weight(COUNT, 2 * WIDTH, HIDDEN), _weight(COUNT, HIDDEN, WIDTH), LocalExperts(torch.device(CUDA))

    def model(x: torch.Tensor) -> torch.Tensor:
        # Of what is given, not of what was computed: rounding by Inductor sends no row to another expert.
        weights, ids = x[:, :COUNT].float().topk(CHOSEN)
        for _ in range(3):
            out = torch.empty_like(x)
            local.gated(x, ids, weights, up, down, out)
            x = (x + 0.25 * out).tanh()  # so that roundings do not grow from layer to layer
        return x

    options = {"ladder": [256, 512], "segment_compiler": segment_compiler, "max_padding_factor": 4.0}
    compiled: Any = torch.compile(model, backend="bcg", options=options)
    with torch.no_grad():
        for rows in (300, 512, 100, 256, 411, 70):
            x = torch.randn(rows, HIDDEN, device=CUDA).bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            found, wanted = compiled(x).float(), model(x).float()
            assert (found - wanted).abs().max() <= 3e-2
    stats = bcg.stats(compiled)
    assert (stats.segments, stats.breaks, stats.replays) == (1, 0, 5)
