"""A plan with its code: what Dynamo calls in place of the graph."""

import linecache
import weakref
from collections import Counter
from types import TracebackType
from typing import Any

from bcg_compiler.errors import ReleasedError
from bcg_compiler.lower import Lowered
from bcg_compiler.plan import Plan
from bcg_compiler.runtime.counters import counters


class Program:
    """Runs the steps of one plan, eagerly and in order (``capture="off"``)."""

    def __init__(self, plan: Plan, lowered: Lowered) -> None:
        self.plan = plan
        self.source = lowered.source
        self.eager_runs: Counter[str] = Counter()
        self._run = lowered.run
        self._filename = lowered.filename
        self._lines = lowered.lines
        # Tracebacks and debuggers show the generated text as if it were a file.
        text = lowered.source
        linecache.cache[self._filename] = (len(text), None, text.splitlines(keepends=True), self._filename)
        weakref.finalize(self, linecache.cache.pop, self._filename, None)

    def __call__(self, *args: Any) -> Any:
        if not self.eager_runs:
            counters.graphs += 1
            counters.segments += len(self.plan.segments)
            counters.breaks += len(self.plan.breaks)
        self.eager_runs["capture_off"] += 1
        counters.eager_runs["capture_off"] += 1
        try:
            return self._run(*args)
        except Exception as error:
            self._say_where(error)
            raise

    def release(self) -> None:
        """Let go of the code and all that it holds. A call after this raises ``ReleasedError``."""
        self._run = _released

    def _say_where(self, error: Exception) -> None:
        """Add the step, the operation and the user's line to an exception; the exception itself stays as it is."""
        trace: TracebackType | None = error.__traceback__
        found = None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._filename:
                found = self._lines.get(trace.tb_lineno, found)
            trace = trace.tb_next
        if found is None:
            return
        step, node = found
        code = f"\n    {node.source.code}" if node.source and node.source.code else ""
        where = f" in {node.module}" if node.module else ""
        error.add_note(f"bcg: {step.kind} {step.index}, %{node.ordinal} {node.op}{where} ({node.source}){code}")


def _released(*args: Any) -> Any:
    raise ReleasedError("This program was freed by bcg.reset(). Call the compiled model again: it is compiled anew.")


class UnsplitProgram:
    """A graph that runs as it is, with the reason why: no segments, no breaks."""

    plan = None
    source = ""

    def __init__(self, run: Any, reason: str) -> None:
        self.eager_runs: Counter[str] = Counter()
        self._run = run
        self._reason = reason

    def release(self) -> None:
        """Let go of the graph. A call after this raises ``ReleasedError``."""
        self._run = _released

    def __call__(self, *args: Any) -> Any:
        if not self.eager_runs:
            counters.graphs += 1
        self.eager_runs[self._reason] += 1
        counters.eager_runs[self._reason] += 1
        return self._run(*args)
