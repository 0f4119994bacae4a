"""What a model was compiled to once, in a small file, and whether it is more than that now.

Nothing is timed and nothing runs on a device: the numbers are those of plans, and the same on every machine with one
version of torch and of the model's code.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from bcg_compiler.debug import memory
from bcg_compiler.debug.diff import Number, numbers_table, reason_lines
from bcg_compiler.debug.explain import Explanation
from bcg_compiler.debug.reasons import reasons_of
from bcg_compiler.errors import BcgError
from bcg_compiler.plan import Plan, StepReason
from bcg_compiler.plan.padding import symbol_sources

#: The numbers that must not grow, as a golden file names them, and for people.
NUMBERS = {
    "graphs": "graphs",
    "segments": "segments",
    "breaks": "breaks",
    "unique_units": "units to compile",
    "captures": "captures",
    "recompiles": "recompiles",
    "unpadded": "graphs that are not padded to the ladder",
    "dynamo_graph_breaks": "graph breaks of Dynamo's own",
    "forecast_bytes": "bytes forecast",
}


class GoldenError(BcgError):
    """A golden file that is not there, cannot be read, or is about something else."""


@dataclass(frozen=True)
class Golden:
    """What a model is compiled to.

    ``given``    what the numbers are for: model, prompt lengths, dtype, device, options, …
    ``numbers``  by name, see ``NUMBERS``; ``None`` where it is not known
    ``reasons``  operations outside of segments, or that speak against padding: how many, by code, operation, and
                 module with ``*`` for its numbers
    ``torch``    the version that they were found with
    """

    given: Mapping[str, Any]
    numbers: Mapping[str, int | None]
    reasons: Mapping[str, int]
    torch: str = ""

    @classmethod
    def of(cls, found: Explanation, given: Mapping[str, Any], lengths: Iterable[int]) -> "Golden":
        """The golden numbers of a model that was called with these lengths."""
        plans = [plan for plan in found.plans if plan is not None]
        reasons = [reason for plan in plans for reason in reasons_of(plan)]
        shapes = [_shapes(plan, [*lengths], calls) for plan, calls in zip(found.plans, found.calls, strict=True)]
        captured = [(plan, at) for plan, at in zip(found.plans, shapes, strict=True) if plan is not None and at]
        forecasts = [memory.forecast_of(plan, *at) for plan, at in captured]
        numbers = {
            "graphs": len(found.plans),
            "segments": sum(len(plan.segments) for plan in plans),
            "breaks": sum(len(plan.breaks) for plan in plans),
            "unique_units": len({unit.key for plan in plans for step in plan.segments for unit in step.units}),
            "captures": sum(map(len, shapes)),
            "recompiles": found.recompiles,
            "unpadded": sum(plan.unpadded is not None for plan in plans),
            "dynamo_graph_breaks": sum(cut.count for cut in found.uncompiled.graph_breaks),
            "forecast_bytes": None if None in forecasts else sum(f.total for f in forecasts if f is not None),
        }
        lines = {line: len(same) for line, same in _by_line(reasons).items()}
        return cls(given, numbers, lines, torch.__version__.partition("+")[0])

    def save(self, path: Path) -> None:
        """Write the file. Raises ``GoldenError`` where that cannot be done."""
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise GoldenError(f"Cannot write {path}: {error.strerror}.") from None

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """Read the file. Raises ``GoldenError``."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            if not all(isinstance(part, dict) for part in (found.given, found.numbers, found.reasons)):
                raise TypeError
            # A number that is lost would never grow. Only of bytes it may be unknown how many there are.
            numbers = {name: found.numbers[name] for name in NUMBERS}
            if numbers["forecast_bytes"] is None:
                del numbers["forecast_bytes"]
            if not all(type(number) is int for number in numbers.values()):
                raise TypeError
        except OSError as error:
            raise GoldenError(f"Cannot read the golden numbers from {path}: {error.strerror}.") from None
        except (ValueError, TypeError, KeyError):
            raise GoldenError(f"{path} is no file of golden numbers. Write it anew, with --update.") from None
        return found


@dataclass(frozen=True)
class Verdict:
    """A model beside its golden file."""

    golden: Golden
    now: Golden

    @property
    def numbers(self) -> list[Number]:
        """All numbers that both know."""
        before, after = self.golden.numbers, self.now.numbers
        found = (Number(said, before.get(name), after.get(name)) for name, said in NUMBERS.items())
        return [number for number in found if number.before is not None and number.after is not None]

    @property
    def grown(self) -> list[Number]:
        """Those that are larger now."""
        return [n for n in self.numbers if n.before is not None and n.after is not None and n.after > n.before]

    @property
    def shrunk(self) -> list[Number]:
        """Those that are smaller now."""
        return [n for n in self.numbers if n.before is not None and n.after is not None and n.after < n.before]

    def other_reasons(self) -> Iterator[tuple[str, int, int]]:
        """What is more or less often than it was: a line of ``reasons``, how often then, how often now."""
        for line in dict.fromkeys((*self.golden.reasons, *self.now.reasons)):
            before, after = self.golden.reasons.get(line, 0), self.now.reasons.get(line, 0)
            if before != after:
                yield line, before, after


def compare(golden: Golden, now: Golden) -> Verdict:
    """Raises ``GoldenError`` if the golden numbers are for something else than the ones of now."""
    others = [
        f"{name}: {golden.given.get(name)!r} there, {now.given.get(name)!r} here"
        for name in dict.fromkeys((*golden.given, *now.given))
        if golden.given.get(name) != now.given.get(name)
    ]
    if others:
        raise GoldenError(
            f"The golden numbers are for something else: {'; '.join(others)}. Give the same, or write them anew with "
            "--update."
        )
    return Verdict(golden, now)


def verdict_view(verdict: Verdict, plans: Iterable[Plan | None]) -> Group:
    """The numbers that differ, which reasons are new and what would remove them, and the verdict last.

    ``plans`` are those of now: they know the user's lines.
    """
    parts: list[RenderableType] = []
    if verdict.grown or verdict.shrunk:
        parts += [numbers_table(verdict.numbers), Text()]
    places = _by_line(reason for plan in plans if plan is not None for reason in reasons_of(plan))
    for line, before, after in verdict.other_reasons():
        sign, style = ("+", "yellow") if after > before else ("-", "green")
        parts.append(Text.assemble((f"{sign} {line}", style), f": {before} → {after}"))
        if after > before:
            parts += reason_lines(places[line], remedy=True)
    torches = verdict.golden.torch, verdict.now.torch
    if verdict.grown and torches[0] != torches[1]:
        parts.append(Text(f"The golden numbers are of torch {torches[0]}; this is torch {torches[1]}.", style="dim"))
    if verdict.grown:
        names = ", ".join(number.name for number in verdict.grown)
        parts.append(Text(f"GROWN  {names}. If that is meant: --update.", style="bold red"))
    elif verdict.shrunk:
        names = ", ".join(number.name for number in verdict.shrunk)
        parts.append(Text(f"BETTER  {names}. Keep it: --update.", style="bold green"))
    else:
        parts.append(Text("AS THE GOLDEN FILE SAYS", style="bold green"))
    return Group(*parts)


def _shapes(plan: Plan | None, lengths: list[int], calls: int) -> list[int]:
    """What is captured of a graph: its buckets, or the exact shapes of the lengths that it was called with.

    A graph that leaves sizes open was made for one of the lengths, and called with those after it.
    """
    if plan is None or plan.uncaptured is not None or not plan.segments:
        return []
    if plan.padding is not None:
        return [*plan.padding.buckets]
    distinct = [*dict.fromkeys(lengths)]
    return distinct[-calls:] if symbol_sources(plan) and calls else distinct[:1]


def _by_line(reasons: Iterable[StepReason]) -> dict[str, list[StepReason]]:
    """The reasons by a line that names code, operation and module; those of all layers are one line."""
    found: dict[str, list[StepReason]] = {}
    for reason in reasons:
        where = re.sub(r"\d+", "*", reason.module)
        found.setdefault(f"{reason.code}: {reason.op}" + f" in {where}" * bool(where), []).append(reason)
    return found


def missing(path: Path, command: str) -> GoldenError:
    """What to say where there is no golden file yet."""
    return GoldenError(f"There is no {path}. Write it, read it, and keep it beside your tests:\n{command} --update")


def about(golden: Golden) -> str:
    """The numbers in one line."""
    return ", ".join(f"{NUMBERS[name]} {value:,}" for name, value in golden.numbers.items() if value is not None)
