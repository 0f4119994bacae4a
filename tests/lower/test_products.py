"""Products of one input in a unit: which ones are one operation for the compiler, and that results are theirs.

Here the CPU is said to be a GPU on which small ones are one launch (test_linears.py), and float32 what it multiplies.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg
from bcg_compiler.lower import linears, units

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_limits", lambda device: linears._Limits(132, 232_448))
    monkeypatch.setattr(linears, "DTYPES", (torch.float32,))


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


def two_products(between: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Of one input; ``between`` is done with it and the first result, and gives what the second product takes."""
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        one = first(x)
        return one, second(between(x, one))

    return fn


def test_what_is_written_between_two_products_keeps_them_apart(seen: list[list[str]]) -> None:
    def between(x: Tensor, one: Tensor) -> Tensor:
        x.add_(1)
        return x

    check(two_products(between), torch.ones(5, 8))
    assert not any("linears.default" in names for names in seen)


def test_an_input_that_is_turned_in_between_keeps_them_apart(seen: list[list[str]]) -> None:
    def between(x: Tensor, one: Tensor) -> Tensor:
        x.t_()
        return x

    check(two_products(between), torch.ones(8, 8))
    assert seen and not any("linears.default" in names for names in seen)


def test_what_is_written_elsewhere_does_not(seen: list[list[str]]) -> None:
    def between(x: Tensor, one: Tensor) -> Tensor:
        one.add_(1)
        return x

    check(two_products(between), torch.ones(5, 8))
    assert seen[0].count("linears.default") == 1


def test_an_argument_that_is_given_back_is_the_same_input(seen: list[list[str]]) -> None:
    """Models cast to the dtype that something has already."""
    check(two_products(lambda x, one: x.to(one.dtype)), torch.ones(5, 8))
    assert seen[0].count("linears.default") == 1


def test_a_write_through_its_other_name_keeps_products_apart(seen: list[list[str]]) -> None:
    def between(x: Tensor, one: Tensor) -> Tensor:
        x[1:].mul_(3)
        return x.float()

    check(two_products(between), torch.ones(5, 8))
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


def test_a_region_of_vmap_is_left_as_it_is(seen: list[list[str]]) -> None:
    """Functorch has no rule for a custom operation: the unit was not compiled."""
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)
    check(torch.vmap(lambda x: (first(x), second(x))), torch.ones(3, 5, 8))
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


@pytest.mark.parametrize("open_rows", [False, True])
def test_kernels_are_compiled_early_where_rows_are_known(monkeypatch: pytest.MonkeyPatch, open_rows: bool) -> None:
    """With open rows each bucket may want another one."""
    compiled: list[Any] = []
    monkeypatch.setattr(
        "bcg_compiler.lower.products.compile_for",
        lambda x, weights, biased: compiled.append((tuple(x.shape), [len(weight) for weight in weights], biased)),
    )
    check(Projections(), torch.randn(6, 8), open_rows=open_rows)
    assert compiled == ([] if open_rows else [((6, 8), [16, 4, 4], True)])
