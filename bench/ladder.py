"""A ladder on a GPU: memory of all buckets against the largest alone, against the forecast, time of capture, results.

    python bench/ladder.py [--layers 24] [--ceiling 2048] [--json FILE]

A layer: a llama-like block in bf16 whose attention over live lengths is a break that writes into a buffer of the graph.
Each memory figure comes from a process of its own; reserved bytes are those of the allocator after the captures less
those before the first. The weights are random, the prompts fresh. Needs a GPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg
from bcg_compiler import Ladder

WIDTH, HEADS, INNER, WORDS = 2048, 16, 5632, 32000


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Causal attention over the live rows of one prompt; all [T, heads, head width]."""
    rows = bcg.current_context().live_rows
    q, k, v = (t[:rows].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out[:rows] = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


class Layer(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x [T, width]
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,), self.norm)).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        out = torch.empty_like(q)
        attention(q, k, v, out)
        x = x + self.o(out.view(-1, WIDTH))
        gate, up = self.gate_up(F.rms_norm(x, (WIDTH,), self.norm2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Embedding and blocks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:  # ids [T]
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def build(layers: int) -> nn.Module:
    """The model on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Model(layers).bfloat16().eval().requires_grad_(False)


def prompt(rows: int) -> Tensor:
    """Fresh random token ids, with the number of rows open to Dynamo."""
    ids = torch.randint(0, WORDS, (rows,), device="cuda")
    torch._dynamo.mark_dynamic(ids, 0)
    return ids


@torch.inference_mode()
def measure(layers: int, buckets: list[int]) -> dict[str, Any]:
    """Capture all buckets; what that took, and whether results are those of eager code."""
    model = build(layers)
    options: dict[str, Any] = {"ladder": buckets, "max_padding_factor": 4096, "segment_compiler": "eager"}
    compiled = torch.compile(model, backend="bcg", options=options)
    _eager(model, prompt(buckets[-1]))  # the libraries take their memory
    _settle()
    before = torch.cuda.memory_reserved()
    compiled(prompt(min(333, buckets[-1])))
    program = next(p for p in bcg.programs_of(compiled) if p.plan is not None and p.plan.padding is not None)
    report = bcg.capture(compiled, progress=False)
    seconds = report.seconds
    _settle()
    segments = len(program.plan.segments)
    found = {
        "buckets": len(buckets),
        "segments": segments,
        "reserved_bytes": torch.cuda.memory_reserved() - before,
        "measured_bytes": report.measured_bytes,
        "forecast_bytes": report.forecast_bytes,
        "capture_s": seconds,
        "ms_per_segment_and_bucket": 1e3 * seconds / segments / len(buckets),
        "dropped": len(report.dropped),
        "slowest": max((rung.seconds, rung.rows) for rung in report.rungs),
    }
    if len(buckets) > 1:
        found |= _check(model, compiled, buckets)
    return found


def _settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _eager(model: nn.Module, ids: Tensor) -> Tensor:
    with bcg.forward_context(live_rows=ids.shape[0]):
        found: Tensor = model(ids)
    return found


def _check(model: nn.Module, compiled: Any, buckets: list[int]) -> dict[str, Any]:
    """256, 128, 256 bit for bit with churn between; lengths between buckets; wall of a replay and of eager code."""
    exact = []
    for rows in (256, 128, 256):
        ids = prompt(rows)
        exact.append(torch.equal(compiled(ids), _eager(model, ids)))
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        del junk
    worst = 0.0
    for rows in (5, 100, 250, 777, buckets[-1] - 3):
        ids = prompt(rows)
        got, want = compiled(ids).float(), _eager(model, ids).float()
        worst = max(worst, ((got - want).norm() / want.norm()).item())
    times = {}
    for rows in (256, 250, 2048):
        ids = prompt(rows)
        times[rows] = [_median(lambda ids=ids: compiled(ids)), _median(lambda ids=ids: _eager(model, ids))]
    return {
        "exact": exact,
        "worst_relative": worst,
        "us_bcg_and_eager": times,
        "eager_runs": bcg.stats(compiled).eager_runs,
    }


def _median(run: Any, calls: int = 20) -> float:
    for _ in range(5):
        run()
    found = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found)


def main() -> None:
    """Measure the ladder and its largest bucket in a process each, and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ceiling", type=int, default=2048)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=("ladder", "largest"), help="measure in this process")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if asked.only:
        buckets = list(Ladder.default(asked.ceiling)) if asked.only == "ladder" else [asked.ceiling]
        print(json.dumps(measure(asked.layers, buckets)))
        return
    found = {}
    for which in ("largest", "ladder"):
        command = [sys.executable, __file__, "--layers", str(asked.layers), "--ceiling", str(asked.ceiling)]
        command += ["--only", which]
        found[which] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    ladder, largest = found["ladder"], found["largest"]
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    print(
        f"reserved: {ladder['reserved_bytes'] / largest['reserved_bytes']:.3f} x the largest bucket alone\n"
        f"forecast: {ladder['forecast_bytes'] / ladder['measured_bytes']:.3f} x measured "
        f"(largest alone {largest['forecast_bytes'] / largest['measured_bytes']:.3f})\n"
        f"capture: {ladder['ms_per_segment_and_bucket']:.3f} ms a segment and bucket"
    )
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
