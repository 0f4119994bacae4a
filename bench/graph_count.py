"""The same graph of 200 small kernels, replayed as more and more graphs are captured in the process.

    python bench/graph_count.py [--graphs 8] [--json FILE]

Device time of one replay, the host far ahead: the median of 9. What changes is the gap between two kernels, in graphs
that were captured before, too. Needs a GPU.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

KERNELS = 200


def device_us(graph: torch.cuda.CUDAGraph) -> float:
    """Median time of a replay on the device, behind work that lets the host get ahead."""
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Capture graph after graph, and replay the first and the last each time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    graphs: list[torch.cuda.CUDAGraph] = []
    found = []
    print("| graphs captured | the first, µs | the last, µs |")
    print("|---|---|---|")
    torch.add(x, x, out=y)
    for count in range(1, args.graphs + 1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(KERNELS):
                torch.add(y, x, out=y)
        graphs.append(graph)
        found.append((count, device_us(graphs[0]), device_us(graphs[-1])))
        print("| {} | {:.0f} | {:.0f} |".format(*found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
