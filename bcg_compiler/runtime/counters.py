"""What happened, as numbers.

Counters are the language of tests: ``with bcg.counters.expect(graphs=1, breaks=4): ...``
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Totals since the process began.

    ``graphs`` plans made, ``segments`` and ``breaks`` of those plans; ``captures`` of segments, ``recaptures`` of
    those captured before at other addresses; ``replays`` of whole programs; ``eager_runs`` of whole programs, by
    reason code.
    """

    graphs: int = 0
    segments: int = 0
    breaks: int = 0
    captures: int = 0
    recaptures: int = 0
    replays: int = 0
    eager_runs: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> "Counters":
        """A copy that does not count on."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Counters(**{**values, "eager_runs": Counter(self.eager_runs)})

    @contextmanager
    def expect(self, **deltas: int | Mapping[str, int]) -> Iterator[None]:
        """Assert that the block changes the named counters by exactly these numbers; the others are not looked at.

        ``eager_runs`` takes a number (of all reasons) or a mapping of reason codes. Raises ``AssertionError`` with
        what was wanted and what was seen.
        """
        unknown = set(deltas) - {f.name for f in fields(self)}
        if unknown:
            raise TypeError(f"No such counter: {', '.join(sorted(unknown))}.")
        before = self.snapshot()
        yield
        wrong = []
        for name, wanted in deltas.items():
            seen = _difference(getattr(before, name), getattr(self, name))
            if isinstance(wanted, int) and isinstance(seen, dict):
                seen = sum(seen.values())
            if seen != (wanted if isinstance(wanted, int) else {k: v for k, v in wanted.items() if v}):
                wrong.append(f"{name}: expected {wanted}, saw {seen}")
        if wrong:
            raise AssertionError("; ".join(wrong))


def _difference(before: int | Counter[str], after: int | Counter[str]) -> int | dict[str, int]:
    if isinstance(before, int) or isinstance(after, int):
        return int(after) - int(before)  # type: ignore[arg-type]
    return dict(after - before)


counters = Counters()
