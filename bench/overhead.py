"""Host time of a replay: per segment and empty break, from the slope over the number of breaks; and of a capture.

    python bench/overhead.py [--json FILE]

A tiny chain (rows of 16, one element-wise pair of kernels a segment) with 0 … 96 breaks whose body does nothing. Host
time is the time until the call returns, without waiting for the device: the median of 200 calls. Needs a GPU.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import bcg_compiler as bcg


@bcg.eager_break(mutates_args=("out",))
def nothing(x: Tensor, out: Tensor) -> None:
    """An empty break."""


def chain(breaks: int) -> Any:
    """A function with so many empty breaks between segments of two kernels."""

    def run(x: Tensor) -> Tensor:
        for _ in range(breaks):
            x = (x * 1.01).sin()
            nothing(x, x)
        return (x * 1.01).sin()

    return run


@torch.inference_mode()
def measure(breaks: int) -> dict[str, float]:
    """Median host time of one call in µs; the time until the third call returned in s."""
    torch.compiler.reset()
    x = torch.randn(16, 16, device="cuda")
    started = time.perf_counter()
    compiled = torch.compile(chain(breaks), backend="bcg", fullgraph=True)
    for _ in range(3):
        compiled(x)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    times = []
    for _ in range(220):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        compiled(x)
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    stats = bcg.stats(compiled)
    assert stats.replays >= 200 and stats.segments == breaks + 1, stats
    return {"host_us": statistics.median(times[20:]) * 1e6, "first_calls_s": first}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {breaks: measure(breaks) for breaks in (0, 1, 8, 32, 96)}
    slope = (found[96]["host_us"] - found[8]["host_us"]) / 88
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"results": found, "us_per_segment_and_break": slope}, file, indent=1)
    print("| breaks | host µs a call | first calls s |")
    print("|---|---|---|")
    for breaks, row in found.items():
        print(f"| {breaks} | {row['host_us']:.1f} | {row['first_calls_s']:.2f} |")
    print(f"per segment and empty break: {slope:.2f} µs")


if __name__ == "__main__":
    main()
