"""What a padded call leaves behind: buffers, memory of break bodies and inputs are as eager code leaves them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

LENGTHS = (5, 7, 12, 3, 31, 5, 32, 9, 40, 17)


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


def live() -> int:
    return int(bcg.current_context().live_rows)


def of_nan(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan"))


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def into(x: Tensor, out: Tensor) -> None:
    n = live()
    out[:n].copy_(x[:n] + 1)


class Cache(nn.Module):
    """A cache that a break writes, and reads, for live rows; and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(64, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.hidden = torch.zeros(64, 4)

    @bcg.eager_break(fake=lambda self, x, keys: torch.empty_like(x), mutates_args=("keys",), reads_live_rows=True)
    def attend(self, x: Tensor, keys: Tensor) -> Tensor:
        n = live()
        keys[:n] += x[:n]
        self.hidden[:n] += x[:n]
        out = of_nan(x)
        out[:n] = keys[:n].cumsum(0)
        return out

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.attend(x.sin(), self.keys) * 2 + self.calls


class Shown(nn.Module):
    """A break that returns a part of memory which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(256.0).view(64, 4).clone()

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x), reads_live_rows=True)
    def look(self, x: Tensor) -> Tensor:
        n = live()
        self.table[:n] += x[:n]
        return self.table[: x.shape[0]]

    def forward(self, x: Tensor) -> Tensor:
        return self.look(x.sin()) * 2


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x * 2 + 1


@pytest.mark.parametrize("made", [Cache, Shown])
def test_state_is_what_eager_leaves(padded: Any, poisoned: None, made: type[nn.Module]) -> None:
    """The padded rows of a result were cleared in the body's own memory, which it had returned a part of."""
    pair = padded(made(), max_padding_factor=8)
    for n in LENGTHS:
        pair(rows(n))
    assert pair.plan.padding is not None and pair.stats.captures == 3


def test_an_average_over_rows_is_taken_of_live_ones(padded: Any) -> None:
    pair = padded(Average(), close=True)
    for n in (5, 7, 5, 3, 5, 7):
        pair(rows(n))
    assert "mean runs over all rows" in pair.plan.unpadded.text


def test_an_input_that_a_break_writes_is_written_back_for_live_rows(padded: Any, poisoned: None) -> None:
    def fill(out: Tensor, x: Tensor) -> Tensor:
        into(x, out)
        return out * 2 + x

    def of_one_memory(n: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(50, 4)[3 : 3 + n], rows(n)

    pair = padded(fill, max_padding_factor=8)
    for n in LENGTHS:
        pair(*of_one_memory(n))
    assert pair.stats.captures == 3
