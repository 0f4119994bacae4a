"""One executable for all equal segments, updated before each launch (cudaGraphExecUpdate), against one for each.

    python bench/exec_update.py [--layers 61] [--json FILE]

A layer is a norm, two products of 1024 × 1024 and an activation, in bf16 over 256 rows, with weights of its own. Bytes
are the device's free memory before and after all executables are made. Needs a GPU and torch's own libcudart.
"""

import argparse
import ctypes
import json
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class UpdateResult(ctypes.Structure):
    """cudaGraphExecUpdateResultInfo."""

    _fields_ = (("result", ctypes.c_int), ("error_node", ctypes.c_void_p), ("error_from", ctypes.c_void_p))


def runtime() -> Any:
    """The CUDA runtime that torch has loaded."""
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart" in line)
    return ctypes.CDLL(path)


def median_us(fn: Any, calls: int = 30) -> tuple[float, float]:
    """Median time of a call between two synchronisations, and of the host's part of it."""
    times, host = [], []
    for _ in range(calls + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:]) * 1e6, statistics.median(host[3:]) * 1e6


@torch.inference_mode()
def main() -> None:
    """Measure both ways and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    layers = [
        nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda().bfloat16()
        for _ in range(args.layers)
    ]

    def forward(layer: nn.Sequential) -> None:
        h = F.rms_norm(x, (1024,))
        for product in layer:
            h = F.silu(product(h)) * h
        x.add_(h, alpha=0.01)

    for _ in range(2):
        forward(layers[0])
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for layer in layers:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool):
            forward(layer)
        graphs.append(graph)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    begin = time.perf_counter()
    for graph in graphs:
        graph.instantiate()
    making = time.perf_counter() - begin
    for graph in graphs:
        graph.replay()  # the first launch uploads
    torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info()[0]

    lib, stream = runtime(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    raw = [ctypes.c_void_p(graph.raw_cuda_graph()) for graph in graphs]
    executable, result = ctypes.c_void_p(graphs[0].raw_cuda_graph_exec()), UpdateResult()

    executables = [ctypes.c_void_p(graph.raw_cuda_graph_exec()) for graph in graphs]

    def updated() -> None:
        for graph in raw:
            code = lib.cudaGraphExecUpdate(executable, graph, ctypes.byref(result))
            assert code == 0, (code, result.result)
            assert lib.cudaGraphLaunch(executable, stream) == 0

    def each() -> None:
        for one in executables:
            assert lib.cudaGraphLaunch(one, stream) == 0

    one_each, one_each_host = median_us(each)
    one, one_host = median_us(updated)
    found = {
        "layers": args.layers,
        "gpu": torch.cuda.get_device_name(),
        "one_each_us": one_each,
        "one_each_host_us": one_each_host,
        "updated_us": one,
        "updated_host_us": one_host,
        "bytes_of_executables": taken,
        "instantiate_ms": making * 1e3,
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    print(", ".join(f"{key} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
