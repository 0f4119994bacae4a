"""Products of one input that are one launch: which ones, and that results are those of one after the other.

The kernel runs on a GPU (tests/gpu/test_products.py). Here the CPU is said to be one, and float32 what it multiplies.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg
from bcg_compiler.lower import products, units
from bcg_compiler.lower.products import Tile, launches, linears

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_limits", lambda device: products._Limits(132, 232_448))
    monkeypatch.setattr(products, "DTYPES", (torch.float32,))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Names of what the compiler is given, unit by unit."""
    found: list[list[str]] = []
    compiles = units.compile_graph

    def note(module: torch.fx.GraphModule, *more: Any, **options: Any) -> Any:
        found.append([getattr(n.target, "__name__", str(n.target)) for n in module.graph.nodes if n.op[:4] == "call"])
        return compiles(module, *more, **options)

    monkeypatch.setattr(units, "compile_graph", note)
    return found


def check(model: Callable[..., Any], *args: Tensor, open_rows: bool = False) -> None:
    """Three calls, of which two replay, are close to eager code; rows that are open stay so."""
    compiled = torch.compile(model, backend="bcg", options=OPTIONS)
    with torch.no_grad():
        for _ in range(3):
            same = [torch.randn_like(arg) for arg in args]
            given = [arg.clone() for arg in same]
            if open_rows:
                torch._dynamo.mark_dynamic(given[0], 0)
            torch.testing.assert_close(compiled(*given), model(*same))
    stats = bcg.stats(compiled)
    assert stats.replays and stats.eager_units == {}


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 4, bias=False), nn.Linear(8, 4)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.relu(self.q(x))
        return x + self.out(q * torch.sigmoid(self.k(x) - self.v(x)).repeat(1, 4))


@pytest.mark.parametrize("open_rows", [False, True])
def test_projections_of_one_input_are_one_operation(seen: list[list[str]], open_rows: bool) -> None:
    check(nn.Sequential(*(Projections() for _ in range(3))), torch.ones(5, 8), open_rows=open_rows)
    assert len(seen) == 1  # the layers are one unit
    assert seen[0].count("linears.default") == 1
    assert seen[0].count("linear") == 1  # the product behind


def test_what_is_written_between_two_products_keeps_them_apart(seen: list[list[str]]) -> None:
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        one = first(x)
        x.add_(1)
        return one, second(x)

    check(fn, torch.ones(5, 8))
    assert not any("linears.default" in names for names in seen)


def test_what_is_written_elsewhere_does_not(seen: list[list[str]]) -> None:
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        one = first(x)
        one.add_(1)
        return one, second(x)

    check(fn, torch.ones(5, 8))
    assert seen[0].count("linears.default") == 1


def test_an_argument_that_is_given_back_is_the_same_input(seen: list[list[str]]) -> None:
    """Models cast to the dtype that something has already."""
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return first(x), second(x.to(second.weight.dtype))

    check(fn, torch.ones(5, 8))
    assert seen[0].count("linears.default") == 1


def test_a_write_through_its_other_name_keeps_products_apart(seen: list[list[str]]) -> None:
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        one = first(x)
        x[1:].mul_(3)
        return one, second(x.float())

    check(fn, torch.ones(5, 8))
    assert not any("linears.default" in names for names in seen)


def test_a_weight_that_is_computed_is_not_there_yet(seen: list[list[str]]) -> None:
    weight = nn.Parameter(torch.randn(4, 8))

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, weight), F.linear(x, weight + x.mean())

    check(fn, torch.ones(5, 8))
    assert not any("linears.default" in names for names in seen)


def test_in_the_callers_autocast_products_are_cast(seen: list[list[str]]) -> None:
    """Autocast knows of ``F.linear`` and not of what stands for several: results were float32 in place of bfloat16."""
    model = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 4)])

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.relu(linear(x)) for linear in model)

    compiled = torch.compile(fn, backend="bcg", options=OPTIONS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            x = torch.randn(5, 8)
            for got, wanted in zip(compiled(x), fn(x), strict=True):
                torch.testing.assert_close(got, wanted)
    assert seen and not any("linears.default" in names for names in seen)


def test_products_of_different_inputs_are_two_groups(seen: list[list[str]]) -> None:
    a, b, c, d = (nn.Linear(8, 4) for _ in range(4))

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return a(x), c(y), b(x), d(y)

    check(fn, torch.ones(5, 8), torch.ones(5, 8))
    assert seen[0].count("linears.default") == 2


def test_a_function_of_the_users_gets_the_operations_as_they_are() -> None:
    given: list[set[str]] = []

    def compiler(module: torch.fx.GraphModule, fakes: Any) -> Any:
        given.append({str(node.target) for node in module.graph.nodes})
        return module.forward

    compiled = torch.compile(Projections(), backend="bcg", options={**OPTIONS, "segment_compiler": compiler})
    with torch.no_grad():
        compiled(torch.ones(5, 8))
    assert given and not any("linears" in target for target in given[0])


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


CPU = torch.device("cpu")


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
    assert [(launch.products, launch.tile[:2]) for launch in launches(rows, columns, CPU)] == found


def test_a_tile_needs_no_more_shared_memory_than_a_program_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_limits", lambda device: products._Limits(132, 100_000))
    (launch,) = launches(256, [1024, 256, 256], CPU)
    assert launch.tile == Tile(64, 128, 64, 4)  # 98,304 bytes; 64 columns, 128 deep, are 131,072


def test_nothing_is_launched_together_where_the_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert launches(1, [8, 8], CPU) == []


def test_a_product_that_fills_the_device_alone_is_left_to_the_compiler(seen: list[list[str]]) -> None:
    wide, *narrow = nn.Linear(8, 4096), nn.Linear(8, 4), nn.Linear(8, 4)

    def fn(x: Tensor) -> Tensor:
        return wide(x).amax(-1, keepdim=True) + narrow[0](x) * narrow[1](x)

    check(fn, torch.ones(600, 8))
    assert seen[0].count("linears.default") == 1 and seen[0].count("linear") == 1


def test_how_wide_a_weight_is_may_be_open(seen: list[list[str]]) -> None:
    """Which products are small is not to be asked of such a size: there would be one program for each."""

    def fn(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, one), F.linear(x, other)

    compiled = torch.compile(fn, backend="bcg", options=OPTIONS)
    with torch.no_grad():
        for wide in (5, 6, 7):
            given = torch.randn(3, 8), torch.randn(wide, 8), torch.randn(wide, 8)
            torch._dynamo.mark_dynamic(given[1], 0)
            torch._dynamo.mark_dynamic(given[2], 0)
            for got, wanted in zip(compiled(*given), fn(*given), strict=True):
                torch.testing.assert_close(got, wanted)
    assert len(seen) == 1 and "linears.default" not in seen[0]


def test_what_is_launched_is_what_fits_the_rows_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may be open when a unit is compiled: which products are small is seen at each capture."""
    launched: list[tuple[int, ...]] = []

    def launch(one: products.Launch, x: Tensor, weights: list[Tensor], biases: list[Any], outs: list[Tensor]) -> None:
        launched.append(one.products)
        for at in one.products:
            outs[at].copy_(F.linear(x, weights[at], biases[at]))

    monkeypatch.setattr(products, "_launch", launch)
    weights = [torch.randn(columns, 16) for columns in (1024, 32, 32)]
    biases = [None, torch.randn(32), None]
    for rows in (16, 4096, 20_000):
        x = torch.randn(rows, 16)
        for got, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
            torch.testing.assert_close(got, F.linear(x, weight, bias))
    assert launched == [(1, 2, 0), (1, 2)]


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
    monkeypatch.setattr(products, "_launch", None)
    for result in linears(x, [weight, weight], [None, None]):
        torch.testing.assert_close(result, F.linear(x, weight))
