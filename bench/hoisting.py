"""What a plan in each layer costs, and what is left of it once it is hoisted: FlashInfer, paged prefill.

    python bench/hoisting.py [--layers 24] [--tokens 900] [--json FILE]

Layers of a projection, grouped-query attention (16 heads, 4 key heads, 128 wide, pages of 16) and a projection back, in
bf16, padded to one bucket of 1024 tokens; three requests, one of them with a prefix. A plan waits until the one before
it was copied to the device, as the library has one buffer for both. Host time is the time until the call returns, wall
until the device is done: the median of 100 calls. Needs a GPU and FlashInfer.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.models.layers import attention, flashinfer
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.flashinfer import PagedShape
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.models.layers.planned import PlannedAttention, planned_attention

HEADS, KEY_HEADS, WIDTH, PAGES, PAGE = 16, 4, 128, 512, 16
SCALE = WIDTH**-0.5
BUCKET = 1024


class Layer(nn.Module):
    """A projection, attention, and a projection back."""

    def __init__(self, planned: PlannedAttention | None) -> None:
        super().__init__()
        self.planned = planned
        self.into = nn.Linear(HEADS * WIDTH, (HEADS + 2 * KEY_HEADS) * WIDTH, bias=False)
        self.back = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        for name in ("key_cache", "value_cache"):
            self.register_buffer(name, torch.zeros(PAGES, PAGE, KEY_HEADS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (-1, WIDTH)).split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        out = torch.empty(x.shape[0], HEADS, WIDTH, dtype=x.dtype, device=x.device)
        if self.planned is not None:
            self.planned.attend(q, k, v, self.key_cache, self.value_cache, out)
        else:
            attention.paged_attention(q, k, v, self.key_cache, self.value_cache, out, SCALE)
        return x + self.back(out.flatten(1))


def model(layers: int, *, shared_plan: bool) -> nn.Module:
    """Equal weights whatever the plan."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    planned = None
    if shared_plan:
        shape = PagedShape(HEADS, KEY_HEADS, WIDTH, SCALE, 0, PAGE, PAGES, torch.bfloat16, device)
        planned = planned_attention(shape)
    made = nn.Sequential(*(Layer(planned) for _ in range(layers)))
    return made.to(device, torch.bfloat16).eval().requires_grad_(False)


def batch_of(tokens: int) -> PrefillBatch:
    """Three requests with so many new tokens; the first has a prefix of 40."""
    pool = PagePool(PAGES, PAGE, "cuda")
    pool.prefill({0: 40})
    return pool.prefill({0: tokens // 2, 1: tokens // 3, 2: tokens - tokens // 2 - tokens // 3})


def measure(call: Any, calls: int = 100) -> dict[str, float]:
    """Median host and wall time of a call in µs, the device idle before each."""
    host, wall = [], []
    for _ in range(calls + 10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - begin)
    return {"host_us": statistics.median(host[10:]) * 1e6, "wall_us": statistics.median(wall[10:]) * 1e6}


#: name → (one plan for all layers, options)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plan and run in each layer, a break each": (False, {}),
    "one plan, a break for each run": (True, {"disable_passes": ["hoist_plans"]}),
    "one plan, runs captured": (True, {}),
}


@torch.inference_mode()
def main() -> None:
    """Measure all variants, and print them beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if why := flashinfer.unavailable(torch.device("cuda")):
        parser.error(f"FlashInfer: {why}")
    batch = batch_of(asked.tokens)
    x = torch.randn(asked.tokens, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    results, found = {}, {}
    for name, (shared_plan, options) in VARIANTS.items():
        torch.compiler.reset()
        options = {"ladder": [BUCKET], "limits": bcg.Limits(max_requests=8), "segment_compiler": "eager", **options}
        compiled: Any = torch.compile(model(asked.layers, shared_plan=shared_plan), backend="bcg", options=options)
        with batch.published():
            for _ in range(3):
                results[name] = compiled(x).clone()
            found[name] = measure(lambda compiled=compiled: compiled(x))
        stats = bcg.stats(compiled)
        assert stats.replays >= 100, stats
        found[name] |= {"segments": stats.segments, "breaks": stats.breaks}
        print(f"{name:42} {stats.breaks:3} breaks  host {found[name]['host_us']:7.0f} µs", end="")
        print(f"  wall {found[name]['wall_us']:7.0f} µs")
    first, *others = results.values()
    for other in others:
        assert (first - other).abs().max() <= 2e-2 * first.abs().max(), "the variants differ"
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"layers": asked.layers, "tokens": asked.tokens, "variants": found}, file, indent=1)


if __name__ == "__main__":
    main()
