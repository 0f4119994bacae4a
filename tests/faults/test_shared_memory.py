"""Memory that is reached in more than one way: overlapping arguments, parts of buffers, what a break holds itself."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg

ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


# -- arguments that share memory --------------------------------------------------------------------------------------


def _separate(home: Tensor) -> tuple[Tensor, Tensor]:
    return home[:4].clone(), home[4:8].clone()


def _overlapping(home: Tensor) -> tuple[Tensor, Tensor]:
    return home[:4], home[2:6]


def _same_memory(home: Tensor) -> tuple[Tensor, Tensor]:
    return home[:4], home[:4]


def _reversed_overlap(home: Tensor) -> tuple[Tensor, Tensor]:
    return home[2:6], home[:4]


def _one_tensor(home: Tensor) -> tuple[Tensor, Tensor]:
    part = home[:4]
    return part, part


def _write_first(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    b.scale_(x)
    read = y.sin()
    h = b.wall(read)
    return h + read, y * 2


def _write_in_a_segment(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    h = b.wall(y)
    x.add_(1)
    read = y.sin()
    return b.wall(read) + h


def _write_last(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    h = b.wall(x)
    read = y.sin()
    b.scale_(x)
    return read + h, y + 0


@pytest.mark.parametrize("body", [_write_first, _write_in_a_segment, _write_last], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize(
    "orders",
    [
        (_separate, _overlapping, _separate, _same_memory),
        (_overlapping, _reversed_overlap, _separate),
        (_separate, _one_tensor, _overlapping),
    ],
    ids=["separate_first", "overlapping_first", "one_tensor"],
)
def test_arguments_may_overlap_in_one_call_and_not_in_another(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any], orders: Any
) -> None:
    """No guard tells overlapping arguments from separate ones: compiled for separate ones, the program is called with
    overlapping ones (pytorch/pytorch#131192).
    """
    home = rand(8, 6)
    check(lambda x, y: body(breaks, x, y), [lambda order=order: order(home.clone()) for order in orders])


class _Cache(torch.nn.Module):
    cache: Tensor

    def __init__(self, breaks: SimpleNamespace, program: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(24.0).view(6, 4))
        self.breaks, self.program = breaks, program

    def forward(self, x: Tensor) -> Any:
        return self.program(self.breaks, self.cache, x)


def _break_writes_buffer(b: SimpleNamespace, cache: Tensor, x: Tensor) -> Any:
    b.scale_(cache)
    read = x.sin()
    return b.wall(read) + 1


def _segment_writes_buffer(b: SimpleNamespace, cache: Tensor, x: Tensor) -> Any:
    h = b.wall(x)
    cache.add_(1)
    read = x.sin()
    return b.wall(read) + h


@pytest.mark.parametrize(
    "program",
    [_break_writes_buffer, _segment_writes_buffer],
    ids=["by_a_break", "by_a_segment"],
)
@ONE_FORM
def test_argument_may_be_a_part_of_a_buffer_that_is_written(
    compile_pair: Any, breaks: SimpleNamespace, program: Callable[..., Any]
) -> None:
    """As above, where the caller hands in a slice of a cache that the module holds (pytorch/pytorch#163129)."""
    pair = compile_pair(_Cache(breaks, program))
    for start in (None, 1, 2):
        args = [
            torch.ones(2, 4) if start is None else module.cache[start : start + 2]
            for module in (pair.eager, pair.module)
        ]
        assert torch.equal(pair.compiled(args[1]), pair.eager(args[0]))
        assert torch.equal(pair.module.cache, pair.eager.cache)


# -- what a break reaches by itself -----------------------------------------------------------------------------------

_total = torch.ones(4, device="cuda" if torch.cuda.is_available() else "cpu")
_kept: list[Tensor] = []


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def add_to_published(x: Tensor) -> Tensor:
    bcg.current_context().total.add_(x)
    return x + 1


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def add_to_global(x: Tensor) -> Tensor:
    _total.add_(x)
    return x + 1


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def keep(x: Tensor) -> Tensor:
    _kept.append(x)
    return x + 1


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def add_to_kept(x: Tensor) -> Tensor:
    _kept[-1].add_(x)
    return x + 1


class _Holder:
    """An object of a plain class, with a tensor that its break writes."""

    def __init__(self) -> None:
        self.total = torch.ones(4)

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def add(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return x + 1

    def __call__(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        first = self.add(x)
        read = self.total * 2
        return first, self.add(read)


class _HolderModule(torch.nn.Module):
    """The same as a module, whose buffer it is."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(4))

    add, forward = _Holder.add, _Holder.__call__


def _through_context(x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    first = add_to_published(x)
    read = total * 2
    return first, add_to_published(read)


def _through_global(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    first = add_to_global(x)
    read = _total * 2
    return first, add_to_global(read)


def _through_an_earlier_break(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x.sin()
    first = keep(h)
    read = h.cos()
    return first, read + 1, add_to_kept(x)


UNREACHED = pytest.mark.xfail(
    raises=AssertionError, reason="a break is taken to write no tensor of the caller's that it is not given"
)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: _through_context, id="forward_context", marks=UNREACHED),
        pytest.param(lambda: _through_global, id="global", marks=UNREACHED),
        pytest.param(_Holder, id="attribute", marks=UNREACHED),
        pytest.param(lambda: _through_an_earlier_break, id="earlier_break"),
        pytest.param(_HolderModule, id="buffer"),
    ],
)
def test_break_writes_a_tensor_that_it_reaches_by_itself(
    rand: Any, way: dict[str, Any], make: Callable[[], Callable[..., Any]]
) -> None:
    """A break wrote a tensor that was not its argument, and a later segment read what was there before
    (pytorch/pytorch#163129). What comes after a break sees all that it wrote.
    """
    eager, fn = make(), make()
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options=way)
    for _ in range(2):
        x, seen = rand(4), []
        for program in (eager, compiled):
            total = torch.ones(4)
            _total.fill_(1)
            with bcg.forward_context(total=total):
                seen.append([*program(x, total), total, _total.clone()])
        assert all(map(torch.equal, *seen))


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def add_published(x: Tensor) -> Tensor:
    """Reads the cache as an attention break does: through the forward context."""
    return x + bcg.current_context().cache.sum()


def _written_by_a_segment(b: SimpleNamespace, x: Tensor, cache: Tensor) -> Any:
    cache.add_(1)
    return add_published(x.sin()).cos()


def _written_by_the_break_before(b: SimpleNamespace, x: Tensor, cache: Tensor) -> Any:
    b.scale_(cache)
    return add_published(x.sin()).cos(), cache * 2


def _written_by_the_break_in_the_same_step(b: SimpleNamespace, x: Tensor, cache: Tensor) -> Any:
    cache.mul_(0.5)
    b.scale_(cache)
    return add_published(x).cos(), cache * 2


def _first_written_behind_a_break(b: SimpleNamespace, x: Tensor, cache: Tensor) -> Any:
    h = add_published(x.sin()).cos()
    cache.add_(h)
    return add_published(h).cos(), cache * 2


def _written_again_between_breaks(b: SimpleNamespace, x: Tensor, cache: Tensor) -> Any:
    b.scale_(cache[:2])
    h = add_published(x.sin()).cos()
    cache[1:].mul_(0.5)
    return add_published(h).sin(), cache.cos()


@pytest.mark.parametrize(
    "body",
    [
        _written_by_a_segment,
        _written_by_the_break_before,
        _written_by_the_break_in_the_same_step,
        _first_written_behind_a_break,
        _written_again_between_breaks,
    ],
    ids=lambda f: f.__name__[1:],
)
@ONE_FORM
def test_break_reads_a_written_argument_through_the_context(
    breaks: SimpleNamespace, rand: Any, way: dict[str, Any], body: Callable[..., Any]
) -> None:
    """The writes before a break lay in a slot and reached the caller's tensor at the end of the call: a break that
    knows the tensor by another way saw it as it was before (docs/semantics.md, "Order").
    """

    def program(x: Tensor, cache: Tensor) -> Any:
        return body(breaks, x, cache)

    compiled = torch.compile(program, backend="bcg", fullgraph=True, options=way)
    caches = torch.ones(4), torch.ones(4)
    for n in range(6):
        if n == 4:
            caches = torch.zeros(4), torch.zeros(4)  # others: the slot holds what the ones before left
        x, seen = rand(4), []
        for fn, cache in zip((program, compiled), caches, strict=True):
            with bcg.forward_context(cache=cache):
                made = fn(x, cache)
            seen.append([*(made if isinstance(made, tuple) else [made]), cache])
        assert all(map(torch.equal, *seen))
    if way["capture"] != "off":
        assert bcg.stats(compiled).replays
