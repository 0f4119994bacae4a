"""Units are lowered one after the other, and their kernels waited for when all of them are."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

import bcg_compiler as bcg
from bcg_compiler.compat.kernels_later import Kernels
from bcg_compiler.compat.patches import patched_here
from bcg_compiler.compat.threads import threads_served_soon

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


def three_units(x: Tensor) -> Tensor:
    return cosine(cosine(torch.relu(x) * 2) + torch.tanh(x)).softmax(-1)


def compared(fn: Callable[[Tensor], Tensor]) -> Any:
    """Three calls against eager; what they amount to."""
    compiled = torch.compile(fn, backend="bcg", options=OPTIONS)
    for _ in range(3):
        x = torch.randn(5, 7)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), fn(x))
    return bcg.stats(compiled)


def test_no_kernel_is_waited_for_before_all_units_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit waited for its kernels, for seconds in which the next one could have been lowered."""
    events: list[str] = []
    lower, wait = GraphLowering.codegen, AsyncCompile.wait

    def lowering(self: Any) -> Any:
        events.append("lower")
        return lower(self)

    def waiting(self: Any, scope: Any) -> None:
        events.append("wait")
        wait(self, scope)

    monkeypatch.setattr(GraphLowering, "codegen", lowering)
    monkeypatch.setattr(AsyncCompile, "wait", waiting)
    with fresh_cache():
        stats = compared(three_units)
    assert events == ["lower"] * 3 + ["wait"] * 3
    assert (stats.unique_units, stats.eager_units, stats.replays) == (3, {}, 2)


def test_a_unit_whose_kernel_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait = AsyncCompile.wait

    def waiting(self: Any, scope: Any) -> None:
        if any("tanh" in name for name in scope):
            raise RuntimeError("the compiler was killed")
        wait(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", waiting)
    with fresh_cache():
        stats = compared(three_units)
    assert (stats.unique_units, stats.eager_units, stats.replays) == (3, {"compile_failed": 1}, 2)
    assert "the compiler was killed" in caplog.text and "tanh" in caplog.text


# -- Triton's kernels, for which Inductor has processes ----------------------------------------------------------------


class TritonKernel:
    """What a kernel's source gives; notes the threads that compile it."""

    def __init__(self) -> None:
        self.compiled_by: list[threading.Thread] = []

    def precompile(self, warm_cache_only: bool) -> None:
        assert warm_cache_only  # it is loaded by the thread that waits for it
        self.compiled_by.append(threading.current_thread())


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[str]]:
    """Inductor's processes are being started; done when they are there."""
    future: Future[str] = Future()
    monkeypatch.setattr(AsyncCompile, "_ready_future", future)
    with config.patch(compile_threads=2):
        yield future


def test_threads_compile_until_the_processes_are_there(starting: Future[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, in which the kernels were compiled by the thread that lowers, one by one."""
    processes, kernel = object(), TritonKernel()
    monkeypatch.setattr(AsyncCompile, "process_pool", staticmethod(lambda: processes))
    assert not AsyncCompile.use_process_pool()
    with Kernels().later():
        assert AsyncCompile.use_process_pool()
        task = AsyncCompile.process_pool().submit(None, lambda: kernel, {}, {})
        assert task.result()[0] is kernel
        starting.set_result("ready")
        assert AsyncCompile.use_process_pool()
        assert AsyncCompile.process_pool() is processes
    assert len(kernel.compiled_by) == 1 and kernel.compiled_by != [threading.current_thread()]


def test_where_inductor_has_no_processes_it_compiles_as_it_does(
    starting: Future[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    with config.patch(compile_threads=1), Kernels().later():
        assert not AsyncCompile.use_process_pool()


def test_other_threads_are_left_alone(starting: Future[str]) -> None:
    """What stands for a class method is called with the class, or an object of it, by threads it does not stand for."""
    seen: list[bool] = []
    with Kernels().later():
        thread = threading.Thread(
            target=lambda: seen.extend([AsyncCompile.use_process_pool(), AsyncCompile().use_process_pool()])
        )
        thread.start()
        thread.join()
    assert seen == [False, False]


def test_threads_are_served_soon_until_the_last_compile_is_over() -> None:
    """Two compiles at a time: the first one that ends changes nothing for the other."""
    before = sys.getswitchinterval()
    first, second = threads_served_soon(), threads_served_soon()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() < before
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < before
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_methods_of_classes_are_put_back_as_they_were() -> None:
    class Owner:
        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @staticmethod
        def of_none() -> str:
            return "none"

    class Derived(Owner):
        pass

    with (
        patched_here(Owner, "of_class", lambda original: lambda: f"patched {original()}"),
        patched_here(Owner, "of_none", lambda original: lambda: f"patched {original()}"),
    ):
        assert (Owner.of_class(), Owner().of_class()) == ("patched Owner", "patched Owner")
        assert (Owner.of_none(), Owner().of_none()) == ("patched none", "patched none")
    assert (Derived.of_class(), Derived.of_none()) == ("Derived", "none")
