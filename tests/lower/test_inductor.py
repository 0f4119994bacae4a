"""Units compiled by Inductor: close to eager, replayed, compiled once, and found in its caches by the next process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.compat import inductor

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
    for length in (3, 5, 5, 3, 3):
        x = torch.randn(length, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x))
    stats = bcg.stats(compiled)
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
