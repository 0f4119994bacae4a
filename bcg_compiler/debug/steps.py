"""What is known of replays that were watched: how long each part took, and what happened around them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bcg_compiler.lower import Part
from bcg_compiler.plan import Plan, Step


@dataclass(frozen=True)
class StepTime:
    """A part of one replay, in the order that it ran.

    ``index``      of the plan's step that it is, or is for: a fill for the step that reads it first, a copy back for
                   the step before which it is made
    ``kind``       ``segment`` or ``break``; ``fill`` of slots and bridges; ``copy_back`` of what belongs to the caller:
                   slots that are written, and results
    ``name``       for people: what is in it
    ``start_us``   microseconds of the host's clock since the replay began
    ``host_us``    how long the host was at it, in microseconds
    ``device_us``  microseconds between the device's events before and after it, in which it may also have waited for
                   the host; ``None`` without a CUDA device
    """

    index: int
    kind: Literal["segment", "break", "fill", "copy_back"]
    name: str
    start_us: float
    host_us: float
    device_us: float | None

    @property
    def us(self) -> float:
        """The device's time where there is one, else the host's."""
        return self.host_us if self.device_us is None else self.device_us


@dataclass(frozen=True)
class Replay:
    """One replay.

    ``graph``     its number, from 1, and its ``plan``
    ``rows``      those of the bucket; ``None`` for an exact shape
    ``capture``   number of the capture among those of the graph, in the order that the trace met them
    ``thread``    identifier of the host's thread
    ``start_us``, ``device_start_us``  when it began on the host, and its first part on the device, in microseconds
                  since the trace began
    ``host_us``   how long the host was at the whole of it
    """

    graph: int
    plan: Plan
    rows: int | None
    capture: int
    thread: int
    start_us: float
    host_us: float
    device_start_us: float | None
    steps: tuple[StepTime, ...]

    def waits(self) -> list[tuple[int, float, float]]:
        """When the device waits for the host to launch a segment: position of the step, start and end since the trace
        began, in microseconds.

        The graph of a segment is launched by one call, and cannot begin before it: what the device had done by then,
        it waited. Of a break, which may launch anything at any time, it is not known.
        """
        found = []
        at = self.device_start_us
        for position, step in enumerate(self.steps):
            if at is None or step.device_us is None:
                break
            launched = self.start_us + step.start_us + step.host_us
            end = at + step.device_us
            if step.kind == "segment" and launched > at:
                found.append((position, at, min(launched, end)))
            at = end
        return found


@dataclass(frozen=True)
class Span:
    """Something that the host did around replays: a call, an eager run, a capture. ``start_us`` as in ``Replay``."""

    name: str
    kind: Literal["call", "other"]
    thread: int
    start_us: float
    host_us: float


def medians(replays: Sequence[Replay]) -> tuple[StepTime, ...]:
    """The parts of one replay, with the medians over several replays of one capture; of those that ran to their end."""
    most = max((len(replay.steps) for replay in replays), default=0)
    whole = [replay.steps for replay in replays if len(replay.steps) == most]
    return tuple(_median(same) for same in zip(*whole, strict=True))


def _median(same: Sequence[StepTime]) -> StepTime:
    step = same[0]
    device = [s.device_us for s in same if s.device_us is not None]
    return StepTime(
        index=step.index,
        kind=step.kind,
        name=step.name,
        start_us=statistics.median(s.start_us for s in same),
        host_us=statistics.median(s.host_us for s in same),
        device_us=statistics.median(device) if device else None,
    )


def name_of(part: Part, plan: Plan) -> str:
    """What is in a part of a replay: modules, and of a break the operations that are why it is one."""
    if part.what:
        return part.what
    step = plan.steps[part.step]
    modules = dict.fromkeys(node.module or "the model itself" for node in (step.nodes[0], step.nodes[-1]))
    where = " → ".join(modules)
    return where if step.kind == "segment" else f"{_operations(step)} in {where}"


def _operations(step: Step) -> str:
    """The operations that make a step a break; the first of them, and how many more."""
    reasons = dict.fromkeys(reason.op for reason in step.reasons if reason.code != "small_segment")
    found = [*reasons] or [*dict.fromkeys(node.op for node in step.nodes)]
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
