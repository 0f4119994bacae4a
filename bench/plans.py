"""What a prefill of the published models is compiled to, without weights: segments, breaks, steps of a layer.

python bench/plans.py [FAMILY ...]

Prints a Markdown table for docs/models.md. Needs neither a GPU nor a checkpoint.
"""

import argparse
import time
import warnings
from typing import Any

from bcg_compiler.debug.explain import plan_model
from bcg_compiler.debug.screen import fold, step_key
from bcg_compiler.plan import Plan

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm5", "gpt_oss")

#: How a prefill is compiled, by the label in the table.
VARIANTS: dict[str, dict[str, Any]] = {
    "512 tokens": {},
    "any number of tokens, padded": {"ladder": [512, 1024, 2048]},
    "512 tokens, without fusion": {"disable_passes": ["fuse_mla_bmm"]},
}


def row(family: str, label: str) -> str:
    """Plan one model and describe the plan."""
    began = time.process_time()
    found = plan_model(f"bcg_compiler.models.full_size:{family}", length=512, options=VARIANTS[label])
    seconds = time.process_time() - began
    (plan,) = found.plans
    assert plan is not None and not found.note, found.note
    return described(family, label, plan, seconds)


def described(family: str, label: str, plan: Plan, seconds: float) -> str:
    """The row of one plan, which took so many seconds of one core."""
    # The layers that are alike are the longest stretch that repeats.
    layer = max(fold([step_key(step) for step in plan.steps]), key=lambda block: block.period * block.repeats)
    reasons = ", ".join(f"{code} {count}" for code, count in sorted(plan.reasons().items()))
    kernels = sum(step.kernels for step in plan.segments), sum(step.kernels for step in plan.steps)
    return (
        f"| {family} | {label} | {len(plan.segments)} | {plan.unique_units} | {len(plan.breaks)} | {layer.period} "
        f"| {kernels[0]} of {kernels[1]} | {reasons} | {seconds:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=FAMILIES)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(
        "| model | prefill | segments | different | breaks | steps a layer | kernels in segments | outside | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for family in args.families:
        for label in VARIANTS:
            print(row(family, label), flush=True)


if __name__ == "__main__":
    main()
