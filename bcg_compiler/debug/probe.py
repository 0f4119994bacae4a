"""Clocks, events and ranges around the parts of a replay, while it is watched."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.debug.steps import Replay, StepTime, name_of
from bcg_compiler.errors import TraceError
from bcg_compiler.lower import Part
from bcg_compiler.plan import Plan


class Clock:
    """The host's clock, and those of CUDA devices set by it, from one moment on.

    The device's clock is set by an event at a time when the device has nothing to do. What such an event takes to get
    there, some microseconds, all later ones take, too: on the common clock an idle device begins at once.
    """

    def __init__(self) -> None:
        self._base = time.perf_counter_ns()
        self._events: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def set(self, device: torch.device) -> None:
        """Set the clock of a device, once it has nothing to do; that of a CPU is the host's."""
        if device.type == "cuda" and device not in self._events:
            torch.cuda.synchronize(device)
            event = torch.cuda.Event(enable_timing=True)
            at = self.now()
            event.record(torch.cuda.current_stream(device))
            self._events[device] = at, event

    def wait(self) -> None:
        """Wait until all events are over."""
        for device in self._events:
            torch.cuda.synchronize(device)

    def now(self) -> float:
        """Microseconds of the host since the beginning."""
        return (time.perf_counter_ns() - self._base) / 1000

    def of_device(self, device: torch.device, event: torch.cuda.Event) -> float:
        """When an event was, in microseconds since the beginning. It must be over."""
        at, base = self._events[device]
        return at + base.elapsed_time(event) * 1000


@dataclass
class Taken:
    """What was taken down of one replay: the host's time before and after each mark, and an event between them.

    Mark number ``i`` ends part ``i - 1`` and begins part ``i``. One more event comes after the last part, unless that
    raised.
    """

    thread: int
    began: float
    marks: list[tuple[float, float]]
    events: list[torch.cuda.Event]
    ended: float = 0.0


class Probe:
    """Watches the replays of one capture. ``mark`` is called before each of its parts.

    ``device`` is that of the events, ``None`` for host clocks only; ``nvtx`` whether to open ranges.
    """

    def __init__(
        self,
        graph: int,
        rows: int | None,
        capture: int,
        parts: Sequence[Part],
        plan: Plan,
        clock: Clock,
        device: torch.device | None,
        nvtx: bool,
    ) -> None:
        self._parts = parts
        self._plan = plan
        self._graph = graph
        self._rows = rows
        self._capture = capture
        self._clock = clock
        self._device = device
        self._names = [name_of(part, plan) for part in parts]
        self._ranges = [label(part.kind, part.step, name) for part, name in zip(parts, self._names, strict=True)]
        self._nvtx = nvtx
        self._taken = Taken(0, 0.0, [], [])
        self._stream: Any = None

    def watch(self, replay: Callable[..., Any], keep: Callable[["Probe", Taken], None]) -> Callable[..., Any]:
        """``replay`` with all that is to be taken down; what one call of it took is handed to ``keep``."""

        def run(*args: Any) -> Any:
            self._begin()
            raised = True
            try:
                result = replay(*args)
                raised = False
                return result
            finally:
                self._end(raised)
                keep(self, self._taken)

        return run

    def mark(self) -> None:
        """The next part begins."""
        before = self._clock.now()
        if self._device is not None:
            self._record()
        if self._nvtx:
            if self._taken.marks:
                torch.cuda.nvtx.range_pop()
            torch.cuda.nvtx.range_push(self._ranges[len(self._taken.marks)])
        self._taken.marks.append((before, self._clock.now()))

    def _begin(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(replay_name(self._graph, self._rows))
        if self._device is not None:
            # A break may change streams; steps are launched on this one.
            self._stream = torch.cuda.current_stream(self._device)
        self._taken = Taken(threading.get_ident(), self._clock.now(), [], [])

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._taken.events.append(event)

    def _end(self, raised: bool) -> None:
        self._taken.ended = self._clock.now()
        if self._device is not None and not raised:  # of a device that has failed no event is to be had
            self._record()
        if self._nvtx:
            for _ in range(2 if self._taken.marks else 1):
                torch.cuda.nvtx.range_pop()

    def read(self, taken: Taken) -> Replay:
        """What a replay took. The device must be done with it."""
        ends = [*(before for before, _ in taken.marks[1:]), taken.ended]
        # All from the first one, so that what each is rounded by does not add up.
        passed = [taken.events[0].elapsed_time(event) * 1000 for event in taken.events]
        steps = []
        for i, ((_, start), end) in enumerate(zip(taken.marks, ends, strict=True)):
            device_us = max(0.0, passed[i + 1] - passed[i]) if i + 1 < len(passed) else None
            part = self._parts[i]
            steps.append(StepTime(part.step, part.kind, self._names[i], start - taken.began, end - start, device_us))
        first = self._clock.of_device(self._device, taken.events[0]) if self._device and taken.events else None
        return Replay(
            graph=self._graph,
            plan=self._plan,
            rows=self._rows,
            capture=self._capture,
            thread=taken.thread,
            start_us=taken.began,
            host_us=taken.ended - taken.began,
            device_start_us=first,
            steps=tuple(steps),
        )


def label(kind: str, index: int, name: str) -> str:
    """What a part is called in Nsight and Perfetto."""
    return f"{kind} {index} {name}"


def replay_name(graph: int, rows: int | None) -> str:
    """What a replay is called there."""
    return f"replay graph {graph}" + ("" if rows is None else f" bucket {rows}")


def check_nvtx() -> None:
    """Raise ``TraceError`` where torch has no NVTX."""
    try:
        torch.cuda.nvtx.mark("bcg")
    except RuntimeError as error:
        raise TraceError(
            f"nvtx=True needs a build of torch with CUDA, and this is torch {torch.__version__}. Trace without it: the "
            "timeline has the same steps."
        ) from error
