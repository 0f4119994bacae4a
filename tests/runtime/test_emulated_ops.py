"""What a custom op does is recorded, as a CUDA graph records it: not that it was called."""

from typing import Any

import torch
from torch import Tensor

import bcg_compiler as bcg

FACTOR = [1.0]


@torch.library.custom_op("bcg_tests_emulated::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * FACTOR[0]


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bcg_tests_emulated::rows", mutates_args=())
def rows(x: Tensor) -> Tensor:
    return x * int(x.abs().sum() > 0)


@rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bcg_tests_emulated::count", mutates_args=("counts",))
def count(x: Tensor, counts: Tensor) -> None:
    counts.add_(x.sum())


def test_a_number_that_a_capturable_op_reads_on_the_host_is_frozen() -> None:
    """`bcg run` said EQUAL on a CPU, and the same program gave the first call's numbers on a GPU."""
    options = {"capture": "emulated", "capturable": ["bcg_tests_emulated::scaled"], "min_segment_kernels": 1}
    compiled: Any = torch.compile(lambda x: scaled(x.sin()) + 1, backend="bcg", options=options)
    x = torch.randn(3)
    with torch.no_grad():
        for factor in (1.0, 2.0):
            FACTOR[0] = factor  # 2.0 is captured
            compiled(x)
        FACTOR[0] = 3.0
        torch.testing.assert_close(compiled(x), x.sin() * 2 + 1)


def test_an_op_whose_body_asks_the_host_cannot_be_captured() -> None:
    options = {"capture": "emulated", "capturable": ["bcg_tests_emulated::rows"], "min_segment_kernels": 1}
    compiled: Any = torch.compile(lambda x: rows(x.sin()).cos() + 1, backend="bcg", options=options)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(3)
            assert torch.equal(compiled(x), rows(x.sin()).cos() + 1)
    assert bcg.stats(compiled).reasons == {"capture_failed": 1}


def test_an_op_that_writes_an_argument_writes_it_at_each_replay() -> None:
    options = {"capture": "emulated", "capturable": ["bcg_tests_emulated::count"], "min_segment_kernels": 1}

    def fn(x: Tensor, counts: Tensor) -> Tensor:
        count(x, counts)
        return x + counts

    compiled: Any = torch.compile(fn, backend="bcg", options=options)
    mine, same = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3)
            torch.testing.assert_close(compiled(x, mine), fn(x, same))
            torch.testing.assert_close(mine, same)
    assert bcg.stats(compiled).replays == 3
