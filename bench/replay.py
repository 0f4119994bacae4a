"""Replay against its peers, side by side in one run: a chain of layers with one writing break each.

    python bench/replay.py [--layers 32] [--rows 16 512 2048] [--memory] [--json FILE]

A layer: ``h = A(rmsnorm(x)); o = empty_like(h); break(h, o)`` writes −h into o; ``x + 0.1 · C(silu(B(o)) · o)``, all
2048 × 2048, bf16, no bias. A measurement is the median of 40 calls after 5, each between two synchronisations; each
figure is the median over some passes through all variants, as the speed of the host drifts. ``--memory`` measures each
variant in a process of its own, in its first rows, for the bytes that it reserves beyond the weights. Peers that are
not installed are left out. Needs a GPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg

WIDTH = 2048
Run = Callable[[Tensor], Tensor]


def negate(h: Tensor, out: Tensor) -> None:
    """The body of the break, the same for everyone."""
    torch.neg(h, out=out)


@torch.library.custom_op("bcgbench::negate", mutates_args=("out",), tags=(torch.Tag.cudagraph_unsafe,))
def negate_op(h: Tensor, out: Tensor) -> None:
    """For peers that know breaks by a tag on an op."""
    torch.neg(h, out=out)


bcg_negate = bcg.eager_break(mutates_args=("out",))(negate)


class Layer(nn.Module):
    """One layer of the chain."""

    def __init__(self, break_: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.break_ = break_

    def forward(self, x: Tensor) -> Tensor:  # x [T, 2048]
        h = self.a(F.rms_norm(x, (WIDTH,), self.norm))
        out = torch.empty_like(h)
        self.break_(h, out)
        return x + 0.1 * self.c(F.silu(self.b(out)) * out)


def chain(layers: int, break_: Callable[[Tensor, Tensor], None]) -> nn.Module:
    """The chain, with the same weights for every break."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(*(Layer(break_) for _ in range(layers))).bfloat16().eval().requires_grad_(False)


def eager(layers: int, x: Tensor) -> Run:
    """PyTorch as it is."""
    return chain(layers, negate)


# A graph does not keep alive what it reads: the functions below hold the weights themselves.


def full_graph(layers: int, x: Tensor) -> Run:
    """One CUDA graph over everything, the break included: the bound that no breakable graph reaches."""
    model, static = chain(layers, negate), x.clone()
    _warm(lambda: model(static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)

    def run(value: Tensor, weights: nn.Module = model) -> Tensor:
        static.copy_(value)
        graph.replay()
        return out.clone()

    return run


def full_graph_compiled(layers: int, x: Tensor) -> Run:
    """One CUDA graph over the kernels that Inductor makes of our segments, the break included."""
    compiled, static = ours(layers, x, segment_compiler="inductor"), x.clone()
    _warm(lambda: compiled(static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(static)

    def run(value: Tensor, held: Run = compiled) -> Tensor:
        static.copy_(value)
        graph.replay()
        return out.clone()

    return run


def ours(layers: int, x: Tensor, **options: Any) -> Run:
    """``torch.compile(backend="bcg")``."""
    return torch.compile(chain(layers, bcg_negate), backend="bcg", fullgraph=True, options=options)


def ours_aot(layers: int, x: Tensor, **options: Any) -> Run:
    """``bcg.aot_compile``: a call goes to the replay without Dynamo."""
    return bcg.aot_compile(chain(layers, bcg_negate), (x,), options=options)


#: Which of Dynamo's guards are checked: a served model does not change its modules; a peer that is called with what it
#: was made for, or is wrong, has no guards at all.
MODULES = torch.compiler.skip_guard_on_all_nn_modules_unsafe
ALL = torch.compiler.skip_all_guards_unsafe


def breakable_peer(layers: int, x: Tensor) -> Run:
    """PyPI's breakable-cuda-graphs, with input and output copies as ours."""
    from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph

    model, static = chain(layers, no_graph(negate)), x.clone()
    _warm(lambda: model(static))
    graph = BreakableCUDAGraph()
    with breakable_graph(graph):
        out = model(static)

    def run(value: Tensor, weights: nn.Module = model) -> Tensor:
        static.copy_(value)
        graph.replay()
        return out.clone()

    return run


def reduce_overhead(layers: int, x: Tensor) -> Run:
    """``torch.compile(mode="reduce-overhead")`` with the break's op tagged ``cudagraph_unsafe``."""
    return torch.compile(chain(layers, negate_op), mode="reduce-overhead", fullgraph=True)


VARIANTS: dict[str, Callable[[int, Tensor], Run]] = {
    "eager": eager,
    "full graph": full_graph,
    "full graph, compiled": full_graph_compiled,
    "bcg, eager": partial(ours, segment_compiler="eager"),
    "bcg, eager, module guards skipped": partial(ours, segment_compiler="eager", guard_filter_fn=MODULES),
    "bcg, eager, all guards skipped": partial(ours, segment_compiler="eager", guard_filter_fn=ALL),
    "bcg, Inductor": partial(ours, segment_compiler="inductor"),
    "bcg, Inductor, module guards skipped": partial(ours, segment_compiler="inductor", guard_filter_fn=MODULES),
    "bcg, eager, ahead of time": partial(ours_aot, segment_compiler="eager"),
    "bcg, Inductor, ahead of time": partial(ours_aot, segment_compiler="inductor"),
    "bcg, Inductor, all guards skipped": partial(ours, segment_compiler="inductor", guard_filter_fn=ALL),
    "breakable-cuda-graphs": breakable_peer,
    "reduce-overhead": reduce_overhead,
}


@torch.inference_mode()
def measure(build: Callable[[int, Tensor], Run], layers: int, x: Tensor) -> dict[str, float]:
    """Median wall time of a call in µs, largest difference to eager, and seconds from the model on until the third
    call returned.
    """
    begin = time.perf_counter()
    chain(layers, negate)
    torch.cuda.synchronize()
    making = time.perf_counter() - begin
    started = time.perf_counter()
    run = build(layers, x)
    for _ in range(3):
        result = run(x)
    torch.cuda.synchronize()
    first = time.perf_counter() - started - making
    wanted = chain(layers, negate)(x)
    difference = (result.float() - wanted.float()).abs().max().item()
    for _ in range(5):
        run(x)
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {"wall_us": statistics.median(times) * 1e6, "first_calls_s": first, "difference": difference}


@torch.inference_mode()
def memory(build: Callable[[int, Tensor], Run], layers: int, x: Tensor) -> dict[str, int]:
    """Bytes that this process reserves beyond the weights, the chain called three times."""
    chain(layers, negate)
    gc.collect()
    torch.cuda.empty_cache()
    run = build(layers, x)
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    weights = sum(parameter.nbytes for parameter in chain(1, negate).parameters()) * layers
    gc.collect()
    torch.cuda.empty_cache()
    return {"reserved_bytes": torch.cuda.memory_reserved() - weights}


def memory_apart(name: str, layers: int, rows: int) -> int | None:
    """``memory`` of a variant in a process of its own; ``None`` if that failed."""
    command = [sys.executable, __file__, "--layers", str(layers), "--rows", str(rows), "--here", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])["reserved_bytes"]


def _warm(fn: Callable[[], Any]) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()


def _mib(taken: int | None) -> str:
    return "" if taken is None else f"{taken / 2**20:.0f}"


def main() -> None:
    """Measure all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 512, 2048])
    parser.add_argument("--passes", type=int, default=3, help="how often all variants are measured, in turn")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--memory", action="store_true", help="measure memory, each variant in its own process")
    parser.add_argument("--json")
    parser.add_argument("--here", help="measure the memory of this variant in this process")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if args.here:
        x = torch.randn(args.rows[0], WIDTH, device="cuda", dtype=torch.bfloat16)
        print(json.dumps(memory(VARIANTS[args.here], args.layers, x)))
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for rows in args.rows:
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        passes: dict[str, list[dict[str, float]]] = {}
        for name, build in [item for _ in range(args.passes) for item in VARIANTS.items()]:
            if args.only and name not in args.only:
                continue
            torch.compiler.reset()
            gc.collect()
            try:
                passes.setdefault(name, []).append(measure(build, args.layers, x))
            except ImportError as error:
                print(f"{name} left out: {error}")
        for name, seen in passes.items():
            walls = statistics.median(one["wall_us"] for one in seen)
            found.setdefault(name, {})[str(rows)] = {**seen[0], "wall_us": walls}
    taken = {name: memory_apart(name, args.layers, args.rows[0]) for name in found} if args.memory else {}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"layers": args.layers, "gpu": torch.cuda.get_device_name(), "results": found, "reserved_bytes": taken},
                file,
                indent=1,
            )
    print(f"\n{args.layers} layers, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    heads = " | ".join(f"T={rows} µs" for rows in args.rows)
    print(f"| variant | {heads} | first calls s | difference | reserved beyond the weights MiB |")
    print("|---" * (len(args.rows) + 4) + "|")
    for name, by_rows in found.items():
        columns = " | ".join(f"{by_rows[str(rows)]['wall_us']:.0f}" for rows in args.rows)
        one = by_rows[str(args.rows[0])]
        print(
            f"| {name} | {columns} | {one['first_calls_s']:.1f} | {one['difference']:.3g} | {_mib(taken.get(name))} |"
        )


if __name__ == "__main__":
    main()
