"""What is padded, by which proof, at what price, and why the rest is not: for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bcg_compiler.debug.reasons import UNPADDED
from bcg_compiler.debug.run import RunReport
from bcg_compiler.debug.words import MOST_INPUTS, MOST_LINES, count, indented, short_path, some
from bcg_compiler.facts.node import RowVerdict
from bcg_compiler.plan import Plan
from bcg_compiler.plan.padding import has_rows, label

#: How many buckets of one ladder are listed.
MOST_BUCKETS = 16

#: By what it is known that padding is safe.
PROOFS = {
    "row_wise": "row_wise, shown from the graph",
    "causal": "causal, shown from the graph",
    "assumed": "none, it is assumed (assume_rows_independent)",
}


def about_padding(plan: Plan) -> Iterator[str]:
    """Whether inputs may be padded, whether and how they are, and what of the options has no effect."""
    yield from map(_about_rows, plan.rows)
    padding = plan.padding
    if padding is not None:
        ordinal, dim = padding.place
        where = f"dimension {dim} of {label(plan.value(ordinal))}"
        buckets = ", ".join(some([*map(str, padding.buckets)], MOST_BUCKETS))
        yield f"ladder: {padding.symbol}, {where}, is padded to {count(len(padding.buckets), 'bucket')}: {buckets}"
        yield f"proof: {PROOFS[padding.proof]}; from {count(padding.least, 'live row')} on"
        padded = (slot for slot in plan.slots if has_rows(plan.value(slot.ordinal).specs, padding.symbol))
        policies = [f"{label(plan.value(slot.ordinal))}: {slot.policy}" for slot in padded]
        yield f"padded rows: {', '.join(some(policies, MOST_INPUTS))}"
    if plan.unpadded is not None:
        yield f"ladder: not used ({plan.unpadded.code}), exact shapes are captured"
    for rule in plan.broken_rules:
        yield f"{rule.severity} {rule.code}: {rule}"


def _about_rows(rows: RowVerdict) -> str:
    """Whether inputs may be padded along one of their sizes, in a sentence."""
    if rows.kind == "row_wise":
        return "rows: padding never reaches live rows, whatever it holds"
    if rows.kind == "causal":
        return "rows: padding never reaches live rows as long as it is finite (causal)"
    where = f" in {rows.module}" if rows.module else ""
    line = f" ({short_path(rows.source.file)}:{rows.source.line})" if rows.source else ""
    return f"rows: padding may reach live rows: {rows.text}: {rows.op}{where}{line}"


def unpadded_view(plans: Sequence[Plan | None]) -> Group:
    """Why a ladder is not used, with the user's lines and what would change it; each reason once."""
    parts: list[RenderableType] = []
    reasons = {plan.unpadded: plan for plan in plans if plan is not None and plan.unpadded is not None}
    for code, group in groupby(sorted(reasons, key=lambda reason: reason.code), key=lambda reason: reason.code):
        why, remedy = UNPADDED[code]
        title = Text(code, style="bold yellow")
        title.append(f", so exact shapes are captured: {why}", style="not bold default")
        parts.append(title)
        for reason in islice(group, MOST_LINES):
            parts.append(indented(2, Text(reason.text)))
            mixing = (rows for rows in reasons[reason].rows if rows.kind == "mixing" and rows.text in reason.text)
            for source in (rows.source for rows in mixing):
                if source is not None:
                    parts.append(indented(4, Text(f"{short_path(source.file)}:{source.line}", style="cyan")))
                    parts.append(indented(6, Text(source.code, style="dim")))
        parts += [indented(2, Text.assemble(("To change it: ", "green"), remedy)), Text()]
    return Group(*parts)


def ladder_use(report: RunReport) -> Iterator[RenderableType]:
    """What each graph made of the ladder, in numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("graph", no_wrap=True)
    table.add_column("sizes", no_wrap=True)
    for name in ("captures", "replays", "eager runs", "bytes forecast", "bytes measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, ran in enumerate(report.ran, 1):
        padding = ran.plan.padding if ran.plan else None
        sizes = f"{count(len(padding.buckets), 'bucket')} ({padding.proof})" if padding else "exact"
        numbers = (ran.captures, ran.replays, sum(ran.eager_runs.values()), ran.forecast, ran.measured)
        table.add_row(f"{number}", sizes, *(f"{n:,}" for n in numbers))
    yield table
    if report.live:
        ratio = f"{report.padded / report.live:.2%}"
        said = f"Padding: {report.padded:,} tokens over {report.live:,} live ones of calls in buckets, {ratio}."
        yield indented(2, Text(said))
    if any(ran.captured_on == "emulated" for ran in report.ran):
        said = "On the emulated device no capture shares memory with another one, so more is measured than forecast."
        yield indented(2, Text(said, style="dim"))
