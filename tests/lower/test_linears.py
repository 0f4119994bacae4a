"""Several products of one input: which ones are one launch, and that all are what they stand for.

The kernel runs on a GPU (tests/gpu/test_products.py). Here the CPU is said to be one, and float32 what it multiplies.
"""

import sys
import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from bcg_compiler.lower import linears as module
from bcg_compiler.lower.linears import Launch, Tile, compile_for, launches, linears

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_limits", lambda device: module._Limits(132, 232_448))
    monkeypatch.setattr(module, "DTYPES", (torch.float32,))


@pytest.mark.parametrize(
    "rows, columns, found",
    [
        (256, [1024, 256, 256], [((1, 2, 0), (64, 64))]),  # 4 x 24 tiles; the next smaller ones would be 192
        (64, [1024, 256, 256], [((1, 2, 0), (64, 32))]),
        (1, [1024, 256, 256], [((1, 2, 0), (16, 32))]),
        (1024, [1024, 256, 256], [((1, 2, 0), (128, 128))]),
        (2048, [1024, 256, 256], [((1, 2), (64, 128))]),  # the widest one fills the device alone
        (4096, [1024, 256, 256], [((1, 2), (128, 128))]),
        (8192, [1024, 256, 256], []),
        (256, [64] * 9, [((0, 1, 2, 3), (16, 32)), ((4, 5, 6, 7), (16, 32))]),  # four a launch, the last one alone
        (256, [64] * 6, [((0, 1, 2, 3), (16, 32)), ((4, 5), (16, 32))]),
        (256, [64], []),
        (256, [], []),
    ],
)
def test_products_are_launched_together_if_their_tiles_are_computed_at_once(
    rows: int, columns: list[int], found: list[tuple[tuple[int, ...], tuple[int, int]]]
) -> None:
    """By the smallest tile with which there are no more of them than the device has multiprocessors."""
    assert [(launch.products, launch.tile[:2]) for launch in launches(rows, columns, torch.float32, CPU)] == found


def test_a_tile_needs_no_more_shared_memory_than_a_program_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_limits", lambda device: module._Limits(132, 100_000))
    (launch,) = launches(256, [1024, 256, 256], torch.float32, CPU)
    assert launch.tile == Tile(64, 128, 64, 4)  # 98,304 bytes; 64 columns, 128 deep, are 131,072


def test_nothing_is_launched_together_where_the_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert launches(1, [8, 8], torch.bfloat16, CPU) == []


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (0, 8), (2, 0, 8), (5, 0)])
@pytest.mark.parametrize("biased", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("narrow", [4, 0])
def test_the_operation_is_what_it_stands_for(shape: tuple[int, ...], biased: tuple[bool, ...], narrow: int) -> None:
    x = torch.randn(*shape)
    weights = [torch.randn(columns, shape[-1]) for columns in (narrow, 6)]
    biases = [torch.randn(len(w)) if has else None for w, has in zip(weights, biased, strict=True)]
    for got, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
        torch.testing.assert_close(got, F.linear(x, weight, bias))
    torch.library.opcheck(linears, (x, weights, biases), test_utils=("test_schema", "test_faketensor"))


def test_what_is_launched_is_what_fits_the_rows_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may be open when a unit is compiled: which products are small is seen at each capture."""
    launched: list[tuple[int, ...]] = []

    def launch(one: Launch, x: Tensor, weights: list[Tensor], biases: list[Any], outs: list[Tensor]) -> None:
        launched.append(one.products)
        for at in one.products:
            outs[at].copy_(F.linear(x, weights[at], biases[at]))

    monkeypatch.setattr(module, "_launch", launch)
    by_cublas: list[int] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, weight, out: (by_cublas.append(weight.shape[1]), mm(x, weight, out=out)))
    weights = [torch.randn(columns, 16) for columns in (1024, 32, 32)]
    biases = [None, torch.randn(32), None]
    for rows in (16, 4096, 20_000):
        x = torch.randn(rows, 16)
        for got, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
            torch.testing.assert_close(got, F.linear(x, weight, bias))
    assert launched == [(1, 2, 0), (1, 2)]
    assert by_cublas == [1024, 1024, 32]  # and one with a bias


class Kernel:
    """The products of the Triton kernel, of memory as it would read it; notes what it is run with."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self.run, grid[0])

    def run(self, programs: int, x: Tensor, *given: Any, **how: Any) -> None:
        numbers = tuple(one for one in given if isinstance(one, int))
        self.runs.append((programs, numbers, how))
        if not programs:
            return
        weights, biases, outs, columns, strides = (given[at : at + 4] for at in range(0, 20, 4))
        rows, depth, stride = given[20:]
        left = x.as_strided((rows, depth), (stride, 1))
        products = list(zip(weights, biases, outs, columns, strides, strict=True))
        for weight, bias, out, wide, step in products[: how["COUNT"]]:
            result = left @ weight.as_strided((wide, depth), (step, 1)).t()
            out.as_strided(result.shape, (wide, 1)).copy_(result)
            if how["BIASED"]:
                out.as_strided(result.shape, (wide, 1)).add_(bias.as_strided((wide,), (1,)))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """It stands for the one that is imported where Triton is installed."""
    made = types.ModuleType("kernel")
    made.linears = Kernel()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bcg_compiler.lower.linears_kernel", made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made.linears


def test_the_kernel_is_given_what_it_reads(kernel: Kernel) -> None:
    """By address, rows, columns and strides: a bias of one element, or with gaps, was read behind its end."""
    x = torch.randn(3, 5, 64)[..., :32]
    weights = [torch.randn(6, 48)[:, :32], torch.randn(4, 32), torch.randn(4, 32), torch.randn(1, 32)]
    for biases in (
        [None, None, None, None],
        [torch.randn(6), torch.randn(8)[::2], None, torch.randn(1)],
        [torch.randn(1), torch.randn(4), torch.randn(1).expand(4), None],
    ):
        for got, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
            torch.testing.assert_close(got, F.linear(x, weight, bias))


@pytest.mark.parametrize("bias", [None, torch.randn(32)])
def test_what_is_compiled_early_is_what_is_launched(kernel: Kernel, bias: Tensor | None) -> None:
    """Triton compiles a kernel for the constants and the divisors of the numbers that it is given."""
    x, weights = torch.randn(2, 8, 48)[..., :32], [torch.randn(1024, 48)[:, :32], torch.randn(32, 32)]
    with FakeTensorMode() as mode:
        compile_for(mode.from_tensor(x), [mode.from_tensor(weight) for weight in weights], bias is not None)
    linears(x, weights, [None, bias])
    (early, *compiled), (programs, *launched) = kernel.runs
    assert compiled == launched
    assert (early, programs) == (0, 33)


def test_what_cublas_computes_is_not_compiled(kernel: Kernel) -> None:
    compile_for(torch.randn(20_000, 16), [torch.randn(1024, 16), torch.randn(1024, 16)], False)
    compile_for(torch.randn(4, 24), [torch.randn(8, 24), torch.randn(8, 24)], False)
    assert kernel.runs == []


@pytest.mark.parametrize(
    "x, weight",
    [
        (torch.randn(4, 24), torch.randn(8, 24)),  # rows of 24 elements
        (torch.randn(4, 24)[:, :16], torch.randn(8, 16)),
        (torch.randn(4, 16), torch.randn(8, 24)[:, :16]),
        (torch.randn(16, 32).t()[:, :16], torch.randn(8, 16)),
        (torch.randn(4, 16), torch.randn(16, 16).t()),
        (torch.randn(4, 16).double(), torch.randn(8, 16).double()),
        (torch.randn(0, 16), torch.randn(8, 16)),
    ],
)
def test_rows_that_are_not_read_fast_are_left_to_cublas(
    monkeypatch: pytest.MonkeyPatch, x: Tensor, weight: Tensor
) -> None:
    monkeypatch.setattr(module, "_launch", None)
    for result in linears(x, [weight, weight], [None, None]):
        torch.testing.assert_close(result, F.linear(x, weight))
