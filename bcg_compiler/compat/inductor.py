"""Inductor as a compiler of small graphs (run with torch 2.11, 2.13 and 2.14)."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext, tracing
from torch.fx import GraphModule

from bcg_compiler.compat.cached_code import assumptions_kept
from bcg_compiler.compat.fake import FakeTensor, size_conditions
from bcg_compiler.compat.patches import patched_here
from bcg_compiler.compat.threads import threads_served_soon
from bcg_compiler.compat.unbound_sizes import giving_them, unbound_sizes, with_inputs_for


def tracing_context() -> TracingContext | None:
    """The context of the trace that a backend is called in; compiles after it must be done in it, too."""
    return TracingContext.try_get()


def on_cuda(values: Iterable[Any]) -> bool:
    """Whether any of these values is a tensor on CUDA."""
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


_starting: threading.Thread | None = None


def start_workers() -> None:
    """Start the processes in which Triton kernels are compiled, and, in a thread, what else takes a second: keys that
    are hashes of all files of Triton, and what a C compiler is run for. Tracing goes on in the meantime.

    The processes are told the key of torch, which is made here, so that they start at once.
    """
    global _starting
    if _starting is not None:
        return
    try:
        # Modules are imported here, as two threads that import the same ones wait for each other.
        from torch._inductor.async_compile import maybe_warm_pool
        from torch._inductor.runtime.triton_compat import triton_key
        from torch.utils._triton import triton_hash_with_backend
    except ImportError:  # private functions, and without them all that is done at the first kernel
        return

    def ready() -> None:
        with threads_served_soon():
            for make in (triton_key, triton_hash_with_backend):  # both are kept
                with suppress(Exception):
                    make()

    with suppress(Exception):  # without Triton, a GPU, or room for processes; whoever needs them says so
        maybe_warm_pool()
    _starting = threading.Thread(target=ready, daemon=True)
    _starting.start()


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Let no other thread compile: what belongs to a compile Inductor keeps in variables of the process.

    Dynamo holds this lock while it compiles; what is compiled at a capture is compiled outside of that. There it is
    also said that something is compiled, as Dynamo does from torch 2.13 on: else each call of compiled code in another
    thread is taken for one that is traced here, and raises.
    """
    from torch._dynamo import convert_frame

    compiler: Any = torch.compiler
    with getattr(convert_frame, "compile_lock", None) or nullcontext():
        before = getattr(compiler, "_is_compiling_flag", False)  # a private one, whose loss costs other threads alone
        compiler._is_compiling_flag = before or CompileContext.try_get() is None
        try:
            yield
        finally:
            compiler._is_compiling_flag = before


def compile_graph(
    module: GraphModule, fakes: Sequence[Any], context: TracingContext | None, tuned: bool = False
) -> Callable[..., Any]:
    """Compile a graph that returns a tuple, for inputs that look like ``fakes``; open sizes stay open.

    What is returned takes the inputs one by one and gives a sequence. Its kernels are tuned at its first call, which
    therefore must not be captured; ``tuned``: they are tuned now, so that it may be. Its operations are torch's own.
    """
    import torch._inductor.compile_fx  # takes a second, in which the thread goes on
    from torch._inductor import standalone_compile

    if _starting is not None:
        _starting.join()
    shapes: Any = "from_graph" if context is None else "from_tracing_context"
    ambient = tracing(context) if context is not None and TracingContext.try_get() is not context else nullcontext()
    patches = {
        # standalone_compile asks for kernels that are tuned while it compiles, for artifacts that are moved to another
        # machine: they are compiled one after the other, and once more for the tuning.
        "triton.autotune_at_compile_time": tuned,
        # The pass that folds constants takes x for x + 0: a result is then the caller's argument, or another result,
        # and with torch 2.11 what is written there later (pytorch/pytorch#197893).
        "joint_graph_constant_folding": False,
        # Kernels that do not wait for each other are one launch. Reductions are left out, of which Inductor refuses
        # those over open sizes (pytorch/pytorch#187269); and there are no such kernels for a CPU.
        "combo_kernels": on_cuda(fakes),
        "combo_kernels_pointwise_only": True,
    }
    # Inductor's caches keep with a graph what it takes for granted of sizes that are inputs of their own. Here they are
    # those of tensors: for x[:5] code that was made for five rows or more would be found for four, too.
    modes = dict.fromkeys(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    granted = "; ".join(condition for mode in modes for condition in size_conditions(mode))
    config: Any = torch.compiler.config  # its methods are not known to type checkers
    caches = config.patch(cache_key_tag=f"{config.cache_key_tag} {granted}")
    assumed = assumptions_kept(mode.shape_env for mode in modes)
    sizes = unbound_sizes(fakes)
    numbers = [size.of(fakes) for size in sizes]
    whole = with_inputs_for(module, numbers) if sizes else module
    with compiling_alone(), ambient, caches, assumed, _numbers_stay_open(), _first_call_unwatched(), torch.no_grad():
        made: Any = standalone_compile(
            whole, [*numbers, *fakes], dynamic_shapes=shapes, options={"config_patches": patches}
        )
    return giving_them(made, sizes) if sizes else made


def _first_call_unwatched() -> AbstractContextManager[None]:
    """Let the first call of what is compiled not be watched for faults of custom operations, of which there are none.

    AOTAutograd looks at each operation of a first call, for results of a custom one that share memory with its
    arguments. The first call also tunes kernels, and so launches operations by the thousand: 2.7 s in place of 0.9.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def unwatched(self: Any) -> None:
            init(self)
            self._is_first = False

        return unwatched

    first = getattr(runtime_wrappers, "_FirstInvocationContext", None)  # a private class, whose loss costs time alone
    return nullcontext() if first is None else patched_here(first, "__init__", make)


def _numbers_stay_open() -> AbstractContextManager[None]:
    """Keep AOTAutograd from having Dynamo trace once more, with a constant for each number that is open.

    It does that for all numbers of the shape environment that it does not find in the graph as tensors; and those of a
    whole model are not in a unit, which takes none that is read on the host.
    """
    from torch._functorch._aot_autograd import graph_compile

    return patched_here(graph_compile, "tensorify_python_scalars", lambda _: lambda *args: None)


@contextmanager
def written_code() -> Iterator[list[str]]:
    """The Python code that Inductor writes, or finds in its caches, inside the ``with`` block."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []

    def see(code: str) -> None:
        found.append(code)
        if before is not None:
            before(code)

    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = see
    try:
        yield found
    finally:
        GraphLowering.save_output_code = before


def file_of(code: str) -> str:
    """The file that Inductor runs ``code`` from: its name is a hash of the text."""
    from torch._inductor.codecache import PyCodeCache

    return str(PyCodeCache.write(code)[1])  # which leaves a file that is there alone


def missing_tool(error: BaseException) -> str:
    """What to install, where an error says that Inductor has no compiler for the code that it wrote; else ""."""
    from torch._inductor import config, exc

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, exc.InvalidCxxCompiler):
            wanted = [name for name in config.cpp.cxx if name] if isinstance(config.cpp.cxx, (list, tuple)) else []
            return (
                f"Inductor compiles code for the CPU with a C++ compiler, and {' or '.join(wanted) or 'none'} was not "
                "found. Install one (Debian and Ubuntu: apt-get install g++), or name it in the variable CXX."
            )
        if isinstance(seen, exc.TritonMissing):
            return (
                "Inductor's code for this device is compiled by Triton, which is not installed, or too old. Install "
                "it: pip install -U triton."
            )
        if "Failed to find C compiler" in str(seen):  # triton.runtime.build, for what launches its kernels
            return (
                "Triton needs a C compiler and found none. Install one (Debian and Ubuntu: apt-get install gcc), or "
                "name it in the variable CC."
            )
        seen = getattr(seen, "inner_exception", None) or seen.__cause__ or seen.__context__
    return ""
