"""Whole models of transformers: seconds until the third call has returned, and wall time of a call, beside torch's own.

    python bench/models.py [--model llama deepseek_v32] [--layers 12 24] [--tokens 256] [--only VARIANT …] [--json FILE]
    python bench/models.py --together llama:12:VARIANT llama:61:VARIANT … [--json FILE]

bf16, random weights, batch 1, no cache; fresh token ids. First calls are counted from before the first one, Dynamo
included, with Inductor's caches off; ``--warm`` leaves them on and runs each variant twice, the second time from the
caches of the first. Each variant has a process of its own. ``--together`` makes the first calls of all that it names at
the same time, for which a machine needs some cores for each, and then times calls, one process after the other.
Needs a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

#: What a process says when its first calls are over.
READY = "ready"

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "Dynamo alone": {"backend": "eager"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "bcg, eager": {"backend": "bcg", "options": {"segment_compiler": "eager"}},
    "bcg, Inductor": {"backend": "bcg", "options": {"segment_compiler": "inductor"}},
    "bcg, Inductor, ahead of time": {"backend": "bcg", "options": {"segment_compiler": "inductor"}, "aot": True},
}
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "deepseek_v32": {
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 256,
    },
}


def build(model: str, layers: int) -> torch.nn.Module:
    """The model on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model, num_hidden_layers=layers, **SIZES, **MODELS[model])
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.eval().requires_grad_(False)


@torch.inference_mode()
def measure(model: str, layers: int, tokens: int, variant: str, wait: bool = False) -> dict[str, Any]:
    """One variant in this process. ``wait``: say when the first calls are over, and wait for a line then."""
    import bcg_compiler as bcg

    made, how = build(model, layers), dict(VARIANTS[variant])

    def given() -> dict[str, Any]:
        ids = torch.randint(0, SIZES["vocab_size"], (1, tokens), device="cuda")
        return {"input_ids": ids, "use_cache": False}

    torch.cuda.synchronize()
    begin = time.perf_counter()
    if how.pop("aot", False):
        run: Any = bcg.aot_compile(made, kwargs=given(), options=how["options"])
    else:
        run = torch.compile(made, **how) if how else made

    def call() -> torch.Tensor:
        found: torch.Tensor = run(**given()).logits
        return found

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    if wait:
        print(READY, flush=True)
        sys.stdin.readline()
    for _ in range(5):
        call()
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found: dict[str, Any] = {"first_calls_s": first, "wall_us": 1e6 * statistics.median(times)}
    if how.get("backend") == "bcg":
        stats = bcg.stats(run)
        found |= {
            "segments": stats.segments,
            "breaks": stats.breaks,
            "unique_units": stats.unique_units,
            "eager_units": stats.eager_units,
            "replays": stats.replays,
        }
    return found


def start(model: str, layers: int, tokens: int, variant: str, cache: str, *more: str) -> subprocess.Popen[str]:
    """One variant in a process of its own, with Inductor's caches in a folder; off if that is ""."""
    command = [sys.executable, __file__, "--model", model, "--layers", str(layers), "--tokens", str(tokens)]
    caches = {"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    return subprocess.Popen(
        [*command, "--here", variant, *more],
        env={**os.environ, **caches},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process of ``start`` has measured."""
    said = process.communicate("\n")[0]
    if process.returncode:
        return {"failed": process.returncode}
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def together(names: list[str], tokens: int) -> Iterator[dict[str, Any]]:
    """First calls at the same time, the other ones one process after the other."""
    which = [(model, int(layers), variant) for model, layers, variant in (name.split(":") for name in names)]
    processes = [start(model, layers, tokens, variant, "", "--wait") for model, layers, variant in which]
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line.strip() != READY:
            pass
    for (model, layers, variant), process in zip(which, processes, strict=True):
        yield {"model": model, "layers": layers, "variant": variant, "caches": "", **finish(process)}


def apart(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All combinations, one after the other."""
    for model, layers, variant in product(args.model, args.layers, args.only):
        with tempfile.TemporaryDirectory() as cache:
            for run in ("cold", "warm") if args.warm else ("",):
                figures = finish(start(model, layers, args.tokens, variant, cache if args.warm else ""))
                yield {"model": model, "layers": layers, "variant": variant, "caches": run, **figures}


def main() -> None:
    """Measure all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--together", nargs="+", metavar="MODEL:LAYERS:VARIANT")
    parser.add_argument("--json")
    parser.add_argument("--here", help="measure this variant in this process")
    parser.add_argument("--wait", action="store_true", help="wait for a line on standard input after the first calls")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if args.here:
        print(json.dumps(measure(args.model[0], args.layers[0], args.tokens, args.here, args.wait)))
        return
    found = []
    for one in together(args.together, args.tokens) if args.together else apart(args):
        found.append(one)
        print(", ".join(f"{key} {value}" for key, value in one.items()), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "tokens": args.tokens, "results": found}, file, indent=1)


if __name__ == "__main__":
    main()
