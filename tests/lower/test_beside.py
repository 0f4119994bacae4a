"""Products of one input that are side by side: which ones, and that results are those of one after the other.

Streams are seen on a GPU only (tests/gpu/test_units.py); here the device is said to have room for all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg
from bcg_compiler.lower import beside, units
from bcg_compiler.lower.beside import linears

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "fit", lambda *_: True)
    monkeypatch.setattr(beside, "FEW_GRAPHS", 0)


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


@pytest.mark.parametrize("layers, ladder, together", [(1, None, False), (1, [4, 8, 12, 16], True), (4, None, True)])
def test_a_program_of_few_graphs_has_no_forks(
    seen: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    ladder: list[int] | None,
    together: bool,
) -> None:
    """A fork ends, for all graphs of a process, that they have the least time between kernels (docs/bench.md)."""
    monkeypatch.setattr(beside, "FEW_GRAPHS", 3)

    @bcg.eager_break(fake=torch.empty_like)
    def between(x: Tensor) -> Tensor:
        return x.clone()

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sigmoid(self.a(x)) * self.b(x)

    blocks = nn.ModuleList(Gate() for _ in range(layers))

    def model(x: Tensor) -> Tensor:
        for block in blocks[:-1]:
            x = between(block(x))
        return blocks[-1](x)

    options = OPTIONS | ({} if ladder is None else {"ladder": ladder})
    x = torch.randn(4, 8)
    if ladder:
        torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(torch.compile(model, backend="bcg", options=options)(x), model(x))
    assert any("linears.default" in names for names in seen) == together
