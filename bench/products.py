"""Products of one input: one behind the other, in one launch, and as one product of joined weights.

    python bench/products.py [--rows 16 64 256 1024] [--json FILE]

bf16, in a CUDA graph that goes through many sets of weights, so that they come from the device's memory; µs a group,
the median of 15 replays. Joined weights are the bound: cuBLAS then has one product, and the model a second copy of its
weights. What is launched together is decided as in compiled segments. Needs a GPU and Triton.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bcg_compiler.lower.linears import launches, linears

#: Depth and columns: projections of Llama-like attention and MLPs, and of a DeepSeek-V3.2-like layer.
GROUPS = [
    (1024, (1024, 256, 256)),
    (1024, (2048, 2048)),
    (1024, (512, 288, 64, 8)),
    (2048, (2048, 512, 512)),
    (2048, (5632, 5632)),
    (4096, (4096, 1024, 1024)),
    (4096, (14336, 14336)),
]

#: The L2 cache of an H200 has 50 MB.
BYTES = 200e6


def median_us(fn: Callable[[], None], groups: int) -> float:
    """Time of one group."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    times = []
    for _ in range(18):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / groups)
    return statistics.median(times[3:])


def measure(depth: int, columns: Sequence[int], rows: int) -> dict[str, Any]:
    """All three ways of one group."""
    count = max(4, int(BYTES / (2 * depth * sum(columns))))
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    sets = [
        [torch.randn(wide, depth, device="cuda", dtype=x.dtype) / depth**0.5 for wide in columns] for _ in range(count)
    ]
    joined = [torch.cat(weights) for weights in sets]

    def behind() -> None:
        for weights in sets:
            for weight in weights:
                x @ weight.t()

    def together() -> None:
        for weights in sets:
            linears(x, weights, [None] * len(weights))

    def as_one() -> None:
        for weight in joined:
            x @ weight.t()

    left = len(columns) + sum(1 - len(launch.products) for launch in launches(rows, columns, x.dtype, x.device))
    ways: dict[str, Callable[[], None]] = {"behind": behind, "together": together, "joined": as_one}
    found: dict[str, Any] = {f"{name}_us": median_us(way, count) for name, way in ways.items()}
    return {"depth": depth, "columns": list(columns), "rows": rows, "launches": left, **found}


@torch.inference_mode()
def main() -> None:
    """Measure all groups and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found = [measure(depth, columns, rows) for depth, columns in GROUPS for rows in args.rows]
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "groups": found}, file, indent=1)
    print("| depth | columns | rows | one behind the other µs | launched together µs | launches | joined weights µs |")
    print("|---|---|---|---|---|---|---|")
    for one in found:
        print(
            f"| {one['depth']} | {', '.join(map(str, one['columns']))} | {one['rows']} | {one['behind_us']:.1f} "
            f"| {one['together_us']:.1f} | {one['launches']} | {one['joined_us']:.1f} |"
        )


if __name__ == "__main__":
    main()
