"""What a break brings for capture: a barrier that lines up ranks, and a stub that fills its buffers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
events: list[str] = []


@pytest.fixture(autouse=True)
def _no_events() -> None:
    events.clear()


def rand(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, device=DEVICE)


def zero(x: Tensor, out: Tensor) -> None:
    events.append(f"stub {tuple(x.shape)}")
    out.zero_()


@bcg.eager_break(mutates_args=("out",), capture_stub=zero, barrier=lambda: events.append("barrier"))
def exchange(x: Tensor, out: Tensor) -> None:
    events.append("body")
    out.copy_(x * 2)


def two_exchanges(x: Tensor) -> Tensor:
    h = x.sin() + 1
    out = torch.empty_like(h)
    exchange(h, out)
    h = out.cos() * 3
    exchange(h, out)
    return out.sin() + h


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="bcg", fullgraph=True)


def check(fn: Callable[..., Any], calls: int = 4) -> list[list[str]]:
    """Compare calls with eager; what happened in each call."""
    run, found = compiled(fn), []
    for _ in range(calls):
        x = rand()
        want = fn(x)
        events.clear()
        assert torch.equal(run(x), want)
        found.append(list(events))
    return found


def test_each_break_of_a_capture_has_its_barrier_and_then_its_stub_and_replays_have_neither() -> None:
    at_capture = ["barrier", "stub (3, 4)"] * 2
    bodies = ["body"] * 2
    assert check(two_exchanges) == [bodies, at_capture + bodies, bodies, bodies]


def test_each_shape_is_captured_with_its_own_stubs() -> None:
    run = torch.compile(two_exchanges, backend="bcg", dynamic=True)
    for rows in (3, 5, 5, 3):
        run(rand(rows))
    assert [e for e in events if "stub" in e] == ["stub (5, 4)"] * 2 + ["stub (3, 4)"] * 2


@pytest.mark.parametrize(
    ("dynamic", "text"),
    [
        (False, r"Result 0 of the capture_stub of break '.*narrow' is float32\[1, 4\].* fake= says float32\[3"),
        (True, r"The capture_stub of break '.*narrow' returned float32\[1, 4\].*, but float32\[3, 4\]"),
    ],
)
def test_what_a_stub_returns_fills_the_buffer_that_the_next_segment_was_captured_on(dynamic: bool, text: str) -> None:
    """Nothing reads it before the body has run, so this shows by what a stub that looks unlike the break is told."""

    @bcg.eager_break(fake=torch.empty_like, capture_stub=lambda x: x[:1])
    def narrow(x: Tensor) -> Tensor:
        return x + 1

    run = torch.compile(
        lambda x: narrow(x.sin() * 2).cos() + 1, backend="bcg", dynamic=dynamic, options={"min_segment_kernels": 1}
    )
    run(rand())
    with pytest.raises(bcg.BcgError, match=text):
        run(rand())


def test_a_stub_of_a_method_has_its_instance() -> None:
    class Cache:
        def stub(self, x: Tensor) -> Tensor:
            events.append(self.name)
            return torch.zeros_like(x)

        @bcg.eager_break(fake=lambda self, x: torch.empty_like(x), capture_stub=stub)
        def read(self, x: Tensor) -> Tensor:
            return x + 1

        name = "the cache"

    cache = Cache()
    assert check(lambda x: cache.read(x.sin() * 2).cos() + 1, 3) == [[], ["the cache"], []]


def test_a_stub_is_given_what_another_break_of_the_same_step_makes() -> None:
    """Neighbouring breaks are one step: at capture the value between them is a buffer of the form it had before."""

    @bcg.eager_break(fake=torch.empty_like)
    def first(x: Tensor) -> Tensor:
        return x * 2

    @bcg.eager_break(fake=torch.empty_like, capture_stub=lambda x: events.append(str(tuple(x.shape))))
    def second(x: Tensor) -> Tensor:
        return x + 1

    assert check(lambda x: second(first(x.sin() * 2)).cos() + 1, 3) == [[], ["(3, 4)"], []]


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(3, 4, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin() * 2
        store(h, self.cache)
        return (self.cache + h).cos()


@bcg.eager_break(mutates_args=("cache",), capture_stub=lambda x, cache: cache.zero_())
def store(x: Tensor, cache: Tensor) -> None:
    cache.copy_(x)


def test_a_stub_that_writes_into_a_cache_is_refused() -> None:
    """A capture has no effects: a cache that a stub has zeroed gives wrong numbers in every later call."""
    run = compiled(Cached())
    run(rand())
    for _ in range(2):
        with pytest.raises(bcg.BcgError, match=r"capture_stub of break '.*store' wrote into memory of the caller's"):
            run(rand())


@pytest.mark.parametrize("point", ["stub", "barrier"])
def test_an_error_at_capture_surfaces_with_its_place_each_time_and_a_later_call_captures(point: str) -> None:
    broken = [True]

    def fail(*_: Any) -> None:
        if broken[0]:
            raise KeyError("no such rank")

    @bcg.eager_break(mutates_args=("out",), **{"capture_stub" if point == "stub" else "barrier": fail})
    def send(x: Tensor, out: Tensor) -> None:
        events.append("body")
        out.copy_(x * 2)

    def fn(x: Tensor) -> Tensor:
        h = x.sin() + 1
        out = torch.empty_like(h)
        send(h, out)
        return out.cos() * h

    run = compiled(fn)
    x = rand()
    want = run(x)
    for _ in range(2):
        with pytest.raises(KeyError, match="no such rank") as error:
            run(x)
        assert any("break 1, %" in note and "send(h, out)" in note for note in error.value.__notes__)
    broken[0] = False
    assert torch.equal(run(x), want) and torch.equal(run(x), want)
    stats = bcg.stats(run)
    assert (stats.captures, stats.replays, stats.eager_runs) == (1, 2, {"warm_up": 1})
    assert events == ["body"] * 3
