"""0 times a padded row is 0 for finite rows only; and a table of positions may end before a bucket does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg

TABLE = nn.Embedding(12, 4).requires_grad_(False)
BUFFER = torch.randn(12, 4)


def scores(x: Tensor) -> Tensor:
    return torch.tril(x @ x.t())


def windowed(x: Tensor, keep: Tensor) -> Tensor:
    """A padded query sees nothing, as the given mask is padded with False: its softmax is NaN."""
    at = torch.arange(x.shape[0])
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 2) & keep[None]
    for _ in range(2):
        x = (x @ x.t()).masked_fill(~seen, float("-inf")).softmax(-1) @ x
    return x


def linear_attention(x: Tensor) -> Tensor:
    for _ in range(2):
        weights = scores(x)
        x = (weights @ x) / weights.sum(-1, keepdim=True)
    return x


def unit_keys(x: Tensor) -> Tensor:
    q = (x / x.norm(dim=-1, keepdim=True))[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0]


NOT_FINITE: dict[str, tuple[Callable[..., Any], str]] = {
    "division_by_a_norm": (unit_keys, "a division"),
    "logarithm": (lambda x: scores(x) @ x.log(), "log"),
    "division_by_a_sum": (linear_attention, "a division"),
    "product_of_rows": (lambda x: scores(x) @ (10 * x + 1e9).cumprod(0), "cumprod"),
    "root": (lambda x: scores(x) @ x.sum(-1, keepdim=True).rsqrt(), "rsqrt"),
    "bits": (lambda x: scores(x) @ (x.view(torch.int32) * 1 + 1).view(torch.float32), "a view as another type"),
    "power": (lambda x: scores(x) @ x**-0.5, "pow"),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_row_that_may_not_be_finite_is_not_multiplied_by_zero(name: str, padded: Any) -> None:
    """Called causal, live rows became NaN at every replay, and the first call, which is eager, was right."""
    fn, why = NOT_FINITE[name]
    pair = padded(fn, close=True)
    for n in (5, 5, 9, 7):
        pair(torch.rand(n, 4) + 0.1)
    assert why in pair.plan.unpadded.text


def test_a_mask_that_is_given_may_leave_a_padded_query_without_any_key(padded: Any) -> None:
    pair = padded(windowed, close=True)
    for n in (5, 5, 9, 7):
        pair(torch.randn(n, 4), torch.ones(n, dtype=torch.bool))
    assert "a mask that is given" in pair.plan.unpadded.text


def decoder(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[0])
    seen = at[None] <= at[:, None]
    for _ in range(2):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + (h @ h.t() / 2).masked_fill(~seen, float("-inf")).softmax(-1) @ h
        h = F.rms_norm(x, (4,)) + F.layer_norm(x, (4,))
        x = x + F.scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True)[0]
    return x


def test_norms_with_an_epsilon_and_masks_of_positions_stay_finite(padded: Any) -> None:
    pair = padded(decoder, close=True)
    for n in (5, 9, 7, 16, 30):
        pair(torch.randn(n, 4))
    assert pair.plan.padding.proof == "causal" and pair.stats.replays == 4


@pytest.mark.parametrize(
    "look_up",
    [
        lambda x: x + TABLE(torch.arange(x.shape[0])),
        lambda x: x + BUFFER[torch.arange(x.shape[0])],
        lambda x: x + BUFFER.index_select(0, torch.arange(x.shape[0])),
    ],
    ids=["embedding", "index", "index_select"],
)
def test_a_bucket_beyond_a_table_of_positions_is_not_used(look_up: Callable[[Tensor], Tensor], padded: Any) -> None:
    """Padded positions were looked up beyond the table's end; on CUDA that ends the process."""
    pair = padded(look_up)
    for n in (5, 9, 12, 7):
        pair(torch.randn(n, 4))
    assert pair.stats.eager_runs == {"warm_up": 1, "too_long": 2}  # the table has 12 rows, the second bucket 16
    assert bcg.admission(pair.compiled, rows=8).bucket == 8
