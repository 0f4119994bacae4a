"""A graph that runs as it is."""

from collections import Counter
from typing import Any

from bcg_compiler.errors import ReleasedError
from bcg_compiler.runtime.counters import counters


def released(*args: Any) -> Any:
    """What stands in place of code that was freed."""
    raise ReleasedError("This program was freed by bcg.reset(). Call the compiled model again: it is compiled anew.")


class UnsplitProgram:
    """A graph that runs as it is, with the reason why: no segments, no breaks."""

    plan = None
    source = captured_on = ""
    replays = captures = recaptures = specialized_units = forecast_bytes = measured_bytes = live_rows = 0

    def __init__(self, run: Any, reason: str) -> None:
        self.eager_runs: Counter[str] = Counter()
        self.eager_units: Counter[str] = Counter()
        self.bucket_replays: Counter[int] = Counter()
        self._run = run
        self._reason = reason

    def release(self) -> None:
        """Let go of the graph. A call after this raises ``ReleasedError``."""
        self._run = released

    def __call__(self, *args: Any) -> Any:
        if not self.eager_runs:
            counters.graphs += 1
        self.eager_runs[self._reason] += 1
        counters.eager_runs[self._reason] += 1
        return self._run(*args)
