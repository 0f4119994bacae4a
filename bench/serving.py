"""A GLM-5-like prefill as it is served: eager, compiled, and with or without each pass; wall time beside kernel time.

    python bench/serving.py [--layers 12] [--hidden 2048] [--tokens 256 2048] [--only VARIANT …] [--json FILE]

bf16, random weights and tokens, one batch of four requests of equal length, one of them behind a prefix. Wall time is
the median of 40 calls, each between two synchronisations; busy is the time that kernels and copies take, over the
same batch, by torch's profiler. Needs a GPU; ``--device cpu`` runs it small to see that it runs.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

# Inductor's compile processes go on starting while calls are timed: none of them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from torch.profiler import ProfilerActivity, profile

import bcg_compiler as bcg
from bcg_compiler.models import serving
from bcg_compiler.models.layers import kernels

VARIANTS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "bcg": {},
    "bcg, ahead of time": {"ahead": True},
    "bcg, eager segments": {"segment_compiler": "eager"},
    "bcg, matmul of MLA not fused": {"disable_passes": ["fuse_mla_bmm"]},
    "bcg, weights of the indexer in its break": {"mark": ["logits_gate"]},
    "bcg, plans not hoisted": {"disable_passes": ["hoist_plans"]},
}


def fields(layers: int, hidden: int) -> dict[str, Any]:
    """The configuration: GLM-5's structure, narrow."""
    return {
        "model_type": "deepseek_v32",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_topk": 512,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 1,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
    }


class Prefill:
    """One batch, prefilled again and again."""

    def __init__(self, layers: int, hidden: int, tokens: int, device: str) -> None:
        torch.manual_seed(0)
        pages = 4 * -(-(2 * tokens) // 64)
        self.model = serving.build(
            fields(layers, hidden),
            pages=pages,
            page_size=64,
            dtype=torch.bfloat16,
            device=device,
            fp8_index=device == "cuda",
        )
        self.model.eval().requires_grad_(False)
        pool = serving.page_pool(self.model)
        self.ids = torch.randint(0, 32000, (tokens,), device=device)
        self.run: Any = self.model
        prefix = pool.prefill({"a": tokens // 4})
        with torch.inference_mode(), prefix.published():
            self.model(self.ids[: tokens // 4], prefix.positions)
        self.batch = pool.prefill({name: tokens // 4 for name in ("a", "b", "c", "d")})

    def __call__(self) -> torch.Tensor:
        with self.batch.published():
            found: torch.Tensor = self.run(self.ids, self.batch.positions)
        return found


@torch.inference_mode()
def measure(one: Prefill, options: dict[str, Any] | None, reference: torch.Tensor | None) -> dict[str, Any]:
    """Wall and busy time of one variant in µs, and its largest difference from eager."""
    torch.compiler.reset()
    given = dict(options or {})
    if given.pop("ahead", False):
        with one.batch.published():
            one.run = bcg.aot_compile(one.model, (one.ids, one.batch.positions), options=given)
    else:
        one.run = (
            one.model if options is None else torch.compile(one.model, backend="bcg", fullgraph=True, options=given)
        )
    wait = torch.cuda.synchronize if one.ids.is_cuda else lambda: None
    for _ in range(4):
        result = one()
    wait()
    times = []
    for _ in range(40):
        begin = time.perf_counter()
        one()
        wait()
        times.append(time.perf_counter() - begin)
    busy = 0.0
    if one.ids.is_cuda:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            one()
            wait()
        on_device = (e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        busy = sum(event.device_time_total for event in on_device)
    found: dict[str, Any] = {"wall_us": statistics.median(times) * 1e6, "busy_us": busy}
    if reference is not None:
        found["difference"] = (result.float() - reference.float()).abs().max().item()
    if options is not None:
        stats = bcg.stats(one.run)
        found |= {"segments": stats.segments, "breaks": stats.breaks, "replays": stats.replays}
    return found


def main() -> None:
    """Measure all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    args = parser.parse_args()
    found = []
    for tokens in args.tokens:
        one = Prefill(args.layers, args.hidden, tokens, args.device)
        one.run = one.model
        with torch.inference_mode():
            reference = one().clone()
        for name in args.only:
            found.append({"tokens": tokens, "variant": name, **measure(one, VARIANTS[name], reference)})
            print(", ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
    print(kernels.in_use(args.device))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"layers": args.layers, "hidden": args.hidden, "results": found}, file, indent=1)


if __name__ == "__main__":
    main()
