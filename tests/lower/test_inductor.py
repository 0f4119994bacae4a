"""Units compiled by Inductor: close to eager, replayed, compiled once, and found in its caches by the next process."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.exc import InductorError, TritonMissing
from torch._inductor.lowering import lowerings

import bcg_compiler as bcg
from bcg_compiler import backend
from bcg_compiler.backend import segment_compiler as choose_compiler
from bcg_compiler.compat import inductor
from bcg_compiler.options import Options

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * torch.sigmoid(x)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


class Broken(nn.Module):
    """A break in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = cosine(layer(x))
        return x


def compared(compiled: Callable[..., Any], eager: Callable[..., Any], lengths: tuple[int, ...]) -> Any:
    """Calls of so many rows, their number left open, against eager; what they amount to."""
    for length in lengths:
        x = torch.randn(length, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), eager(x))
    return bcg.stats(compiled)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(*(Layer() for _ in range(3))), Broken], ids=["whole", "broken"])
def test_layers_are_compiled_once_for_all_lengths(make: Callable[[], nn.Module], monkeypatch: Any) -> None:
    compiled_graphs: list[int] = []
    compile_graph = inductor.compile_graph

    def counting(module: Any, fakes: Any, context: Any) -> Any:
        compiled_graphs.append(1)
        return compile_graph(module, fakes, context)

    monkeypatch.setattr("bcg_compiler.lower.units.compile_graph", counting)
    model = make()
    compiled = torch.compile(model, backend="bcg", options=OPTIONS)
    stats = compared(compiled, model, (3, 5, 5, 3, 3))
    assert (len(compiled_graphs), stats.unique_units, stats.eager_units) == (1, 1, {})
    assert (stats.graphs, stats.replays) == (1, 3)


CACHE = """
import torch
import bcg_compiler as bcg
from torch._dynamo.utils import counters

def step(cache, x, position):
    made = x * 2
    cache.index_copy_(0, position, made)
    return (cache * made.sum()).sum(1) + 1

options = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}
compiled = torch.compile(step, backend="bcg", options=options)
one, other = torch.zeros(6, 4), torch.zeros(6, 4)
with torch.no_grad():
    for at in range(4):
        x, position = torch.randn(1, 4), torch.tensor([at])
        torch.testing.assert_close(compiled(one, x, position), step(other, x, position))
        torch.testing.assert_close(one, other)
assert bcg.stats(compiled).replays == 3 and not bcg.stats(compiled).eager_units
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"])
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"])
"""


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    """A graph with a method, ``index_copy_`` of a KV cache, was not cached by AOTAutograd, which takes methods of known
    tensors only, and was traced again by each process. Inductor said that it "cannot save" it.
    """
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    seen = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CACHE], env=env, capture_output=True, text=True, check=True)
        assert "cannot save" not in done.stderr
        seen.append(done.stdout.split())
    assert seen == [["1", "0", "0", "0"], ["0", "1", "1", "0"]]


def test_inference_mode() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    compiled = torch.compile(model, backend="bcg", options=OPTIONS)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(3, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert bcg.stats(compiled).replays == 2


# -- what cannot be compiled -------------------------------------------------------------------------------------------


def test_what_inductor_cannot_lower_runs_as_it_is_and_the_rest_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("no code for this operation")

    monkeypatch.setitem(lowerings, torch.ops.aten.erfc.default, fails)

    def fn(x: Tensor) -> Tensor:
        return torch.relu(cosine(torch.erfc(x) + 1) * 2.5)

    compiled = torch.compile(fn, backend="bcg", options=OPTIONS)
    for _ in range(3):
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), fn(x))
    stats = bcg.stats(compiled)
    assert (stats.unique_units, stats.eager_units, stats.replays) == (2, {"compile_failed": 1}, 2)
    assert "no code for this operation" in caplog.text and "erfc" in caplog.text


NO_COMPILER = """
import torch
import bcg_compiler as bcg

@bcg.eager_break(fake=torch.empty_like)
def cosine(x):
    return x.cos()

with torch.no_grad():
    for program in (lambda x: torch.relu(cosine(torch.relu(x) + 1)) * 3, lambda x: torch.relu(x) * 5):
        options = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "inductor"}
        compiled = torch.compile(program, backend="bcg", options=options)
        for _ in range(3):
            x = torch.randn(4)
            assert torch.equal(compiled(x), program(x))
        print(bcg.stats(compiled).eager_units)
"""


def test_a_missing_cpp_compiler_is_named_once(tmp_path: Path) -> None:
    """Each unit was one more warning of an error inside of Inductor, none of which said what to install."""
    env = {**os.environ, "CXX": "no-such-g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", NO_COMPILER], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["{'no_compiler': 2}", "{'no_compiler': 1}"]
    warnings = [line for line in done.stderr.splitlines() if "bcg:" in line]
    assert len(warnings) == 1
    assert "no-such-g++" in warnings[0] and "apt-get install g++" in warnings[0]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (TritonMissing(None), "pip install -U triton"),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), "apt-get install gcc"),
    ],
    ids=["no_triton", "no_c_compiler"],
)
def test_what_to_install_for_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, remedy: str
) -> None:
    def fails(*_: Any) -> Any:
        raise InductorError(error, None)

    monkeypatch.setattr("bcg_compiler.lower.units.compile_graph", fails)
    importlib.import_module("bcg_compiler.lower.units")._say_once.cache_clear()
    compiled = torch.compile(lambda x: torch.relu(cosine(torch.relu(x) + 1)), backend="bcg", options=OPTIONS)
    compiled(torch.ones(4))
    assert bcg.stats(compiled).eager_units == {"no_compiler": 2}
    said = [record.getMessage() for record in caplog.records if record.name == "bcg_compiler"]
    assert len(said) == 1 and remedy in said[0]


@pytest.mark.parametrize(
    ("asked", "on_cuda", "triton", "chosen"),
    [
        ({}, True, True, "inductor"),
        ({}, True, False, "eager"),
        ({}, False, True, "eager"),
        ({"capture": "emulated"}, True, True, "eager"),
        ({"capture": "off", "segment_compiler": "inductor"}, True, True, "eager"),
        ({"segment_compiler": "eager"}, True, True, "eager"),
        ({"segment_compiler": "inductor"}, False, False, "inductor"),
    ],
)
def test_inductor_is_the_default_where_it_wins(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], on_cuda: bool, triton: bool, chosen: str
) -> None:
    """On CUDA with Triton; who asks for something gets it."""
    monkeypatch.setattr(backend, "find_spec", lambda name: name if triton else None)
    assert choose_compiler(Options.parse(asked), on_cuda=on_cuda) == chosen


def test_code_for_other_sizes_is_not_found_in_the_caches() -> None:
    """Code of a graph for five rows or more was taken, by its text, for that of four: it gave five rows, silently."""

    def first_five(x: Tensor) -> Tensor:
        return x[:5] * 2

    compiled = torch.compile(first_five, backend="bcg", dynamic=True, options=OPTIONS)
    with torch.no_grad():
        for rows in (6, 7, 12, 4, 3, 5):
            x = torch.randn(rows, 4)
            assert torch.equal(compiled(x), first_five(x))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.relu(x) * 2
    return made, made[: x.shape[0] // 2] + 1


def pairs(x: Tensor) -> Tensor:
    return (torch.relu(x) * 2).view(x.shape[0] // 2, 2, 4).sum(1)


def in_order(x: Tensor) -> Tensor:
    return x.sort(0).values * 2  # from torch 2.13 on of fewer rows than 32767, for positions of 16 bits


@pytest.mark.parametrize("fn", [halves, pairs, in_order])
def test_code_for_open_sizes_is_found_in_the_caches_with_what_it_assumes(fn: Callable[[Tensor], Any]) -> None:
    """A second process ran units that take n // 2 as they are (a KeyError), and forgot what the first had assumed."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    seen = []
    with fresh_cache(), torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(fn, backend="bcg", dynamic=True, options=OPTIONS)
            for rows in (8, 10, 10, 40_000):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(compiled(x), fn(x))
            stats = bcg.stats(compiled)
            found = counters["inductor"]
            seen.append((stats.graphs, stats.eager_units))
    assert seen[0] == seen[1] == (seen[0][0], {})
    assert seen[0][0] == 1 or fn is in_order
    assert (found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]) == (0, seen[0][0])


@pytest.mark.parametrize(
    "widen",
    [
        lambda x: x.repeat_interleave(2, 0),
        lambda x: torch.cat([x, x, x[:3]]),
        lambda x: x.t().repeat(1, 3),
        torch.flatten,
    ],
    ids=["2n", "2n+3", "3n columns", "8n"],
)
@torch.no_grad()
def test_a_unit_may_take_multiples_of_a_size_and_not_the_size(widen: Callable[[Tensor], Tensor]) -> None:
    """Behind a break nothing of n rows is left, where Inductor's code looks for n: such a unit ran as it is."""

    def fn(x: Tensor) -> Tensor:
        return torch.softmax(cosine(widen(x) * 1.5), 0) * 2

    compiled = torch.compile(fn, backend="bcg", options=OPTIONS)
    stats = compared(compiled, fn, (5, 5, 9, 9, 5))
    assert (stats.graphs, stats.breaks, stats.eager_units) == (1, 1, {})


def test_the_first_call_is_not_watched_for_custom_operations(monkeypatch: Any) -> None:
    """It tunes kernels by launching thousands of operations, and each would be looked at in Python."""
    from torch._functorch._aot_autograd import runtime_wrappers

    def watch() -> None:
        raise AssertionError("AOTAutograd looks for faults of custom operations")

    monkeypatch.setattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", watch)
    model, x = Layer(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="bcg", options=OPTIONS)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x))
    assert bcg.stats(compiled).eager_units == {}
    with pytest.raises(AssertionError, match="faults of custom operations"):
        torch.compile(model, backend="aot_eager")(x)  # elsewhere it does


def test_processes_are_started_from_the_thread_that_asks(monkeypatch: Any) -> None:
    """They are told a key for which a thousand files are read; a second thread would take seconds to read them."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(inductor, "_starting", None)
    monkeypatch.setattr(
        "torch._inductor.async_compile.maybe_warm_pool", lambda: threads.append(threading.current_thread())
    )
    inductor.start_workers()
    assert threads == [threading.current_thread()]
    inductor.start_workers()
    assert len(threads) == 1
