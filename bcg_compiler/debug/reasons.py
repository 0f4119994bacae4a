"""What the reason codes mean, in words, and what would remove each break or eager run."""

from collections.abc import Iterable
from typing import NamedTuple

from bcg_compiler.plan import StepReason


class Meaning(NamedTuple):
    """``why`` something runs eagerly, and the ``remedy``."""

    why: str
    remedy: str


#: Why an operation is outside of segments.
BREAKS = {
    "eager_break": Meaning(
        "declared a break",
        "Nothing needs to be done: this is a break because the code says so (@eager_break or call_with_break).",
    ),
    "user_rule": Meaning(
        "named by a rule of yours",
        'Drop the rule from options={"breaks": [...]}.',
    ),
    "host_sync": Meaning(
        "the host waits for a value from the device",
        "Keep the value on the device (torch.where, a tensor as an index), or read it before the forward.",
    ),
    "dynamic_output": Meaning(
        "the size of a result depends on data",
        "Use a form of fixed size: a mask with torch.where instead of x[mask], top-k instead of nonzero, "
        "repeat_interleave with output_size=.",
    ),
    "host_number": Meaning(
        "a number that changes between calls would be frozen",
        "Make the number a tensor on the device, or keep it the same from call to call.",
    ),
    "cpu_compute": Meaning(
        "works on the CPU",
        "Create the tensor on the device of the model (device=x.device), or make it once, outside of the forward.",
    ),
    "unsafe_tag": Meaning(
        "its author says that no CUDA graph may hold it",
        'If the tag is wrong, name the op in options={"capturable": [...]}.',
    ),
    "unknown_op": Meaning(
        "its body cannot be seen",
        'If it neither synchronises nor reads sizes or state on the host, name it in options={"capturable": [...]}.',
    ),
    "collective": Meaning(
        "talks to other ranks",
        'If its backend can be captured (NCCL can), name it in options={"capturable": [...]}.',
    ),
    "control_flow": Meaning(
        "the host chooses what runs",
        "Compute both branches and choose with torch.where.",
    ),
    "small_segment": Meaning(
        "too few kernels between two breaks to be worth a graph",
        'Remove a break beside it, or lower options={"min_segment_kernels": ...}.',
    ),
}

#: Why a whole program ran without replay.
EAGER_RUNS = {
    "capture_off": Meaning("capture is off, so the steps run one after the other", ""),
    "grad": Meaning(
        "gradients were wanted, so the graph was not split",
        "Call the model under torch.inference_mode() or torch.no_grad().",
    ),
}


#: What removes the break at an op of somebody else's.
OPS = {
    "transformers::grouped_mm_fallback": "transformers takes it for expert weights that are not bfloat16. Use "
    'bfloat16, or set experts_implementation="batched_mm" in the configuration.',
}


def remedies(reasons: Iterable[StepReason]) -> list[str]:
    """What would remove these breaks, each remedy once."""
    found = (OPS.get(reason.op) or meaning(reason.code).remedy for reason in reasons)
    return [remedy for remedy in dict.fromkeys(found) if remedy]


def meaning(code: str) -> Meaning:
    """What a reason code of a break or of an eager run means; an unknown one stands for itself."""
    return BREAKS.get(code) or EAGER_RUNS.get(code) or Meaning(code.replace("_", " "), "")
