"""Units compiled apart: results are eager's, whatever the cuts, the memory that values share, and the compiler."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg
from bcg_compiler.plan import build
from bcg_compiler.plan.units import whole_groups
from bcg_compiler.runtime.capture import EmulatedCapture


def as_it_is(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return module.forward


def through_aot(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """What Inductor is given, too: without writes and views, each input in memory of its own."""
    return aot_module_simplified(module, list(fakes), fw_compiler=lambda inner, _: make_boxed_func(inner.forward))


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


def cut_every(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Cut units behind every ``count`` operations, whether or not anything repeats."""

    def cut(nodes: Any, facts: Any, key: Any) -> Any:
        pieces = [list(nodes[at : at + count]) for at in range(0, len(nodes), count)]
        return whole_groups(pieces, facts)

    monkeypatch.setattr(build, "cut_units", cut)


def compiled(fn: Callable[..., Any], compiler: Any = through_aot, **given: Any) -> Any:
    options = {
        "capture": "emulated",
        "min_segment_kernels": 1,
        "segment_compiler": compiler,
        **given.pop("options", {}),
    }
    return torch.compile(fn, backend="bcg", fullgraph=True, options=options, **given)


def check(
    fn: Callable[..., Any], *calls: Callable[[], tuple[Any, ...]], compiler: Any = through_aot, **given: Any
) -> Any:
    """Make each call with both: results and arguments must be eager's bits. Returns the stats."""
    program = compiled(fn, compiler, **given)
    for call in calls:
        args, others = call(), call()
        wanted, got = fn(*args), program(*others)
        for want, have in zip(tree_leaves((wanted, args)), tree_leaves((got, others)), strict=True):
            assert torch.equal(want, have) if isinstance(want, Tensor) else want == have
    return bcg.stats(program)


def apart() -> tuple[Tensor, Tensor]:
    return torch.arange(4.0), torch.arange(4.0) + 5


def overlapping() -> tuple[Tensor, Tensor]:
    home = torch.arange(8.0)
    return home[:4], home[2:6]


THREE = (apart,) * 3  # warm-up, capture, replay

# -- memory that is shared ---------------------------------------------------------------------------------------------


def test_arguments_that_overlap_in_one_call_and_not_in_another() -> None:
    """A program runs eagerly where its inputs overlap. Its units were compiled for inputs in memory of their own, and
    the write was not seen through the other one: wrong numbers.
    """

    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2 + a

    stats = check(fn, apart, overlapping, overlapping, apart, apart)
    assert stats.eager_runs == {"warm_up": 1, "input_overlap": 2}
    assert stats.eager_units == {}


def takes_it_for_the_argument(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return lambda *given: (given[0], *module(*given)[1:])


def takes_one_for_the_other(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return lambda *given: tuple(module(*given)[:1]) * 2


@pytest.mark.parametrize("compiler", [takes_it_for_the_argument, takes_one_for_the_other])
def test_compiled_code_whose_results_share_memory_is_not_used(compiler: Any) -> None:
    """Only units whose results share memory in eager code were looked at: the caller wrote two values for one."""

    def fn(a: Tensor, b: Tensor) -> Any:
        copies = a.clone(), a.clone()
        b.add_(1)
        return copies

    program = compiled(fn, compiler)
    for _ in range(3):
        args, others = apart(), apart()
        wanted, got = fn(*others), program(*args)
        for values in (wanted, got):
            values[0].add_(1)
        for want, have in zip((*wanted, *others), (*got, *args), strict=True):
            assert torch.equal(want, have)
    assert bcg.stats(program).eager_units == {"unit_alias": 1}


def test_a_first_call_that_fails_says_nothing_of_the_code() -> None:
    """The code counted as looked at, and the next call got the argument for its copy."""
    calls: list[int] = []

    def fails_once(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("not yet")
            return takes_it_for_the_argument(module, fakes)(*given)

        return run

    program = compiled(lambda a, b: (a.clone(), a.clone()), fails_once)
    with pytest.raises(RuntimeError, match="not yet"):
        program(*apart())
    args = apart()
    copy, _ = program(*args)
    assert copy.data_ptr() != args[0].data_ptr()


class Adds(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2 + a


def test_one_of_several_equal_units_is_given_one_memory_twice() -> None:
    """Keys say nothing of memory. Only one unit of each key was looked at: the others ran code that takes their inputs
    for separate ones.
    """

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Adds() for _ in range(4))

        def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
            a, b = a * 1.5, b * 1.5
            return [layer(a, a.view(4) if i == 2 else b) for i, layer in enumerate(self.layers)]

    assert check(Layers(), *THREE).eager_units == {"unit_alias": 1}


class Scales(nn.Module):
    """A layer that is not compiled: what a dropout gives is written."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.mul_(2), 0.1, False)
        return x + torch.relu(self.up(x))


def test_what_the_last_of_equal_layers_gives_may_be_nobodys() -> None:
    """Run as it is, the unit gave it no name, and it was deleted by its name."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scales() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            for layer in self.layers:
                before = x.sin()
                x = layer(x)
            return before

    assert check(Layers(), *[lambda: (torch.ones(3, 4),)] * 3).eager_units


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_two_results_of_a_unit_that_share_memory_which_is_written_later(monkeypatch: Any, cut: int) -> None:
    """Nothing makes a compiler put a value and its view by another dtype into one memory."""
    cut_every(monkeypatch, cut)

    def fn(a: Tensor, b: Tensor) -> Tensor:
        made = a * 2
        bits, tail = made.view(torch.int32), made[1:]
        bits.add_(1)
        tail.mul_(2)
        return made + b

    stats = check(fn, *THREE)
    assert bool(stats.eager_units) == (cut > 1)
    assert set(stats.eager_units) <= {"unit_alias"}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_storage_behind_a_value_of_another_unit(monkeypatch: Any, cut: int) -> None:
    """``as_strided`` reached around a view whose base no unit gives: it read what nobody had written, once captured."""
    cut_every(monkeypatch, cut)

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        part = (torch.cat([a, b]) * 2)[3:]
        return part.as_strided((3,), (1,), 1) * 2, part + 1

    assert set(check(fn, *THREE).eager_units) == {"unit_storage"}


@pytest.mark.parametrize("cut", [1, 2])
def test_a_shape_changed_in_place_between_units(monkeypatch: Any, cut: int) -> None:
    """Fakes show a value as it is at the end of the graph: a unit before that was compiled for the wrong shape."""
    cut_every(monkeypatch, cut)

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        made = (torch.cat([a, b]) * 2)[None]
        before, most = made.sum(0) + made, made.amax(1)
        made.squeeze_(0)
        return before + made.sum(0), most

    stats = check(fn, *THREE)
    assert set(stats.eager_units) == {"unit_reshapes"}


@pytest.mark.parametrize("cut", [1, 2])
def test_a_value_conjugated_lazily_crosses_units(monkeypatch: Any, cut: int) -> None:
    """A fake of it has no such bit: the unit was compiled for other numbers, and failed at best."""
    cut_every(monkeypatch, cut)

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.complex(a, b).conj()
        return turned.imag * 2, torch.view_as_real(turned.resolve_conj()) + 1

    assert set(check(fn, *THREE).eager_units) == {"unit_odd_input"}


# -- what crosses the boundaries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_no_unit_gives_or_takes_a_tuple(monkeypatch: Any, cut: int) -> None:
    """Cut between ``split`` and its items, both units failed to compile."""
    cut_every(monkeypatch, cut)

    def fn(a: Tensor, b: Tensor) -> Any:
        one, two = torch.split(a + b, 2)
        found = torch.topk(torch.cat([two, one * 2]), 2)
        return one + two, found.values * 2, found.indices + 1, torch.unbind(b.view(2, 2))

    assert check(fn, *THREE).eager_units == {}


def test_what_opens_and_closes_a_transform_stays_around_its_operations() -> None:
    """These nodes take no tensor, as arithmetic on sizes does, and ran before all units."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.vmap(lambda row, other: row.sin() * other)(a.view(2, 2), b.view(2, 2)) + 1

    assert check(fn, *THREE, compiler=as_it_is).eager_units == {}


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_sizes_and_numbers_are_given_to_units(monkeypatch: Any, cut: int) -> None:
    if cut:
        cut_every(monkeypatch, cut)

    def fn(a: Tensor, b: Tensor, number: int) -> tuple[Tensor, int]:
        joined = torch.cat([a, b])
        half = joined[joined.shape[0] // 2 :]
        return torch.relu(half) / (half.shape[0] * 3) * number + a.shape[0], half.shape[0] * 2

    def of(rows: int, others: int, number: int) -> Callable[[], Any]:
        return lambda: (torch.arange(float(rows)), torch.arange(float(others)), number)

    calls = [of(4, 6, 3), of(5, 9, 5), of(5, 9, 5), of(4, 6, 3), of(4, 6, 7)]
    assert check(fn, *calls, dynamic=True).eager_units == {}


def test_units_of_two_symbols_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may use what holds of the one size: here, that it is a multiple of three."""
    cut_every(monkeypatch, 1)

    def by_size(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        known = [f.shape[0] % 3 == 0 for f in fakes if isinstance(f, Tensor)]
        seen.append(str(fakes[0].shape[0]))
        del known
        return module.forward

    seen: list[str] = []

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(a), torch.relu(b)

    check(fn, lambda: (torch.ones(3), torch.ones(5)), compiler=by_size, dynamic=True)
    assert len(set(seen)) == 2


def test_the_autocast_of_the_call_holds_for_what_a_compiler_leaves_to_eager_operations() -> None:
    """Replayed by the emulated device a unit ran outside of it: other numbers than when it was recorded."""
    fn = compiled(lambda a, b: a @ b + 1, as_it_is)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            assert torch.equal(fn(a, b), a @ b + 1)


# -- reasons -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("bcgunits::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def in_autocast(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (a.view(2, 2) @ b.view(2, 2)).float()


UNCOMPILED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "unit_mode": in_autocast,
    "unit_random": lambda a, b: a + torch.rand_like(b),
    "unit_opaque": lambda a, b: twice(a) + b,
}


@pytest.mark.parametrize("reason", UNCOMPILED)
def test_a_unit_that_must_not_be_compiled_runs_as_it_is_and_others_are_compiled(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    cut_every(monkeypatch, 1)
    made: list[int] = []

    def counting(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        made.append(1)
        return through_aot(module, fakes)

    def fn(a: Tensor, b: Tensor) -> Any:
        return torch.relu(UNCOMPILED[reason](a, b))

    fn_compiled = compiled(fn, counting, options={"capturable": ["bcgunits::twice"]} if reason == "unit_opaque" else {})
    for _ in range(3):
        torch.manual_seed(1)
        wanted = fn(*apart())
        torch.manual_seed(1)
        assert torch.equal(fn_compiled(*apart()), wanted)
    assert set(bcg.stats(fn_compiled).eager_units) == {reason}
    assert made


def test_a_compiler_that_fails_is_named_and_the_unit_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def fails(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        raise RuntimeError("no code for this")

    assert check(lambda a, b: torch.relu(a) + b, *THREE, compiler=fails).eager_units == {"compile_failed": 1}
    assert "no code for this" in caplog.text and "relu" in caplog.text


def test_a_unit_whose_code_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation is to blame, as each is captured alone: it is the code of the compiler's."""
    capture = EmulatedCapture.capture

    def fails_with_units(self: EmulatedCapture, segment: Any, args: Any) -> Any:
        if any(type(cell.cell_contents).__name__ == "CompiledUnit" for cell in segment.__closure__ or ()):
            raise RuntimeError("it waits for the device")
        return capture(self, segment, args)

    monkeypatch.setattr(EmulatedCapture, "capture", fails_with_units)
    stats = check(lambda a, b: torch.relu(a) + b, apart, *THREE)
    assert stats.eager_units == {"unit_capture_failed": 1}
    assert stats.replays > 0 and stats.reasons == {}


def test_a_unit_compiled_late_may_assume_nothing_of_open_sizes() -> None:
    """Dynamo has its guards by then: for sizes that the code was not made for, nothing would be compiled anew."""
    units = importlib.import_module("bcg_compiler.lower.units")

    def assumes(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        assert fakes[0].shape[0] > 6
        return module.forward

    program = compiled(lambda a, b: torch.relu(a) + b, assumes, dynamic=True)
    program(torch.ones(8), torch.ones(8))
    (made,) = bcg.programs_of(program)
    compiler = made._compiled.compiler  # type: ignore[union-attr]
    assert compiler is not None and not compiler.refused
    late = units.UnitCompiler(assumes)
    late._late = True
    graph = made._compiled.graph  # type: ignore[union-attr]
    graph.fake_mode.shape_env.guards.clear()
    graph.fake_mode.shape_env.guards = []

    def assumes_more(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        assert fakes[0].shape[0] > 7
        return module.forward

    late._compile = assumes_more
    assert late.units(graph, made.plan) == {}
    assert late.refused == {"unit_sizes": 1}


def test_a_compiler_whose_code_gives_no_tuple_is_an_error() -> None:
    """A tensor of one row was taken for the tuple, and its row for the result."""
    program = compiled(lambda a, b: torch.relu(a[None] + b), lambda module, _: lambda *args: module.forward(*args)[0])
    with pytest.raises(TypeError, match="must give a tuple"):
        program(*apart())


def test_equal_units_are_compiled_once() -> None:
    made: list[int] = []

    def counting(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        made.append(len(module.graph.nodes))
        return through_aot(module, fakes)

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)) for _ in range(5)))
    stats = check(layers, *[lambda: (torch.ones(2, 4),)] * 3, compiler=counting)
    assert (len(made), stats.unique_units, stats.replays) == (1, 1, 2)


def test_a_result_that_is_expanded_is_replayed() -> None:
    """The emulated device wrote it element by element, though several lie in one place."""
    assert check(lambda a, b: torch.relu(a)[None].expand(2, -1), *THREE).eager_units == {}
