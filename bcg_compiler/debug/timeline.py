"""A timeline of replays: which step takes how long, and where host and device wait for each other.

Nothing of it is on the way of a call that nobody traces. For the time of a trace each capture is replayed by a second
copy of its generated function, which calls the same graphs, buffers and bodies, with a mark between its parts.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from bcg_compiler.debug.chrome import chrome_json
from bcg_compiler.debug.probe import Clock, Probe, Taken, check_nvtx
from bcg_compiler.debug.steps import Replay, Span, StepTime, medians
from bcg_compiler.errors import TraceError
from bcg_compiler.lower import marked
from bcg_compiler.runtime import Program, programs_of
from bcg_compiler.runtime.recording import Capture
from bcg_compiler.runtime.registry import AnyProgram

__all__ = ["Replay", "Span", "StepTime", "Timeline", "measure", "trace"]

#: Parts of replays that one timeline holds; what is replayed after that is counted only.
MOST_PARTS = 100_000

#: How often a program may run without a replay before it is measured: it warms up, and may be planned anew.
WARM_UPS = 4


class Timeline:
    """What a trace saw; complete when the trace is over.

    ``replays``  in the order they ended, with the time of each part
    ``spans``    calls, eager runs and captures around them
    ``missed``   replays that were not taken down, as the timeline was full
    """

    def __init__(self, programs: Callable[[], Sequence[AnyProgram]], nvtx: bool) -> None:
        self.replays: list[Replay] = []
        self.spans: list[Span] = []
        self.missed = 0
        self.clock = Clock()
        self._programs = programs
        self._nvtx = nvtx
        self._watchers: dict[Program, _Watcher] = {}
        self._watching = ExitStack()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Show a block as one call around its replays: what it spends outside of them shows as a gap.

        Graphs that were compiled since the trace began are seen from here on.
        """
        self.watch()
        with self.span(name, "call"):
            yield

    @contextmanager
    def span(self, name: str, kind: Literal["call", "other"]) -> Iterator[None]:
        """Take a block down."""
        began = self.clock.now()
        try:
            yield
        finally:
            self.spans.append(Span(name, kind, threading.get_ident(), began, self.clock.now() - began))

    def steps(self, graph: int = 1, rows: int | None = None) -> tuple[StepTime, ...]:
        """Medians over the replays of one graph, numbered from 1, that ``alike`` gives."""
        return medians(self.alike(graph, rows))

    def alike(self, graph: int = 1, rows: int | None = None) -> list[Replay]:
        """The replays of one capture of a graph: in the bucket of ``rows``, or of what replayed the most. The first one
        is left out if there are others: it takes longer.
        """
        found: dict[int, list[Replay]] = {}
        for replay in self.replays:
            if replay.graph == graph and rows in (None, replay.rows):
                found.setdefault(replay.capture, []).append(replay)
        most = max(found.values(), key=len, default=[])
        return most[1:] or most

    def json(self) -> str:
        """All of it in Chrome's trace format."""
        return chrome_json(self.replays, self.spans)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write that to a file, which https://ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(self.json())

    # -- while it is on

    def watch(self) -> None:
        """Watch those programs that can replay and are not watched yet."""
        for program in self._programs():
            if isinstance(program, Program) and program not in self._watchers:
                watcher = _Watcher(self, program, len(self._watchers) + 1, self._nvtx)
                self._watching.enter_context(program.watched(watcher))
                self._watchers[program] = watcher

    def end(self) -> None:
        """Watch no more, and wait for the devices to read their events."""
        self._watching.close()
        self.clock.wait()
        taken = [found for watcher in self._watchers.values() for found in watcher.taken]
        self.replays = [probe.read(found) for probe, found in sorted(taken, key=lambda t: t[1].ended)]
        self._programs = list  # what is kept of it keeps no model alive
        self._watchers.clear()


@contextmanager
def trace(compiled: Callable[..., Any] | None = None, *, nvtx: bool = False) -> Iterator[Timeline]:
    """Take down what the replays of ``compiled``, the result of ``torch.compile``, do in a block.

    Without ``compiled``: of all models of this process. Times are those of the host's clock, and on a CUDA device also
    those of events on the stream between the parts of a replay, in microseconds. With ``nvtx`` there is a range around
    each replay and each of its parts, for Nsight. A model that has not been called yet is not seen: call it first.

    When the block ends it waits for the devices, and the models replay as before: by the very same functions.

    Raises ``TraceError`` if one of the programs is traced already, or torch has no NVTX.
    """
    if nvtx:
        check_nvtx()
    timeline = Timeline(partial(programs_of, compiled), nvtx)
    try:
        timeline.watch()
        yield timeline
    finally:
        timeline.end()


def measure(program: Program, args: Sequence[Any], calls: int = 5) -> tuple[StepTime, ...]:
    """The parts of one replay of a program, in order: medians over so many ``calls`` with the arguments of its graph.

    It is called as often as it takes to capture it, and once more. What the model writes, it writes at each of them.
    Raises ``TraceError`` if it does not replay.
    """
    timeline = Timeline(lambda: [program], nvtx=False)
    last = program.replays + calls + 1
    try:
        timeline.watch()
        for _ in range(calls + 1 + WARM_UPS):
            program(*args)
            if program.replays == last:
                break
    finally:
        timeline.end()
    if not timeline.replays:
        why = ", ".join(program.eager_runs)
        raise TraceError(f"The program was called {calls + 1 + WARM_UPS} times and did not replay ({why}).")
    return timeline.steps()


class _Watcher:
    """Watches one program."""

    def __init__(self, timeline: Timeline, program: Program, graph: int, nvtx: bool) -> None:
        self.taken: list[tuple[Probe, Taken]] = []
        self._timeline = timeline
        self._program = program
        self._graph = graph
        self._nvtx = nvtx
        self._captures = itertools.count()
        self._parts = 0

    def copy(self, capture: Capture) -> Capture:
        """The capture with a copy of its function that marks each part."""
        device = torch.device(self._program.plan.device)
        self._timeline.clock.set(device)
        probe = Probe(
            graph=self._graph,
            plan=self._program.plan,
            rows=capture.rows,
            capture=next(self._captures),
            parts=[part for _, part in sorted(capture.code.parts.items())],
            clock=self._timeline.clock,
            device=device if device.type == "cuda" else None,
            nvtx=self._nvtx,
        )
        code = marked(capture.code, probe.mark, f"<{capture.code.filename.strip('<>')} traced>")
        return capture._replace(run=probe.watch(code.made, self._keep), code=code)

    def around(self, what: str) -> AbstractContextManager[None]:
        """A span of the timeline."""
        return self._timeline.span(f"graph {self._graph} {what}", "other")

    def _keep(self, probe: Probe, taken: Taken) -> None:
        if self._parts + len(taken.marks) > MOST_PARTS:
            self._timeline.missed += 1
            return
        self._parts += len(taken.marks)
        self.taken.append((probe, taken))
