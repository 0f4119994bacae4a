"""First calls of a fresh process with Inductor's caches empty, and of the next one, which finds them filled.

    python bench/warm_start.py [--model llama] [--layers 12] [--device cpu] [--tokens 64] [--aot] [--json FILE]

Seconds from the built model on until the third call returned, Dynamo included, on a small configuration of the zoo;
imports and the model's weights are not counted. ``compiled`` is how many graphs Inductor generated code for: 0 in the
warm process. Each run has a process of its own, and both share one cache folder of their own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


@torch.inference_mode()
def measure(model: str, layers: int, tokens: int, device: str, aot: bool) -> dict[str, Any]:
    """The first three calls in this process."""
    from torch._dynamo.utils import counters

    import bcg_compiler as bcg
    from bcg_compiler.models import zoo

    made = zoo.build(model, layers=layers, device=device)
    generator = torch.Generator().manual_seed(0)
    calls = [made.make_inputs(tokens, generator) for _ in range(3)]
    options: dict[str, Any] = {"segment_compiler": "inductor", "capture": "auto"}
    began = time.perf_counter()
    if aot:
        run: Any = bcg.aot_compile(made.model, kwargs=calls[0], options=options)
    else:
        run = torch.compile(made.model, backend="bcg", options=options)
    for inputs in calls:
        run(**inputs)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    stats = bcg.stats(run)
    assert stats.replays, stats
    return {
        "seconds": seconds,
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "from_cache": counters["inductor"]["fxgraph_cache_hit"],
        "units": stats.unique_units,
        "eager_units": stats.eager_units,
    }


def run_apart(arguments: list[str], cache: str) -> dict[str, Any]:
    """The same in a process of its own, with Inductor's and Triton's caches in a folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--here"], env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run both processes so many times and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--aot", action="store_true", help="bcg.aot_compile in place of torch.compile")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.model, args.layers, args.tokens, args.device, args.aot)))
        return
    arguments = [f"--model={args.model}", f"--layers={args.layers}", f"--tokens={args.tokens}"]
    arguments += [f"--device={args.device}", *["--aot"] * args.aot]
    found = []
    print("| run | seconds | compiled | from cache | units |")
    print("|---|---|---|---|---|")
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as cache:
            pair = {run: run_apart(arguments, cache) for run in ("cold", "warm")}
        for run, row in pair.items():
            print(f"| {run} | {row['seconds']:.2f} | {row['compiled']} | {row['from_cache']} | {row['units']} |")
        found.append({**pair, "ratio": pair["warm"]["seconds"] / pair["cold"]["seconds"]})
        print(f"warm / cold: {found[-1]['ratio']:.3f}", flush=True)
    if args.repeat > 1:
        print(f"median: {statistics.median(pair['ratio'] for pair in found):.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
