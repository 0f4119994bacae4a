"""Effects happen exactly once a call: counters, running averages, caches, and the break bodies themselves."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


class _Counting(nn.Module):
    steps: Tensor
    broken: Tensor
    average: Tensor

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("broken", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8), persistent=False)
        self.norm = nn.BatchNorm1d(8)
        self.total = torch.zeros(8)  # a plain attribute
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.average.mul_(0.9).add_(x[0] * 0.1)
        h = self.norm(x)
        self.breaks.scale_(self.broken)
        self.total.add_(h[0])
        self.breaks.scale_(self.broken)
        return h * self.average + self.broken


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [(8, 8, 8), (8, 5, 8, 12, 5)], ids=["one_length", "lengths"])
def test_counters_and_averages_advance_once_a_call(
    check: Any, breaks: SimpleNamespace, rand: Any, training: bool, lengths: tuple[int, ...]
) -> None:
    """Runs made to warm up before capture applied the writes extra times (pytorch/pytorch#103985)."""
    check(_Counting(breaks).train(training), [(rand(n, 8),) for n in lengths])


def _only_effects(b: SimpleNamespace, x: Tensor, n: Tensor) -> None:
    b.scale_(n)
    n.add_(x.sum())
    b.fold_(n, x.sum())


def _not_read(b: SimpleNamespace, x: Tensor, n: Tensor) -> Tensor:
    b.wall(x)
    b.three(x.sin())
    b.scale_(n)
    return x


def _same_break_twice(b: SimpleNamespace, x: Tensor, n: Tensor) -> Tensor:
    return b.wall(x) + b.wall(x)


def _last(b: SimpleNamespace, x: Tensor, n: Tensor) -> Tensor:
    h = x.sin() + n
    b.scale_(n)
    return h


def _first(b: SimpleNamespace, x: Tensor, n: Tensor) -> Tensor:
    b.scale_(n)
    return x.sin() + n


@pytest.mark.parametrize(
    "body", [_only_effects, _not_read, _same_break_twice, _last, _first], ids=lambda f: f.__name__[1:]
)
def test_break_bodies_run_once_and_in_order(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any]
) -> None:
    """A body that ran while capturing, or whose result nobody reads, still runs exactly once a call
    (pytorch/pytorch#103985). ``Pair`` compares the list of bodies that ran.
    """
    check(lambda x, n: body(breaks, x, n), [(rand(4), torch.zeros(())), (rand(4), torch.ones(())), (rand(6), rand())])


class _Meter(nn.Module):
    """Counts in Python and in its own buffer, from within a break: neither is an argument."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8))
        self.calls: list[float] = []

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def put(self, x: Tensor) -> Tensor:
        self.calls.append(float(x.sum()))
        self.cache[len(self.calls) % 8] += x.sum()
        return x * 2

    @bcg.eager_break
    def note(self) -> None:
        self.calls.append(-1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.cache.sum()
        h = self.put(x.sin())
        between = self.cache.cos()
        self.note()
        self.cache.mul_(0.5)
        h = self.put(h.cos())
        return h + before, between + self.cache


def test_break_changes_its_own_object_once_a_call(check: Any, rand: Any) -> None:
    """State that no argument shows: the body's own counters and buffers (pytorch/pytorch#103985)."""
    check(_Meter(), [(rand(3),) for _ in range(3)])


@bcg.eager_break
def outer(x: Tensor, log: list[Tensor]) -> None:
    inner(x)
    log[0].add_(1)


@bcg.eager_break(mutates_args=("x",))
def inner(x: Tensor) -> None:
    x.add_(1)


declared_outer = bcg.eager_break(mutates_args=("x", "log"))(outer.__wrapped__)  # type: ignore[attr-defined]


@ONE_FORM
def test_break_within_a_break_runs_inline(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """A body that calls another break runs it once, as a part of its own (pytorch/pytorch#103985)."""

    def program(x: Tensor, n: Tensor) -> Tensor:
        h = x.sin()
        declared_outer(h, [n])
        return breaks.wall(h) + n

    check(program, [(rand(4), torch.zeros(())) for _ in range(2)])


@ONE_FORM
def test_compiling_changes_nothing(compile_pair: Any, breaks: SimpleNamespace, rand: Any, bodies: list[str]) -> None:
    """Until the first call returns, everything happened once: nothing ran to try it out (pytorch/pytorch#103985)."""
    module = _Counting(breaks)
    pair = compile_pair(module)
    pair.compiled(rand(4, 8))
    assert bodies == ["scale_", "scale_"]
    assert module.steps == 1 and module.norm.num_batches_tracked == 1


# -- caches -----------------------------------------------------------------------------------------------------------


def _index_copy(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    cache.index_copy_(0, slots, k)


def _setitem(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    cache[slots] = k


def _index_add(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    cache.index_add_(0, slots, k)


def _index_put(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    cache.index_put_((slots,), k, accumulate=True)


def _scatter(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    cache.scatter_(0, slots[:, None].expand_as(k), k)


def _masked(cache: Tensor, slots: Tensor, k: Tensor) -> None:
    hit = torch.zeros(cache.shape[0], dtype=torch.bool, device=cache.device).index_fill(0, slots, True)
    cache.copy_(torch.where(hit[:, None], cache * 0.5 + k.mean(0), cache))


class _Paged(nn.Module):
    cache: Tensor

    def __init__(self, breaks: SimpleNamespace, write: Callable[..., None], by_break: bool) -> None:
        super().__init__()
        self.k = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(32, 8))
        self.write, self.breaks, self.by_break = write, breaks, by_break

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.write(self.cache, slots, self.k(x))
        y = self.breaks.push_(self.cache, slots, x) if self.by_break else self.breaks.wall(self.cache).sum(0) + x
        self.cache[slots] += 1.0
        return y * 2


@pytest.mark.parametrize(
    "write", [_index_copy, _setitem, _index_add, _index_put, _scatter, _masked], ids=lambda f: f.__name__[1:]
)
@pytest.mark.parametrize("by_break", [True, False], ids=["break_writes", "break_reads"])
@ONE_FORM
def test_cache_is_written_in_the_live_slots_only(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any, write: Callable[..., None], by_break: bool
) -> None:
    """Rows added to fill a bucket were written too, to slot 0 or to the slots of an earlier step
    (vllm-project/vllm#13418).
    """
    torch.manual_seed(1)
    plan = [range(8), (10, 11, 12), (20, 24, 22, 21, 3), (30,)]
    check(_Paged(breaks, write, by_break), [(rand(len(slots), 8), ints(*slots)) for slots in plan])


@ONE_FORM
def test_cache_position_advances_with_each_call(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """A position that the model counts itself, as static key-value caches do (vllm-project/vllm#13418)."""

    class Cached(nn.Module):
        keys: Tensor
        length: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(16, 4))
            self.register_buffer("length", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            at = self.length + torch.arange(x.shape[0], device=x.device)
            self.keys.index_copy_(0, at, x.sin())
            self.length.add_(x.shape[0])
            seen = torch.arange(16, device=x.device) < self.length
            scores = breaks.wall(x @ self.keys.t()).masked_fill(~seen, float("-inf"))
            return scores.softmax(-1) @ self.keys

    check(Cached(), [(rand(3, 4),), (rand(1, 4),), (rand(1, 4),)])
