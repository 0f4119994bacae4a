"""Units are lowered one after the other, and their kernels waited for when all of them are."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import convert_frame
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager

import bcg_compiler as bcg
from bcg_compiler.compat.kernels_later import Kernels
from bcg_compiler.compat.patches import patched_here
from bcg_compiler.compat.threads import threads_served_soon
from bcg_compiler.lower.units import UnitCompiler

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


def tell(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    """Tell of each graph that is lowered, and each that is waited for, before that is done."""
    lower, wait = GraphLowering.codegen, AsyncCompile.wait

    def lowering(self: Any) -> Any:
        note("lower")
        return lower(self)

    def waiting(self: Any, scope: Any) -> None:
        note("wait")
        wait(self, scope)

    monkeypatch.setattr(GraphLowering, "codegen", lowering)
    monkeypatch.setattr(AsyncCompile, "wait", waiting)


def test_no_kernel_is_waited_for_before_all_units_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit waited for its kernels, for seconds in which the next one could have been lowered."""
    events: list[str] = []
    tell(monkeypatch, events.append)
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


def test_an_interrupted_compile_leaves_no_unit_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is made again would have called it: names of its kernels stood for what is waited for."""
    asked: list[tuple[Any, ...]] = []
    units, wait = UnitCompiler.units, AsyncCompile.wait

    def interrupted(self: Any, scope: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(UnitCompiler, "units", lambda *args: asked.append(args) or units(*args))
    monkeypatch.setattr(AsyncCompile, "wait", interrupted)
    with fresh_cache(), torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            torch.compile(torch.relu, backend="bcg", options=OPTIONS)(torch.randn(5, 7))
        monkeypatch.setattr(AsyncCompile, "wait", wait)
        (unit,) = units(*asked[0]).values()
        x = torch.randn(5, 7)
        torch.testing.assert_close(unit(x)[0], x.relu())


def test_what_is_compiled_is_no_artifact_that_somebody_else_saves() -> None:
    """``torch.compiler.save_cache_artifacts`` gave half of what the units had been compiled to."""
    with CacheArtifactManager.with_fresh_cache(), fresh_cache():
        compared(three_units)
        assert torch.compiler.save_cache_artifacts() is None


def test_what_a_capture_compiles_is_compiled_beside_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was compiled meanwhile, and what was compiled for a bucket, failed by assertions without a word; and
    each call of compiled code in another thread raised, as one of code that is traced.
    """
    asked: list[tuple[Any, ...]] = []
    alone: list[tuple[bool, bool]] = []
    units, lock = UnitCompiler.units, convert_frame.compile_lock

    def note(_: str) -> None:
        alone.append((lock._is_owned(), torch.compiler.is_compiling()))

    monkeypatch.setattr(UnitCompiler, "units", lambda *args: asked.append(args) or units(*args))
    with fresh_cache(), torch.no_grad():
        torch.compile(torch.relu, backend="bcg", options=OPTIONS)(torch.randn(5, 7))
    ((_, graph, plan),) = asked
    tell(monkeypatch, note)
    with fresh_cache():
        UnitCompiler("inductor").units(graph, plan)
    assert alone == [(True, True)] * 2
    note("when all is over")
    assert alone[2:] == [(False, False)]


# -- Triton's kernels, for which Inductor has processes ----------------------------------------------------------------


class TritonKernel:
    """What a kernel's source gives; notes the threads that compile it."""

    def __init__(self) -> None:
        self.compiled_by: list[threading.Thread] = []

    def precompile(self, warm_cache_only: bool) -> None:
        assert warm_cache_only  # it is loaded by the thread that waits for it
        self.compiled_by.append(threading.current_thread())
        self.static_launcher = config.use_static_triton_launcher
        TritonBundler.put("a hash", 0)


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
        task = AsyncCompile.process_pool().submit(_worker_compile_triton, lambda: kernel, {}, {})
        assert task.result()[0] is kernel
        starting.set_result("ready")
        assert AsyncCompile.use_process_pool()
        assert AsyncCompile.process_pool() is processes
    assert len(kernel.compiled_by) == 1 and kernel.compiled_by != [threading.current_thread()]


def test_threads_compile_with_the_settings_of_who_asks(starting: Future[str]) -> None:
    """Settings are a thread's own from torch 2.13 on, and kernels were made for a launcher that was switched off."""
    kernel = TritonKernel()
    for chosen in (False, True):
        with Kernels().later(), config.patch(use_static_triton_launcher=chosen):
            AsyncCompile.process_pool().submit(_worker_compile_triton, lambda: kernel, {}, {}).result()
        assert kernel.static_launcher is chosen


def test_kernels_of_threads_are_in_the_bundle_of_their_own_graph(starting: Future[str]) -> None:
    """It is made when they are waited for; a graph that is lowered meanwhile would have taken them to the caches."""
    with fresh_cache(), Kernels().later():
        TritonBundler.begin_compile()
        try:
            AsyncCompile.process_pool().submit(_worker_compile_triton, TritonKernel, {}, {}).result()
            assert TritonBundler._entries == []
        finally:
            TritonBundler.end_compile()


def test_threads_do_whatever_processes_are_asked_for(starting: Future[str]) -> None:
    """Kernels of other languages than Triton's are compiled by functions of theirs."""
    with Kernels().later():
        assert AsyncCompile.process_pool().submit(lambda *given: given, "name", "code").result() == ("name", "code")


def test_a_fork_may_forget_the_processes_meanwhile(starting: Future[str]) -> None:
    """As torch does in each process that is forked: an error there was all that somebody's ``os.fork`` left."""
    with Kernels().later():
        AsyncCompile.process_pool.cache_clear()
        assert AsyncCompile.process_pool.cache_info().currsize == 0


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
