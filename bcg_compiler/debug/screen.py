"""Plans and reports for a terminal."""

import os
import re
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bcg_compiler.compat.dynamo_log import CodePlace, Uncompiled
from bcg_compiler.debug.hoisted import about_hoisted
from bcg_compiler.debug.padded import about_padding, ladder_use, unpadded_view
from bcg_compiler.debug.reasons import meaning, meaning_of_eager_run, remedies
from bcg_compiler.debug.run import Ran, RunReport
from bcg_compiler.debug.words import MOST_INPUTS, MOST_LINES, common_text, count, indented, short_path, some
from bcg_compiler.facts.node import Source
from bcg_compiler.plan import Plan, Step, StepReason

#: A pattern of steps that comes at least this often in a row is shown once.
FOLD_FROM = 3

#: How many are listed: mismatches, operations of one break.
MOST_MISMATCHES = 10
MOST_OPS = 5


class Block(NamedTuple):
    """A pattern of ``period`` steps that begins at step ``start`` and comes ``repeats`` times in a row."""

    start: int
    period: int
    repeats: int


def fold(keys: Sequence[Hashable]) -> list[Block]:
    """Cut a sequence into patterns that repeat, so that the layers of a deep model are shown once."""
    blocks = []
    start = 0
    while start < len(keys):
        best = Block(start, 1, 1)
        for period in range(1, (len(keys) - start) // FOLD_FROM + 1):
            repeats = _repeats(keys, start, period)
            if repeats >= FOLD_FROM and repeats * period > best.repeats * best.period:
                best = Block(start, period, repeats)
        blocks.append(best)
        start += best.period * best.repeats
    return blocks


def _repeats(keys: Sequence[Hashable], start: int, period: int) -> int:
    repeats = 1
    while keys[start : start + period] == keys[start + repeats * period : start + (repeats + 1) * period]:
        repeats += 1
    return repeats


# -- plans ------------------------------------------------------------------------------------------------------


def steps_table(plan: Plan) -> Table:
    """The steps of a plan; a pattern that repeats is shown once."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("steps", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("ops", "kernels"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("where", overflow="fold")
    for block in fold([step_key(step) for step in plan.steps]):
        for position in range(block.period):
            same = plan.steps[block.start + position :: block.period][: block.repeats]
            table.add_row(*_row(same), style="" if same[0].kind == "segment" else "yellow")
        if block.repeats > 1:
            last = block.start + block.period * block.repeats - 1
            these = f"these {block.period} steps" if block.period > 1 else "this step"
            table.add_row("", "", "", "", "", Text(f"↑ {these} {block.repeats} times, up to step {last}", style="dim"))
    return table


def _row(same: Sequence[Step]) -> tuple[str, ...]:
    step = same[0]
    number = f"{step.index}" + (" …" if len(same) > 1 else "")
    where = common_text([span(step) for step in same])
    if step.kind == "break":
        codes = ", ".join(dict.fromkeys(reason.code for reason in step.reasons)) or "no kernel"
        where = f"{codes}: {ops_of(step)} in {where}"
    return (number, step.kind, str(len(step.nodes)), str(step.kernels), step.unit, where)


def step_key(step: Step) -> Hashable:
    """Steps of equal keys look alike in the table."""
    reasons = tuple((r.code, r.op) for r in step.reasons)
    return step.kind, len(step.nodes), step.kernels, step.unit, ops_of(step) if step.kind == "break" else "", reasons


def span(step: Step) -> str:
    """The modules from the first operation of a step to its last one."""
    first, last = step.nodes[0].module or "the model itself", step.nodes[-1].module or "the model itself"
    return first if first == last else f"{first} → {last}"


def ops_of(step: Step) -> str:
    """The operations that are why the step is a break."""
    names = dict.fromkeys(r.op for r in step.reasons if r.code != "small_segment") or {n.op: None for n in step.nodes}
    return ", ".join(some(list(names), MOST_OPS))


def plan_summary(plan: Plan) -> str:
    """Segments and breaks in one line."""
    different = f" ({plan.unique_units} different)" if plan.segments else ""
    kernels = sum(step.kernels for step in plan.segments)
    total = sum(step.kernels for step in plan.steps)
    inside = f", {kernels} of {total} kernels inside segments" if total else ""
    return f"{count(len(plan.segments), 'segment')}{different}, {count(len(plan.breaks), 'break')}{inside}"


def plan_inputs(plan: Plan) -> str:
    """What a graph is given, in one line."""
    values = plan.by_ordinal
    given = [values[ordinal] for ordinal in plan.inputs]
    tensors = [str(spec) for value in given if value.kind == "input" for spec in value.specs]
    held = sum(value.kind == "static" for value in given)
    return ", ".join([*some(tensors, MOST_INPUTS), f"{count(held, 'tensor')} of the model"])


def plans_view(plans: Sequence[Plan | None], runs: Sequence[str] = ()) -> Group:
    """All graphs with their steps. Graphs that look alike but for their sizes share one table.

    ``runs`` says of each graph how it ran.
    """
    parts: list[RenderableType] = []
    for numbers in _alike(plans):
        for number in numbers:
            plan = plans[number]
            title = Text(f"Graph {number + 1} of {len(plans)}: ", style="bold")
            title.append(plan_summary(plan) if plan else "runs unsplit")
            parts.append(title)
            about = ([f"inputs: {plan_inputs(plan)}"] if plan else []) + list(runs[number : number + 1])
            parts.append(indented(2, Text("; ".join(about), style="dim")))
            lines = (*about_hoisted(plan), *about_padding(plan), *_pass_notes(plan)) if plan else ()
            parts += [indented(2, Text(line, style="dim")) for line in lines]
        last = plans[numbers[-1]]
        if last is None or not last.steps:
            parts.append(Text())
        else:
            if len(numbers) > 1:
                parts.append(Text(f"  Their steps are the same; those of graph {numbers[-1] + 1}:", style="dim"))
            parts.append(Padding(steps_table(last), (0, 0, 1, 2), expand=False))
    return Group(*parts)


def _pass_notes(plan: Plan) -> Iterator[str]:
    """What passes have to say."""
    for found in plan.passes:
        yield from (f"pass {found.name}: {note}" for note in folded(found.notes))


def folded(notes: Sequence[str]) -> Iterator[str]:
    """Notes that differ in their numbers, those of layers, as one line."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\d+", "0", note), []).append(note)
    for same in alike.values():
        times = f" ({count(len(same), 'time')})" if len(same) > 1 else ""
        yield f"{common_text(same)}{times}"


def _alike(plans: Sequence[Plan | None]) -> list[list[int]]:
    """The numbers of plans that look alike, together."""
    found: dict[Hashable, list[int]] = {}
    for number, plan in enumerate(plans):
        found.setdefault(_look(plan), []).append(number)
    return list(found.values())


def _look(plan: Plan | None) -> Hashable:
    if plan is None:
        return None
    return tuple((step.kind, span(step), ops_of(step) if step.kind == "break" else "") for step in plan.steps)


def breaks_view(plans: Sequence[Plan | None]) -> Group:
    """Why there are breaks: by reason code, with the user's lines and what would remove them.

    Of graphs that look alike, as ``plans_view`` shows them, one is counted.
    """
    shown = (plans[numbers[-1]] for numbers in _alike(plans))
    reasons = [reason for plan in shown if plan for step in plan.breaks for reason in step.reasons]
    parts: list[RenderableType] = []
    by_code = sorted(reasons, key=lambda r: r.code)
    for code, group in groupby(by_code, key=lambda r: r.code):
        found = list(group)
        title = Text(code, style="bold yellow")
        title.append(f" {count(len(found), 'time')}: {meaning(code).why}", style="not bold default")
        parts += [title, *_reason_lines(found)]
        for remedy in remedies(found):
            parts.append(indented(2, Text.assemble(("To remove it: ", "green"), remedy)))
        parts.append(Text())
    return Group(*parts)


def _reason_lines(reasons: list[StepReason]) -> Iterator[RenderableType]:
    """Each sentence once, with the lines it is about and the modules at each line."""
    for text in dict.fromkeys(r.text for r in reasons):
        yield indented(2, Text(text))
        places: dict[Source | None, list[str]] = {}
        for reason in reasons:
            if reason.text == text:
                places.setdefault(reason.source, []).append(reason.module)
        for source, modules in list(places.items())[:MOST_LINES]:
            where = common_text(list(dict.fromkeys(modules))) or "the model itself"
            line = f"{short_path(source.file)}:{source.line}" if source else "unknown line"
            yield indented(4, Text(f"{line}, in {where}", style="cyan"))
            if source and source.code:
                yield indented(6, Text(source.code, style="dim"))
        if (rest := len(places) - MOST_LINES) > 0:
            yield indented(4, Text(f"and {count(rest, 'line')} more", style="cyan"))


# -- Dynamo -----------------------------------------------------------------------------------------------------


def uncompiled_view(uncompiled: Uncompiled) -> Group:
    """What Dynamo left to plain Python, in plain words."""
    if not uncompiled:
        return Group(Text("Dynamo compiled the whole model: no graph breaks of its own, no recompile limit."))
    parts: list[RenderableType] = [
        Text("Dynamo did not compile the whole model. What is listed here runs as plain Python:", style="bold red")
    ]
    for found in uncompiled.graph_breaks:
        parts.append(Text(f"  {found.reason}: Dynamo cut the graph, {count(found.count, 'time')}"))
        parts += [_place(place) for place in found.places]
    if uncompiled.skipped:
        parts.append(Text("  It could not cut these functions, so they run uncompiled as a whole:"))
        parts += [_place(place) for place in uncompiled.skipped]
    if uncompiled.limit_hits:
        times = count(uncompiled.limit_hits, "function")
        parts.append(
            Text(
                f"  It hit its recompile limit on {times}, which then ran uncompiled for every new kind of input "
                "(torch._dynamo.config.recompile_limit):"
            )
        )
        parts += [_place(place) for place in uncompiled.given_up]
    return Group(*parts)


def _place(place: CodePlace) -> RenderableType:
    text = Text(f"{short_path(place.file)}:{place.line}", style="cyan")
    if place.name:
        text.append(f" {place.name}")
    if place.detail:
        text.append(f" (last recompiled because: {place.detail})", style="dim")
    return indented(4, text)


# -- a run ------------------------------------------------------------------------------------------------------


def report_view(report: RunReport) -> Group:
    """The report of a run, the verdict last."""
    plans = [ran.plan for ran in report.ran]
    runs = [_how_it_ran(ran) for ran in report.ran]
    parts: list[RenderableType] = [plans_view(plans, runs)]
    if not plans:
        parts.append(Text("Nothing was compiled: Dynamo found no graph in the model.", style="bold red"))
    if any(plan and plan.breaks for plan in plans):
        parts.append(breaks_view(plans))
    parts.append(unpadded_view(plans))
    if report.ladder is not None:
        parts += [*ladder_use(report), Text()]
    parts.append(uncompiled_view(report.uncompiled))
    captures, replays = sum(ran.captures for ran in report.ran), sum(ran.replays for ran in report.ran)
    for device in sorted({ran.captured_on for ran in report.ran} - {""}):
        said = DEVICES[device]
        parts.append(Text(f"{count(captures, 'capture')}, {count(replays, 'replay')}, {said}", style="bold"))
    for code, times in report.eager_runs().items():
        why, remedy = meaning_of_eager_run(code)
        parts.append(Text(f"{count(times, 'run')} of graphs without replay ({code}): {why}. {remedy}".rstrip()))
    parts += [*_times(report), Text(), *_verdict(report)]
    return Group(*parts)


#: What captures are made of.
DEVICES = {
    "cuda": "as CUDA graphs.",
    "emulated": "on the emulated device: it shows the faults of CUDA graphs without a GPU, and not their speed.",
}


def _how_it_ran(ran: Ran) -> str:
    parts = [f"ran {count(times, 'time')} eagerly ({code})" for code, times in ran.eager_runs.items()]
    if ran.captures:
        parts.append(f"captured {count(ran.captures, 'time')}, replayed {count(ran.replays, 'time')}")
    return ", ".join(parts)


def _times(report: RunReport) -> Iterator[RenderableType]:
    if report.compiling:
        spent = f"{sum(report.compiling):.1f} s"
        yield Text(f"Compiling took {spent}, in {count(len(report.compiling), 'call')} of {report.calls}.")
    if report.timing:
        timing = report.timing
        low, middle, high = timing.speed()
        yield Text(
            f"Time of one call: {_milliseconds(timing.compiled)} compiled, {_milliseconds(timing.eager)} eager. "
            f"That is {middle:.2f} times eager's speed (half of the pairs: {low:.2f} to {high:.2f})."
        )
        lengths = ", ".join(map(str, timing.lengths))
        how = (
            f"Medians over {count(len(timing.compiled), 'pair')} of calls, compiled and eager in turn, at lengths "
            f"{lengths}. The first two calls of each length are not counted."
        )
        yield indented(2, Text(how, style="dim"))


def _verdict(report: RunReport) -> Iterator[RenderableType]:
    for mismatch in report.mismatches[:MOST_MISMATCHES]:
        what = mismatch.difference
        where = what.where or "the result"
        yield Text(f"  call {mismatch.call}, length {mismatch.length}: {where} {what.what}, by {gap(what.largest)}")
    if (rest := len(report.mismatches) - MOST_MISMATCHES) > 0:
        yield Text(f"  … and {rest} more")
    for left in report.state.differences[:MOST_MISMATCHES]:
        yield Text(f"  after all calls {left.where} {left.what}, by {gap(left.largest)}")
    if report.equal:
        tensors = (
            f"{count(report.tensors, 'result tensor')}, {count(report.state.tensors, 'tensor')} of the model afterwards"
        )
        how = "bit for bit"
        if report.largest:
            how = f"{report.calls - report.close} bit for bit and {report.close} within the tolerance of the dtype"
        yield Text(
            f"EQUAL  {report.calls} of {count(report.calls, 'call')}, {how} ({tensors}). "
            f"Largest difference: {report.largest:.3g}.",
            style="bold green",
        )
        if report.uncompiled:
            yield Text("But part of the model was not compiled by Dynamo, see above.", style="bold red")
        return
    state = "" if report.state.equal else ", and the calls left other tensors in the model"
    yield Text(
        f"DIFFERENT  {report.wrong} of {count(report.calls, 'call')} differ from eager{state}. "
        f"Largest absolute difference: {gap(report.largest)}.",
        style="bold red",
    )
    if report.tolerant:
        yield Text(
            "Kernels add up in another order in a bucket, or where a compiler has fused them: so much is tolerated as "
            "the dtype rounds, and no more."
        )
    else:
        yield Text("Segments run the same kernels as eager, so every bit must be equal; no difference is tolerated.")


def gap(largest: float) -> str:
    """A difference as text."""
    return f"{largest:.3g}" if largest != float("inf") else "no number (NaN, or not comparable)"


def _milliseconds(seconds: Sequence[float]) -> str:
    median = statistics.median(seconds) * 1e3
    return f"{median:.3g} ms" if median < 1000 else f"{median:.0f} ms"


def header(**lines: str) -> Table:
    """Named lines, one below the other."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in lines.items():
        if text:
            table.add_row(Text(name, style="dim"), Text(text))
    return table


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal; 120 columns where there is none, as in a file or a log."""
    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = 120
    return found


def explanation_summary(plans: Sequence[Plan | None]) -> str:
    """All graphs together, in one line."""
    made = [plan for plan in plans if plan]
    units = {step.unit for plan in made for step in plan.segments}
    reasons = sum((plan.reasons() for plan in made), Counter())
    by_code = ", ".join(f"{code} {number}" for code, number in reasons.most_common())
    steps = f"{count(sum(len(p.segments) for p in made), 'segment')} ({len(units)} different)"
    breaks = count(sum(len(p.breaks) for p in made), "break")
    return f"{count(len(plans), 'graph')}, {steps}, {breaks}" + (f": {by_code}" if by_code else "")
