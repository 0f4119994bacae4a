"""Specialised buckets: which units are compiled once more, for which sizes, and that results stay."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import bcg_compiler as bcg
from bcg_compiler.compat import inductor
from bcg_compiler.plan import build
from bcg_compiler.plan.units import whole_groups

LADDER = [8, 16, 32]


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


class Recording:
    """A compiler that changes nothing and notes the sizes that it is given, strides included."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def __call__(self, module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        of_tensors = [s for fake in fakes if isinstance(fake, Tensor) for s in (*fake.shape, *fake.stride())]
        self.seen.append([*of_tensors, *(fake for fake in fakes if not isinstance(fake, Tensor))])
        return module.forward

    @property
    def exact(self) -> list[list[int]]:
        """The compiles in which no size was open."""
        return [sizes for sizes in self.seen if all(type(size) is int for size in sizes)]


class Layers(nn.Module):
    """Three equal layers on rows, then one that knows how many rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model: Any, compiler: Any, **options: Any) -> Any:
    given = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": compiler, "ladder": LADDER, **options}
    return torch.compile(model, backend="bcg", fullgraph=True, options=given)


def rows(count: int) -> Tensor:
    x = torch.randn(count, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def same(program: Any, model: Any, *counts: int) -> None:
    for count in counts:
        x = rows(count)
        assert torch.equal(program(x), model(x))


def test_units_are_compiled_once_more_for_exactly_a_specialised_bucket() -> None:
    compiler, model = Recording(), Layers()
    program = compiled(model, compiler, specialized_buckets=[16, 32])
    same(program, model, 5, 6)
    assert not compiler.exact, "before its capture nothing is compiled for a bucket"
    shared = len(compiler.seen)
    same(program, model, 16, 9, 12, 30, 7)
    assert sorted(sizes[0] for sizes in compiler.exact) == [16, 32]
    assert len(compiler.seen) == shared + 2
    stats = bcg.stats(program)
    assert (stats.unique_units, stats.specialized_units, stats.eager_units) == (1, 2, {})
    assert stats.replays >= 5 and set(stats.eager_runs) == {"warm_up"}


def test_what_runs_in_a_bucket_is_the_code_for_it() -> None:
    """Each code adds how many rows it was compiled for; -1 where that is open."""

    def marking(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        size = next(fake.shape[0] for fake in fakes if isinstance(fake, Tensor) and fake.dim() == 2)
        mark = size if type(size) is int else -1
        return lambda *args: tuple(result * 0 + mark for result in module(*args))

    program = compiled(lambda x: torch.relu(x) * 2, marking, specialized_buckets=16)
    program(rows(3))
    bcg.capture(program, progress=False)
    assert [int(program(rows(count)).mean()) for count in (7, 16, 12, 31)] == [-1, 16, 16, -1]


def test_a_unit_without_open_sizes_is_not_compiled_again() -> None:
    def fn(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x) + 1, weight.exp() * 2

    compiler = Recording()
    program = compiled(fn, compiler, specialized_buckets=[8])
    weight = torch.randn(3, 3)
    for _ in range(3):
        program(rows(5), weight)
    assert bcg.stats(program).specialized_units == 1  # both are one unit: nothing repeats
    assert sorted(map(len, compiler.exact)) == [8]


def test_strides_and_numbers_follow_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is a unit: the second is given what lies across, the third twice the number of rows, too."""
    monkeypatch.setattr(build, "cut_units", lambda nodes, facts, key: whole_groups([[n] for n in nodes], facts))

    def fn(x: Tensor) -> Tensor:
        return x.t().contiguous().mul(3).t() + x.shape[0] * 2

    compiler = Recording()
    program = compiled(fn, compiler, specialized_buckets=[16], assume_rows_independent=True)
    for _ in range(2):
        x = rows(16)
        assert torch.equal(program(x), fn(x))
    assert bcg.stats(program).replays
    assert sorted(compiler.exact) == [[4, 16, 1, 4], [4, 16, 16, 1], [4, 16, 16, 1], [16, 4, 1, 16, 32], [16, 4, 4, 1]]


def test_a_compile_for_one_bucket_that_fails_leaves_it_the_code_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def open_only(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        if all(type(size) is int for fake in fakes if isinstance(fake, Tensor) for size in fake.shape):
            raise RuntimeError("only for open sizes")
        return module.forward

    model = Layers()
    program = compiled(model, open_only, specialized_buckets=[8])
    same(program, model, 5, 6, 7)
    stats = bcg.stats(program)
    assert (stats.specialized_units, stats.eager_units) == (0, {"specialize_failed": 1})
    assert "only for open sizes" in caplog.text and "as in other buckets" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specialized_buckets": [20]}, "names 20, which is no bucket of the ladder. The nearest: 16 and 32"),
        ({"specialized_buckets": [1000]}, r"The nearest: 32\."),
        ({"specialized_buckets": [8], "bucket_multiple": 16}, "names 8, which is no bucket"),
        ({"specialized_buckets": [8], "ladder": None}, "and there is none"),
        ({"specialized_buckets": "8"}, "must be a list of buckets"),
        ({"specialized_buckets": [True]}, "must be a list of buckets"),
    ],
)
@pytest.mark.filterwarnings("ignore:The ladder")
def test_values_that_are_no_bucket_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled(Layers(), Recording(), **options)(rows(5))


def test_another_ladder_without_the_bucket_is_refused_and_the_old_one_stays() -> None:
    model = Layers()
    program = compiled(model, Recording(), specialized_buckets=[16])
    same(program, model, 5, 12)
    with pytest.raises(bcg.errors.OptionError, match="no bucket of the ladder"):
        bcg.capture(program, [8, 24], progress=False)
    same(program, model, 12)


def test_the_plan_names_the_buckets() -> None:
    program = compiled(Layers(), Recording(), specialized_buckets=[32, 16])
    program(rows(5))
    (made,) = bcg.programs_of(program)
    assert made.plan is not None
    assert "specialize 16, 32" in bcg.plan.plan_text(made.plan).splitlines()


def test_inductor_compiles_for_the_rows_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[Any]] = []
    compile_graph = inductor.compile_graph

    def counting(module: Any, fakes: Any, context: Any, tuned: bool = False) -> Any:
        given.append([tuned, *(size for fake in fakes if isinstance(fake, Tensor) for size in fake.shape)])
        return compile_graph(module, fakes, context, tuned)

    monkeypatch.setattr("bcg_compiler.lower.units.compile_graph", counting)
    model = Layers()
    program = compiled(model, "inductor", specialized_buckets=[8])
    with torch.inference_mode():
        for count in (12, 5, 6, 8, 12):
            x = rows(count)
            torch.testing.assert_close(program(x), model(x))
    assert [sizes[0] for sizes in given] == [False, True]
    assert given[1][1] == 8 and all(type(size) is int for size in given[1][1:])
    stats = bcg.stats(program)
    assert (stats.specialized_units, stats.eager_units, stats.graphs) == (1, {}, 1)
