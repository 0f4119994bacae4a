"""How the benchmarks take time."""

import statistics
import time
from collections.abc import Callable

import torch


def host_us(run: Callable[[], object], wait: Callable[[], None] = torch.cuda.synchronize) -> float:
    """Median of 200 calls in µs until the call returns, after 20; ``wait`` makes the device idle before each."""
    times = []
    for _ in range(220):
        wait()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    wait()
    return statistics.median(times[20:]) * 1e6
