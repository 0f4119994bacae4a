"""Experts by grouped products give what the reference gives, expert by expert."""

from collections.abc import Callable

import pytest
import torch

from bcg_compiler.models.layers import grouped, reference
from bcg_compiler.models.layers.experts import ClampedExperts, ExpertGroup, GatedExperts

COUNT, HIDDEN, WIDTH = 4, 16, 8


def gated() -> ExpertGroup:
    return GatedExperts(torch.randn(COUNT, 2 * WIDTH, HIDDEN), torch.randn(COUNT, HIDDEN, WIDTH))


def clamped() -> ExpertGroup:
    up, down = (torch.randn(COUNT, HIDDEN, 2 * WIDTH), torch.randn(COUNT, 2 * WIDTH)), torch.randn(COUNT, WIDTH, HIDDEN)
    return ClampedExperts(*up, down, torch.randn(COUNT, HIDDEN), alpha=1.7, limit=2.0)


@pytest.mark.parametrize("make", [gated, clamped])
@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([[0, 3], [3, 0], [0, 1], [1, 3], [3, 1]]),  # nobody goes to expert 2
        torch.tensor([[-1, 3], [2, -1], [-1, -1], [1, 0]]),  # -1: an expert of another rank
        torch.full((3, 2), -1),
        torch.empty(0, 2, dtype=torch.int64),  # no row came to this rank
        torch.tensor([[2], [2], [2]]),
    ],
)
def test_grouped_products_are_the_reference(make: Callable[[], ExpertGroup], ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    group, x, weights = make(), torch.randn(len(ids), HIDDEN), torch.rand(ids.shape)
    found, wanted = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    grouped.experts(x, ids, weights, group, found)
    reference.experts(x, ids, weights, group, wanted)
    torch.testing.assert_close(found, wanted)


def test_what_has_no_grouped_product_is_told() -> None:
    x, ids, weights = torch.randn(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    assert grouped.refuses(x, ids, weights, gated(), x) == "grouped products are for bfloat16, not torch.float32"
    odd = GatedExperts(torch.randn(COUNT, 12, HIDDEN), torch.randn(COUNT, HIDDEN, 6))
    assert "16 and 6 wide, must be multiples of 8" in grouped.refuses(x.bfloat16(), ids, weights, odd, x)
    assert not grouped.refuses(x.bfloat16(), ids, weights, gated(), x)


def test_what_the_weight_of_an_expert_elsewhere_is_does_not_matter() -> None:
    x, ids = torch.randn(2, HIDDEN), torch.tensor([[0, -1], [1, -1]])
    weights = torch.tensor([[0.5, torch.nan], [0.5, torch.inf]])
    found = torch.empty_like(x)
    grouped.experts(x, ids, weights, gated(), found)
    assert found.isfinite().all()
