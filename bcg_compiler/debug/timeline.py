"""How long each step of a replay takes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StepTime:
    """A part of one replay, in the order that it ran.

    ``index``      of the plan's step that it is, or is for: a fill for the step that reads it first, a copy back for
                   the step before which it is made
    ``kind``       ``segment`` or ``break``; ``fill`` of slots and bridges; ``copy_back`` of what belongs to the caller
    ``name``       for people: what is in it
    ``start_us``   microseconds of the host's clock since the replay began
    ``host_us``    how long the host was at it, in microseconds
    ``device_us``  microseconds between the device's events before and after it; ``None`` without a CUDA device
    """

    index: int
    kind: Literal["segment", "break", "fill", "copy_back"]
    name: str
    start_us: float
    host_us: float
    device_us: float | None
