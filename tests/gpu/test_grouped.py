"""Experts by grouped products on the GPU: against the reference, in bfloat16, without waiting for the device."""

import pytest
import torch

from bcg_compiler.models.layers import kernels, reference
from bcg_compiler.models.layers.experts import ClampedExperts, ExpertGroup, GatedExperts

pytestmark = pytest.mark.gpu

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
