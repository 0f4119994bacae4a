"""From a model whose numbers are not eager's to what makes them so.

First the model is called, with checks in every replay: where one finds a fault, the segment of it runs eagerly while
all others replay, and if the numbers are then right, that is it. Where none does, values between steps tell a break
that got the right numbers and gave wrong ones, segments run eagerly in part, and passes are left out one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bcg_compiler.checks import Fault
from bcg_compiler.debug.bisect.calls import Calls, Seen
from bcg_compiler.debug.bisect.reference import Boundary
from bcg_compiler.debug.bisect.repro import Recipe, Repro, write_repro
from bcg_compiler.debug.errors import building
from bcg_compiler.models import zoo
from bcg_compiler.models.zoo import ZooModel
from bcg_compiler.options import Options

#: How many calls are made of the model, where nobody says how many: one warms up, one captures, the others replay.
CALLS = 4


@dataclass(frozen=True)
class Trial:
    """The same calls with one thing changed: what, and the largest difference from eager; 0 if there is none."""

    changed: str
    largest: float

    @property
    def equal(self) -> bool:
        """Whether the change makes the numbers eager's."""
        return self.largest == 0


@dataclass(frozen=True)
class Culprit:
    """What makes the difference: its kind, in words, and the fault that a check has found, if one has."""

    kind: Literal["model", "dynamo", "pass", "segment", "break", "operation", "unknown"]
    text: str
    fault: Fault | None = None


@dataclass(frozen=True)
class Bisection:
    """What was compared, and what was found. ``culprit`` is ``None`` where nothing differs."""

    label: str
    lengths: tuple[int, ...]
    seen: Seen
    trials: tuple[Trial, ...] = ()
    culprit: Culprit | None = None
    repro: Repro | None = None

    @property
    def equal(self) -> bool:
        """Whether all calls gave eager's numbers."""
        return self.culprit is None


def bisect_model(
    name: str,
    *,
    lengths: Sequence[int] | None = None,
    length: int = 128,
    calls: int = CALLS,
    layers: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> Bisection:
    """Build the model called ``name`` (see ``bcg_compiler.models.zoo``), and ``bisect`` it.

    It is called ``calls`` times: at ``lengths`` in tokens, or at ``length``; with a ladder at one token fewer after
    the first call, so that some calls are padded, or replayed at their own length if nothing is. ``out`` is the file
    that the reproduction is written to.
    """
    with building(name):
        built = zoo.build(name, layers=layers, device=device, dtype=dtype, config=config, seed=seed)
    padded = Options.parse(options).ladder is not None
    chosen = tuple(lengths or (max(1, length - (padded and call > 0)) for call in range(calls)))
    recipe = Recipe(
        name=name,
        build=dict(layers=layers, device=str(device), dtype=dtype, seed=seed, config=dict(config or {}) or None),
        lengths=chosen,
        seed=seed,
    )
    return bisect(built, chosen, options=options, seed=seed, out=out, recipe=recipe)


def bisect(
    built: ZooModel,
    lengths: Sequence[int],
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    out: Path | None = None,
    recipe: Recipe | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Bisection:
    """Find what makes a model give other numbers than eager, when it is called at ``lengths``, in tokens.

    Drops all compiled code of this process. Bodies of breaks run once for each of the calls, of the graphs as they are,
    and of eager code: each has a copy of the model. With ``out`` a file is written that shows the difference by itself;
    with a ``recipe`` it may build the model anew, if its culprit alone does not show it.

    Raises ``OptionError``, ``RuleError`` and ``ModelFailed``, and unchanged what only the compiled model raises.
    """
    calls = Calls(built, lengths, options or {}, seed)
    progress("calls")
    seen = calls.run(looking=True)
    found = Bisection(built.label, calls.lengths, seen)
    if seen.call is None:
        return found
    calls.lengths = calls.lengths[: seen.last + 1]
    search = _Search(calls, seen, progress)
    found = replace(found, culprit=search.culprit(), trials=tuple(search.trials))
    if out is not None:
        progress("reproduction")
        assert found.culprit is not None
        found = replace(found, repro=write_repro(out, found.culprit.fault, seen, calls.options, recipe))
    return found


class _Search:
    def __init__(self, calls: Calls, seen: Seen, progress: Callable[[str], None]) -> None:
        self.trials: list[Trial] = []
        self._calls = calls
        self._seen = seen
        self._progress = progress

    def culprit(self) -> Culprit:
        if (difference := self._seen.in_graphs) is not None:
            if (itself := self._calls.eager_twice()) is not None:
                return Culprit(
                    "model",
                    f"Eager code differs from itself: {itself.where} {itself.what}, of two copies of the model that "
                    f"get equal inputs one after the other. It changes state outside of the model that it reads, or "
                    f"draws numbers from a generator of its own: nothing can be compared with it.",
                )
            return Culprit(
                "dynamo",
                f"The graphs that Dynamo traced, run as they are, differ from the model: {difference.where} "
                f"{difference.what}. It is not this backend.",
            )
        if (fault := self._of_faults()) is not None:
            return fault
        # Right without captures: passes come last, as without one that marks breaks other things are captured.
        captured = self._trial("nothing captured, no segment compiled", capture="off", segment_compiler="eager")
        searches = (self._of_breaks, self._of_segments, self._of_passes)
        found = (search() for search in (searches if captured else searches[::-1]))
        return next((culprit for culprit in found if culprit is not None), None) or self._unknown()

    def _trial(self, changed: str, **given: Any) -> bool:
        self._progress(changed)
        seen = self._calls.run(**given)
        largest = 0.0 if seen.difference is None else seen.difference.largest
        self.trials.append(Trial(changed, largest))
        return seen.difference is None

    def _of_faults(self) -> Culprit | None:
        """A fault that a check has found; of a segment only if the numbers are right without its replay or its code."""
        tried: set[int] = set()
        for _, fault in self._seen.faults:
            if fault.step_kind == "break":
                return Culprit("break", f"{fault.place}: {fault.what}", fault)
            if fault.kind == "compiler" and self._trial("no segment compiled", segment_compiler="eager"):
                return Culprit("operation", fault.place, fault)
            if fault.step in tried:
                continue
            tried.add(fault.step)
            only = fault.step
            if self._trial(f"segment {only} run eagerly", eagerly=lambda step, only=only: step.index == only):
                return Culprit("operation", fault.place, fault)
        # Not by itself: others go on with what it has left in padded rows, say, or have a fault of their own.
        if tried and self._trial("all segments run eagerly", eagerly=lambda step: True):
            first = {fault.step: fault for _, fault in reversed(self._seen.faults) if fault.step in tried}
            places = [first[step].place for step in sorted(first)]
            return Culprit("operation", "; and ".join(places), first[min(first)])
        return None

    def _of_passes(self) -> Culprit | None:
        left_out = Options.parse(self._calls.options).disable_passes
        changed = {p.name for plan in self._seen.plans for p in plan.passes if p.changes}
        for name in sorted(changed):
            if self._trial(f"without pass {name}", disable_passes=[*left_out, name]):
                return Culprit("pass", f"{name}: without it all calls are equal")
        return None

    def _of_breaks(self) -> Culprit | None:
        """The first value between steps that differs, if a break gave it."""
        first = self.first_wrong()
        if first is None or first.step_kind != "break":
            return None
        return Culprit("break", f"{first}: what it is given is eager's, and what it gives is not")

    def _of_segments(self) -> Culprit | None:
        """The last of the shortest run of first segments that has to run eagerly."""
        steps = sorted({step.index for plan in self._seen.plans for step in plan.segments})
        if not steps or not self._trial("all segments run eagerly", eagerly=lambda step: True):
            return None
        good, bad = len(steps), 0
        while good - bad > 1:
            middle = (good + bad) // 2
            last = steps[middle - 1]
            if self._trial(f"segments up to {last} run eagerly", eagerly=lambda step, last=last: step.index <= last):
                good = middle
            else:
                bad = middle
        return Culprit("segment", f"segment {steps[good - 1]}: run eagerly, with those before it, it gives eager's")

    def _unknown(self) -> Culprit:
        first = self.first_wrong()
        where = f" The first value that differs is that of {first}." if first else ""
        return Culprit("unknown", f"No pass, break or segment makes the difference by itself.{where}")

    def first_wrong(self) -> Boundary | None:
        """The first value between steps that differs, beyond rounding if values may be rounded."""
        wrong = (b for b in self._seen.boundaries if b.difference is not None and not b.difference.close)
        return next(wrong, None)
