"""What two compilations of a model differ in: the plans that they gave, compared."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bcg_compiler.debug import memory, screen
from bcg_compiler.debug.reasons import reasons_of, remedies
from bcg_compiler.debug.words import common_text, count, indented, short_path, some
from bcg_compiler.errors import BcgError
from bcg_compiler.plan import Plan, Step, StepReason, plan_from_json, plan_text

Plans = Sequence[Plan | None]

#: How many are shown: changes of one kind, the user's lines for one of them, and lines of the texts, where nothing else
#: tells the difference.
MOST_CHANGES = 20
MOST_SOURCES = 3
MOST_LINES = 40


class DiffError(BcgError):
    """Plans that cannot be read."""


@dataclass(frozen=True)
class Number:
    """Something that is counted, in both; ``None`` where it is not known."""

    name: str
    before: int | None
    after: int | None

    @property
    def differs(self) -> bool:
        """Whether it is another one."""
        return self.before != self.after


@dataclass(frozen=True)
class Change:
    """Something that only one of both has (``before`` or ``after`` is empty), or that is another thing in the other.

    ``what`` it is about, and ``where``. Equal changes in several layers are one, ``times`` of them. ``reason`` is that
    of a break, or of a graph that is not padded.
    """

    before: str
    after: str
    what: str
    where: str
    times: int = 1
    reason: StepReason | None = None


@dataclass(frozen=True)
class GraphDiff:
    """What one graph differs in.

    ``numbers``  of the graph, also those that are alike
    ``reasons``  operations that are outside of segments, or speak against padding, in one of both only, or for another
                 reason
    ``units``    segments, by the key of their computation
    ``others``   what else differs, a line each
    """

    numbers: tuple[Number, ...]
    reasons: tuple[Change, ...] = ()
    units: tuple[Change, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.reasons or self.units or self.others or any(number.differs for number in self.numbers))


def plans_of(name: str, plan: Callable[[str], Plans]) -> Plans:
    """The plans of a file or the folder of a dump, where there is one of that name; else ``plan`` is asked: a model."""
    path = Path(name)
    if path.is_file() or path.suffix == ".json" or (path.is_dir() and not (path / "config.json").exists()):
        return read_plans(path)
    return plan(name)


def read_plans(path: Path) -> list[Plan | None]:
    """The plans of a file that ``bcg explain --json`` wrote, or of the folder of a dump.

    Of a graph that a dump shows planned several times it is the last plan. Raises ``DiffError``.
    """
    if path.is_dir():
        graphs = sorted({file.parent for file in path.glob("*/plan.json")}) or [path]
        files = [max(graph.glob("**/plan.json"), key=_age, default=None) for graph in graphs]
        found = [plan for file in files if file is not None for plan in _read(file)]
        if not found:
            raise DiffError(f"{path} holds no plan.json: it is not the folder of a dump.")
        return found
    return _read(path)


def _age(file: Path) -> int:
    """How often the graph was planned before: plans made anew lie in ``again_1`` and so on."""
    again = re.fullmatch(r"again_(\d+)", file.parent.name)
    return int(again[1]) if again else 0


def _read(file: Path) -> list[Plan | None]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DiffError(f"Cannot read plans from {file}: {error.strerror}.") from None
    except ValueError:
        raise DiffError(f"{file} is not JSON. Write plans with: bcg explain MODEL --json > FILE") from None
    try:
        plans = found if isinstance(found, list) else [found]
        return [None if plan is None else plan_from_json(json.dumps(plan)) for plan in plans]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DiffError(
            f"{file} holds no plans of this version of bcg_compiler ({type(error).__name__}: {error}). Write them "
            "anew: bcg explain MODEL --json > FILE"
        ) from None


# -- comparing --------------------------------------------------------------------------------------------------


def diff_plans(before: Plans, after: Plans) -> list[GraphDiff]:
    """What each graph differs in, in the order of the graphs."""
    return [_diff(old, new) for old, new in zip_longest(before, after)]


def _diff(old: Plan | None, new: Plan | None) -> GraphDiff:
    if old is None or new is None:
        missing = [name for name, plan in (("before", old), ("after", new)) if plan is None]
        others = (f"{missing[0]} there is no such graph, or it runs unsplit",) if len(missing) == 1 else ()
        return GraphDiff((), others=others)
    numbers = tuple(
        Number(name, before, after) for (name, before), (_, after) in zip(_numbers(old), _numbers(new), strict=True)
    )
    reasons = tuple(_folded(_reason_changes(old, new)))
    units = tuple(_folded(_unit_changes(old, new)))
    found = GraphDiff(numbers, reasons, units, tuple(_others(old, new)))
    if found.equal and plan_text(old) != plan_text(new):
        return GraphDiff(numbers, others=tuple(_lines(old, new)))
    return found


def _numbers(plan: Plan) -> list[tuple[str, int | None]]:
    forecast = memory.forecast_of(plan)
    return [
        ("segments", len(plan.segments)),
        ("breaks", len(plan.breaks)),
        ("units to compile", plan.unique_units),
        ("kernels", sum(step.kernels for step in plan.steps)),
        ("kernels in segments", sum(step.kernels for step in plan.segments)),
        ("operations", sum(len(step.nodes) for step in plan.steps)),
        ("buckets", len(plan.padding.buckets) if plan.padding else 0),
        ("bridges", len(plan.bridges)),
        ("bytes forecast", forecast.total if forecast else None),
    ]


def _reason_changes(old: Plan, new: Plan) -> Iterator[Change]:
    """Operations by module and name, the first of one name in a module with the first of the other plan; those of one
    module that have become the same are one change.
    """
    before, after = _reasons(old), _reasons(new)
    found: dict[tuple[str, str, str], list[StepReason]] = {}
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if (one and (one.code, one.text)) != (other and (other.code, other.text)):
            became = one.code if one else "", other.code if other else ""
            reason = other or one
            assert reason is not None
            found.setdefault((*became, reason.module), []).append(reason)
    for (was, now, module), reasons in found.items():
        ops = ", ".join(some(list(dict.fromkeys(reason.op for reason in reasons)), screen.MOST_OPS))
        yield Change(was, now, ops, module, len(reasons), reasons[0])


def _reasons(plan: Plan) -> dict[tuple[str, str, int], StepReason]:
    met = Counter[tuple[str, str]]()
    found = {}
    for reason in reasons_of(plan):
        place = reason.module, reason.op
        found[(*place, met[place])] = reason
        met[place] += 1
    return found


def _unit_changes(old: Plan, new: Plan) -> Iterator[Change]:
    before, after = _by_unit(old), _by_unit(new)
    for key in dict.fromkeys((*before, *after)):
        fewer, more = before.get(key, []), after.get(key, [])
        if len(fewer) == len(more):
            continue
        step = (fewer or more)[0]
        where = common_text([screen.span(step) for step in fewer or more])
        old_times, new_times = (count(len(steps), "time") if steps else "" for steps in (fewer, more))
        yield Change(
            old_times, new_times, f"{key}: {count(len(step.nodes), 'op')}, {count(step.kernels, 'kernel')}", where
        )


def _by_unit(plan: Plan) -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = {}
    for step in plan.segments:
        found.setdefault(step.unit, []).append(step)
    return found


def _others(old: Plan, new: Plan) -> Iterator[str]:
    for name, before, after in (
        ("padding", _padding(old), _padding(new)),
        ("buckets", _buckets(old), _buckets(new)),
        ("not captured", old.uncaptured and old.uncaptured.code, new.uncaptured and new.uncaptured.code),
        ("device", old.device, new.device),
        ("inputs", screen.plan_inputs(old), screen.plan_inputs(new)),
        ("hoisted plans", len(old.hoisted), len(new.hoisted)),
    ):
        if before != after:
            yield f"{name}: {before or 'none'} → {after or 'none'}"
    changes = [{p.name: p.changes for p in plan.passes} for plan in (old, new)]
    for name in dict.fromkeys((*changes[0], *changes[1])):
        before, after = (found.get(name, 0) for found in changes)
        if before != after:
            yield f"pass {name}: {count(before, 'change')} → {count(after, 'change')}"


def _padding(plan: Plan) -> str:
    return f"{plan.padding.proof}, from {plan.padding.least} live rows on" if plan.padding else ""


def _buckets(plan: Plan) -> str:
    return ", ".join(map(str, plan.padding.buckets)) if plan.padding else ""


def _lines(old: Plan, new: Plan) -> Iterator[str]:
    """The lines of the stable texts that differ, but for the first one, which holds their hashes."""
    before, after = (plan_text(plan).splitlines()[1:] for plan in (old, new))
    lines = [
        line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++", "@@ ")
    ]
    yield from lines[:MOST_LINES]
    if (rest := len(lines) - MOST_LINES) > 0:
        yield f"… and {count(rest, 'line')} more"


def _folded(changes: Iterable[Change]) -> Iterator[Change]:
    """Changes that differ in the numbers of their modules only, those of layers, as one."""
    alike: dict[Hashable, list[Change]] = {}
    for change in changes:
        where = re.sub(r"\d+", "*", change.where)
        alike.setdefault((change.before, change.after, change.what, where), []).append(change)
    for same in alike.values():
        where = common_text([change.where for change in same])
        yield replace(same[0], where=where, times=sum(change.times for change in same))


# -- for a terminal ---------------------------------------------------------------------------------------------


def diff_view(graphs: Sequence[GraphDiff]) -> Group:
    """All that differs, and the verdict last."""
    parts: list[RenderableType] = []
    for number, graph in enumerate(graphs, 1):
        if graph.equal:
            continue
        parts += [Text(f"Graph {number} of {len(graphs)}", style="bold"), numbers_table(graph.numbers)]
        if graph.reasons:
            parts.append(Text("  reasons", style="dim"))
            parts += _change_lines(graph.reasons)
        if graph.units:
            parts.append(Text("  segments", style="dim"))
            parts += _change_lines(graph.units)
        parts += [indented(2, Text(line, style=_style(line))) for line in graph.others]
        parts.append(Text())
    different = sum(not graph.equal for graph in graphs)
    if different:
        parts.append(Text(f"DIFFERENT  {different} of {count(len(graphs), 'graph')}.", style="bold red"))
    else:
        parts.append(Text(f"THE SAME  {count(len(graphs), 'graph')}, no difference.", style="bold green"))
    return Group(*parts)


def numbers_table(numbers: Iterable[Number]) -> Table:
    """The numbers that differ, in both, and their difference."""
    table = Table(box=None, pad_edge=True, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("before", "after", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for number in numbers:
        if number.differs:
            table.add_row(f"  {number.name}", _number(number.before), _number(number.after), _gap(number))
    return table


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _gap(number: Number) -> str:
    return "" if number.before is None or number.after is None else f"{number.after - number.before:+,}"


def _change_lines(changes: Sequence[Change]) -> Iterator[RenderableType]:
    """What is new (+), gone (-) or another thing (~), with the user's line and what would remove it."""
    for change in changes[:MOST_CHANGES]:
        sign = "+" if not change.before else "-" if not change.after else "~"
        became = " → ".join(filter(None, (change.before, change.after)))
        times = f", {count(change.times, 'time')}" if change.times > 1 else ""
        where = f" in {change.where}" if change.where else ""
        yield indented(2, Text.assemble((f"{sign} {became}", _style(sign)), f": {change.what}{where}{times}"))
        if change.reason is not None:
            yield from reason_lines([change.reason], remedy=False)
    if (rest := len(changes) - MOST_CHANGES) > 0:
        yield indented(2, Text(f"… and {rest} more"))
    for found in remedies(change.reason for change in changes if change.reason is not None and change.after):
        yield indented(2, Text.assemble(("To change it: ", "green"), found))


def reason_lines(reasons: Sequence[StepReason], remedy: bool) -> Iterator[RenderableType]:
    """Why, the user's lines, and what would remove it."""
    for text in list(dict.fromkeys(reason.text for reason in reasons))[:MOST_SOURCES]:
        yield indented(4, Text(text))
    sources = dict.fromkeys(reason.source for reason in reasons if reason.source is not None)
    for source in list(sources)[:MOST_SOURCES]:
        yield indented(6, Text(f"{short_path(source.file)}:{source.line}", style="cyan"))
        if source.code:
            yield indented(8, Text(source.code, style="dim"))
    for found in remedies(reasons) if remedy else ():
        yield indented(4, Text.assemble(("To change it: ", "green"), found))


def _style(line: str) -> str:
    return {"+": "yellow", "~": "yellow", "-": "green"}.get(line[:1], "")
