"""The fixture ``bcg_counters``: how often what happens, in a block of a test."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from bcg_compiler.runtime import Counters, counters


class CounterFixture:
    """The counters of the process, and what a block adds to them."""

    @contextmanager
    def expect(self, **deltas: int | Mapping[str, int]) -> Iterator[None]:
        """Assert that the block changes the named counters by exactly these numbers (``bcg_compiler.counters``).

        ``eager_runs`` takes a number, or numbers by reason code. The error says all that has changed.
        """
        __tracebackhide__ = True
        before, ran = counters.snapshot(), False
        try:
            with counters.expect(**deltas):
                yield
                ran = True
        except AssertionError as error:
            if not ran:
                raise
            lines = str(error).split("; ")
            raise AssertionError("\n".join(["Counters:", *(f"  {line}" for line in lines), _all(before)])) from None


def _all(before: Counters) -> str:
    """What has changed since."""
    changed = []
    for counter in fields(Counters):
        was, now = getattr(before, counter.name), getattr(counters, counter.name)
        if was != now:
            changed.append(f"{counter.name} {dict(now - was) if isinstance(now, Mapping) else now - was}")
    return f"All that changed: {', '.join(changed) or 'nothing'}."
