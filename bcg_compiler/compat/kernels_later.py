"""Inductor's kernels, compiled while more graphs are lowered (run with torch 2.11, 2.13 and 2.14).

Inductor has kernels compiled by other processes, and waits for those of a graph before it goes on; until the processes
are there, which takes seconds, it compiles them itself, one by one. That was a third of a model's first calls. Here
graphs are lowered one after the other, and waited for when all of them are; until the processes are there threads
compile kernels, most of which is done without the interpreter's lock.

A graph goes into Inductor's caches with its kernels, and so when they are there.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bcg_compiler.compat.inductor import compiling_alone
from bcg_compiler.compat.patches import patched_here


class Kernels:
    """The kernels of a graph that was compiled ``later()``."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []
        self._saves: list[Callable[[], None]] = []
        self._asks_for_processes = False

    @contextmanager
    def later(self) -> Iterator[None]:
        """Do not wait for kernels of what this thread compiles within it: none of it must be called before
        ``finish``.
        """
        try:
            from torch._inductor.async_compile import AsyncCompile
            from torch._inductor.codecache import FxGraphCache
            from torch._inductor.triton_bundler import TritonBundler

            places: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
                (AsyncCompile, "wait", self._wait),
                (AsyncCompile, "use_process_pool", self._use_pool),
                (AsyncCompile, "process_pool", self._pool),
                (FxGraphCache, "_save_graph", self._save),
            )
            there = all(hasattr(owner, name) for owner, name, _ in places) and hasattr(TritonBundler, "collect")
        except ImportError:
            there = False
        with ExitStack() as patches:
            if there:  # else they are waited for one graph after the other, which costs time alone
                for place in places:
                    patches.enter_context(patched_here(*place))
            yield

    def finish(self) -> None:
        """Wait for the kernels, and put the graph into the caches."""
        with compiling_alone(), _kept_apart() if self._saves else nullcontext():
            for wait in self._waits:
                wait()
            for save in self._saves:
                save()

    def _wait(self, original: Callable[..., None]) -> Callable[..., None]:
        return lambda compiling, scope: self._waits.append(lambda: original(compiling, scope))

    def _use_pool(self, original: Callable[[], bool]) -> Callable[[], bool]:
        from torch._inductor.async_compile import AsyncCompile

        def use() -> bool:
            self._asks_for_processes = True
            try:
                return original() or AsyncCompile._ready_future is not None  # None: none are to be used
            finally:
                self._asks_for_processes = False

        return use

    def _pool(self, original: Callable[[], Any]) -> Callable[[], Any]:
        from torch._inductor.async_compile import AsyncCompile

        def pool() -> Any:
            ready = AsyncCompile._ready_future
            return original() if self._asks_for_processes or ready is None or ready.done() else _Threads

        return pool

    def _save(self, original: Callable[..., None]) -> Callable[..., None]:
        from torch._inductor.codecache import FxGraphCache
        from torch._inductor.triton_bundler import TritonBundler

        def later(key: str, graph: Any, example_inputs: Any, *where: Any) -> None:
            context, env = TracingContext.get(), FxGraphCache._get_shape_env()
            assert env is not None
            numbers = FxGraphCache._filter_backed_symints(example_inputs)
            # Now, as graphs that are lowered in the meantime may assume more, and AOTAutograd's cache keeps it, too.
            assumed = env.produce_guards_expression(placeholders=numbers, guards=env.get_pruned_guards(numbers))
            graph.guards_expr = assumed

            def save() -> None:
                graph.set_triton_bundle(TritonBundler.collect()[0])
                said = patched_here(ShapeEnv, "produce_guards_expression", lambda _: lambda *args, **kwargs: assumed)
                with tracing(context), said:
                    original(key, graph, example_inputs, *where)

            self._saves.append(save)

        return later


class _Threads:
    """What stands for the processes until they are there."""

    @staticmethod
    def submit(work: Callable[..., Any], *given: Any) -> Future[Any]:
        """What ``work`` returns in a process, with the settings of the thread that asks for it."""
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime.compile_tasks import _worker_compile_triton

        here: Callable[..., Any] = _compile_triton if work is _worker_compile_triton else work
        compiling: Future[Any] = AsyncCompile.pool().submit(copy_context().run, here, *given)
        return compiling


def _compile_triton(load_kernel: Callable[[], Any], *for_processes: Any) -> tuple[Any, int]:
    """A kernel as it comes from a process, and the µs that it took."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    from torch._inductor.triton_bundler import TritonBundler

    began = time.time_ns()
    _set_triton_ptxas_path()
    kernel = load_kernel()
    # It belongs to the bundle of the graph that waits for it, and not to that of the graph that is lowered now.
    with patched_here(TritonBundler, "put", lambda _: lambda *args: None):
        kernel.precompile(warm_cache_only=True)
    return kernel, (time.time_ns() - began) // 1000


@contextmanager
def _kept_apart() -> Iterator[None]:
    """Note the kernels that are waited for within it, for ``TritonBundler.collect``; and what is put into caches not
    for ``torch.compiler.save_cache_artifacts``, which is told nothing of any graph that is compiled on its own.
    """
    from torch._inductor.triton_bundler import TritonBundler
    from torch.compiler._cache import CacheArtifactManager

    TritonBundler.begin_compile()
    try:
        with CacheArtifactManager.with_fresh_cache():
            yield
    finally:
        TritonBundler.end_compile()
