"""Host time of a replay: per segment and empty break, from the slope over the number of breaks; and by its parts.

    python bench/overhead.py [--json FILE]

A tiny chain (rows of 16, one element-wise pair of kernels a segment) with 0 … 96 breaks whose body does nothing; and a
chain of 32 linear layers with a ladder, whose call is taken apart. Host time is the time until the call returns,
without waiting for the device: the median of 200 calls. Needs a GPU.
"""

import argparse
import json
import time
from typing import Any

import torch
from timing import host_us
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.runtime.program import Program


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
    options: dict[str, Any] = {"min_segment_kernels": 1, "segment_compiler": "eager"}
    compiled = torch.compile(chain(breaks), backend="bcg", fullgraph=True, options=options)
    for _ in range(3):
        compiled(x)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    host = host_us(lambda: compiled(x))
    stats = bcg.stats(compiled)
    assert stats.replays >= 200 and stats.segments == breaks + 1, stats
    return {"host_us": host, "first_calls_s": first}


@torch.inference_mode()
def parts() -> dict[str, float]:
    """Host µs of one padded call of 32 layers (64 parameters), and of what it is made of: each line holds the next."""
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(32))).cuda()
    x = torch.randn(250, 64, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    options: dict[str, Any] = {"ladder": [256], "segment_compiler": "eager"}
    found = {}
    for name, guards in (
        ("with all of Dynamo's guards", None),
        ("without those on modules", torch.compiler.skip_guard_on_all_nn_modules_unsafe),
        ("without any", torch.compiler.skip_all_guards_unsafe),
    ):
        given: dict[str, Any] = {"guard_filter_fn": guards} if guards else {}
        compiled = torch.compile(model, backend="bcg", fullgraph=True, options={**options, **given})
        for _ in range(3):
            compiled(x)
        found[name] = host_us(lambda run=compiled: run(x))  # type: ignore[misc]
        torch.compiler.reset()
    ahead = bcg.aot_compile(model, (x,), options=options)
    for _ in range(3):
        ahead(x)
    found["aot_compile"] = host_us(lambda: ahead(x))
    program, flat = ahead.program, seen_by(ahead, x)
    found["the program: address check, admission, replay"] = host_us(lambda: program(*flat))
    found["the address check"] = host_us(lambda: program._places.of(flat))
    (capture,) = program._places.captures()
    found["the replay: slots filled, one launch, results cut and copied"] = host_us(lambda: capture.run(*flat))
    return found


def seen_by(ahead: Any, x: Tensor) -> tuple[Any, ...]:
    """The flat arguments that a call gives to the program."""
    seen: list[tuple[Any, ...]] = []
    program = ahead.program

    class Spy:
        def __call__(self, *args: Any) -> Any:
            seen.append(args)
            return program(*args)

    ahead.program = Spy()
    ahead(x)
    ahead.program = program
    assert isinstance(program, Program)
    return seen[0]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found = {breaks: measure(breaks) for breaks in (0, 1, 8, 32, 96)}
    taken = parts()
    slope = (found[96]["host_us"] - found[8]["host_us"]) / 88
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"results": found, "us_per_segment_and_break": slope, "parts": taken}, file, indent=1)
    print("| breaks | host µs a call | first calls s |")
    print("|---|---|---|")
    for breaks, row in found.items():
        print(f"| {breaks} | {row['host_us']:.1f} | {row['first_calls_s']:.2f} |")
    print(f"per segment and empty break: {slope:.2f} µs\n")
    print("| one call | host µs |\n|---|---|")
    for name, host in taken.items():
        print(f"| {name} | {host:.1f} |")


if __name__ == "__main__":
    main()
