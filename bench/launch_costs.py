"""What launches cost on this machine, and which small segments are worth a graph by it.

    python bench/launch_costs.py [--json FILE]

Measures the fields of ``bcg_compiler.plan.costs.LaunchCosts``. Host costs are slopes over the number of launches, of
the time until a call returns, without waiting for the device; the device's cost of an edge is the slope of its own time
over graphs and kernels in turns, less that of the same kernels in one graph. Medians of 200 calls. Beside each field
stands the default, with which plans are made on every machine; a threshold of your own is
``options={"min_segment_kernels": N}``.

Without a CUDA device there is no graph to launch: only the ratio of the eager operations is printed.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timing import host_us
from torch import Tensor

from bcg_compiler.plan.costs import Island, LaunchCosts

FEW, MANY = 8, 72
OPTIONS: dict[str, Any] = {"min_segment_kernels": 1, "segment_compiler": "eager"}


def slope(make: Callable[[int], Callable[[], object]], measure: Callable[[Callable[[], object]], float]) -> float:
    """What one more of ``make``'s things costs."""
    return (measure(make(MANY)) - measure(make(FEW))) / (MANY - FEW)


def repeated(statement: str, **names: Any) -> Callable[[int], Callable[[], object]]:
    """What makes functions that run a statement so many times in a row, without a loop; ``y`` begins as ``x``."""

    def make(count: int) -> Callable[[], object]:
        namespace = dict(names)
        exec("\n    ".join(["def run():", "y = x", *[statement] * count]), namespace)
        run: Callable[[], object] = namespace["run"]
        return run

    return make


def eager_costs(x: Tensor, host: Callable[[Callable[[], object]], float]) -> tuple[float, float]:
    """One eager operation of one kernel, and one copy into memory that is there."""
    op = slope(repeated("y = y * 1.01", x=x), host)
    return op, slope(repeated("out.copy_(y)", x=x, out=torch.empty_like(x)), host)


def cuda_costs() -> LaunchCosts:
    """All fields, on the current CUDA device."""
    x = torch.randn(16, 16, device="cuda")
    graph = captured(lambda: x.sin())

    def host(run: Callable[[], object]) -> float:
        return host_us(run)

    graph_us = slope(repeated("replay()", x=x, replay=graph.replay), host)
    op_us, bridge_us = eager_costs(x, host)
    return LaunchCosts(
        graph_us=graph_us,
        edge_us=edge_us(),
        op_us=op_us,
        bridge_us=bridge_us,
        break_us=max(0.0, segment_and_break_us(host) - graph_us),
    )


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``run`` as a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph


def edge_us() -> float:
    """The device's time from a graph to the kernel behind it: what it is slower in turns than the two apart.

    Kernels are long enough that the host is always ahead.
    """
    x = torch.randn(4096, 4096, device="cuda")
    out = torch.empty_like(x)
    graph = captured(lambda: torch.mul(x, 1.01, out=out))

    def device_us(run: Callable[[], object]) -> float:
        times = []
        for _ in range(60):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[10:])

    def in_turns(count: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(count):
                graph.replay()
                torch.mul(x, 1.01, out=out)

        return run

    def in_one_graph(count: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(2 * count):
                torch.mul(x, 1.01, out=out)

        return captured(run).replay

    return max(0.0, slope(in_turns, device_us) - slope(in_one_graph, device_us)) / 2


def segment_and_break_us(host: Callable[[Callable[[], object]], float]) -> float:
    """One more segment of two kernels with an empty break, in a program of ours."""
    import bcg_compiler as bcg

    @bcg.eager_break(mutates_args=("out",))
    def nothing(x: Tensor, out: Tensor) -> None:
        """An empty break."""

    x = torch.randn(16, 16, device="cuda")

    def make(count: int) -> Callable[[], object]:
        def run(x: Tensor) -> Tensor:
            for _ in range(count):
                x = (x * 1.01).sin()
                nothing(x, x)
            return (x * 1.01).sin()

        torch.compiler.reset()
        compiled = torch.compile(run, backend="bcg", fullgraph=True, options=OPTIONS)
        for _ in range(3):
            compiled(x)
        return lambda: compiled(x)

    return slope(make, host)


def least_kernels(costs: LaunchCosts, edges: int, taken: int) -> int:
    """The fewest kernels that are worth a graph between breaks with so many copies for it."""
    return next(k for k in range(1, 10_000) if costs.worth_a_graph(Island(frozenset(), k, edges, taken)))


@torch.inference_mode()
def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    defaults = LaunchCosts()
    if not torch.cuda.is_available():
        op, copy = eager_costs(torch.randn(16, 16), lambda run: host_us(run, lambda: None))
        print("No CUDA device: graphs cannot be launched, and the times of a CPU are its own. As a ratio only:")
        print(
            f"a copy costs {copy / op:.2f} of an eager operation, by default {defaults.bridge_us / defaults.op_us:.2f}."
        )
        return
    found = cuda_costs()
    print("| cost | µs here | default |")
    print("|---|---|---|")
    for name, value in asdict(found).items():
        print(f"| {name} | {value:.2f} | {getattr(defaults, name):.2f} |")
    print()
    print("| breaks beside it | copies | fewest kernels, here | by default |")
    print("|---|---|---|---|")
    for edges in (1, 2):
        for taken in (0, 1, 2):
            here, default = (least_kernels(costs, edges, taken) for costs in (found, defaults))
            print(f"| {edges} | {taken} | {here} | {default} |")
    if args.json:
        described = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(args.json).write_text(json.dumps({**described, "costs": asdict(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
