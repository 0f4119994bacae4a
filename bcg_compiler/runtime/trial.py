"""Finds the operation that keeps a segment from being captured, by capturing parts of it."""

from typing import Any

import torch

from bcg_compiler.context import captured_context
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import lower_prefix
from bcg_compiler.plan import Plan, PlanNode, Step
from bcg_compiler.runtime.capture import CaptureDevice
from bcg_compiler.runtime.recording import capturing


def find_uncapturable(
    graph: AnnotatedGraph, plan: Plan, step: Step, device: CaptureDevice, given: tuple[Any, ...], suspect: int | None
) -> PlanNode | None:
    """The first node of a segment with which capture fails and without which it does not; ``None`` if none does.

    The error alone does not tell: an operation may swallow what it caused, and the next one, or the end of the
    capture, raises instead. ``suspect`` is the ordinal of the node that the error points at; it is tried first.
    A trial records ``n`` nodes on the arguments ``given`` and throws them away: like any capture it computes nothing.
    """

    def captures(count: int) -> bool:
        try:
            with capturing(device), captured_context():
                device.capture(lower_prefix(graph, plan, step, count), given)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return False
        return True

    good, bad = 0, len(step.nodes)
    for position, node in enumerate(step.nodes):
        if node.ordinal == suspect:
            for count in (position, position + 1):
                if captures(count):
                    good = count
                else:
                    bad = count
                    break
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if captures(middle) else (good, middle)
    return step.nodes[good] if bad < len(step.nodes) or not captures(bad) else None
