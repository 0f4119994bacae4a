"""What transformers architectures are compiled to: graphs, segments, breaks; a Markdown table for docs/models.md.

python bench/architectures.py [--device cpu] [NAME ...]
"""

import argparse
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg
from bcg_compiler.models import zoo

LENGTHS = (24, 40, 24, 7)
DEFAULT = (
    *((name, "float32", "") for name in zoo.names()),
    *((name, "bfloat16", "") for name in ("llama", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "qwen3_next")),
    ("deepseek_v3", "float32", "eager"),
)


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, in order."""
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@torch.inference_mode()
def row(name: str, dtype: str, experts: str, device: str) -> str:
    """Compile one model, run all lengths, and describe what came of it."""
    torch.compiler.reset()
    config = {"experts_implementation": experts} if experts else {}
    model = zoo.build(name, device=device, dtype=getattr(torch, dtype), config=config)
    compiled = torch.compile(model.model, backend="bcg", options={"segment_compiler": "eager"})
    generator = torch.Generator().manual_seed(1)
    equal = True
    for length in LENGTHS:
        inputs = model.make_inputs(length, generator)
        pairs = zip(tensors(model.model(**inputs)), tensors(compiled(**inputs)), strict=True)
        equal &= all(torch.equal(want, got) for want, got in pairs)
    stats = bcg.stats(compiled)
    reasons = ", ".join(f"{code} {count}" for code, count in sorted(stats.reasons.items())) or "none"
    label = name + (f", {experts} experts" if experts else "")
    return (
        f"| {label} | {dtype} | {stats.graphs} | {stats.segments} | {stats.unique_units} | {stats.breaks} "
        f"| {reasons} | {'yes' if equal else '**no**'} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| model | dtype | graphs | segments | different | breaks | operations outside of segments | eager's bits |")
    print("|---|---|---|---|---|---|---|---|")
    for name, dtype, experts in DEFAULT:
        if not args.names or name in args.names:
            print(row(name, dtype, experts, args.device), flush=True)


if __name__ == "__main__":
    main()
