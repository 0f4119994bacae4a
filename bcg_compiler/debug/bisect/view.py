"""What a bisection has found, for a terminal."""

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bcg_compiler.checks.fault import KINDS
from bcg_compiler.debug.bisect.reference import Boundary
from bcg_compiler.debug.bisect.search import Bisection
from bcg_compiler.debug.words import count, indented, short_path

#: How many values between steps are listed.
MOST_BOUNDARIES = 12


def bisection_view(found: Bisection) -> Group:
    """What was compared, numbers of values between steps, trials, the culprit and the reproduction."""
    seen = found.seen
    parts: list[RenderableType] = []
    if found.culprit is None:
        parts.append(
            Text(
                f"EQUAL  {count(len(found.lengths), 'call')} ({seen.tensors:,} tensors of results, inputs and "
                f"buffers), {count(seen.replays, 'replay')} with checks in every segment and break: nothing differs "
                "from eager.",
                style="bold",
            )
        )
        if not seen.replays:
            parts.append(Text("Nothing was replayed, so only eager runs were compared: bcg run says why."))
        faults = {fault.place: fault.what for _, fault in reversed(seen.faults)}.items()
        parts += [Text(f"Seen without effect on results: {place}: {what}") for place, what in faults]
        return Group(*parts)
    difference = seen.difference
    assert difference is not None and seen.call is not None
    parts += [
        Text(
            f"DIFFERS  call {seen.call + 1} of {len(found.lengths)}, at length {found.lengths[seen.call]}: "
            f"{difference.where} {difference.what}, at most by {difference.largest:.3g}",
            style="bold",
        ),
        Text(),
    ]
    if seen.boundaries:
        parts += [_boundaries(seen.boundaries), Text()]
    if found.trials:
        parts += [_trials(found), Text()]
    parts += _culprit(found)
    return Group(*parts)


def _boundaries(boundaries: tuple[Boundary, ...]) -> Table:
    """The values around the first one that differs."""
    wrong = [b.difference is not None and not b.difference.close for b in boundaries]
    first = wrong.index(True) if True in wrong else 0
    start = max(0, first - 2)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for title in ("value between steps", "in", "line", "replay - eager"):
        table.add_column(title, overflow="fold", justify="right" if title.startswith("replay") else "left")
    for boundary in boundaries[start : start + MOST_BOUNDARIES]:
        line = f"{short_path(boundary.source.file)}:{boundary.source.line}" if boundary.source else ""
        gap = "0" if boundary.difference is None else f"{boundary.difference.largest:.3g}"
        table.add_row(
            f"{boundary.step_kind} {boundary.step}: %{boundary.ordinal} {boundary.op}", boundary.module, line, gap
        )
    left = len(boundaries) - start - MOST_BOUNDARIES
    if left > 0 or start:
        table.add_row(f"… of {len(boundaries)} values, {sum(wrong)} of which differ", "", "", "")
    return table


def _trials(found: Bisection) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("the same calls with")
    table.add_column("largest difference", justify="right")
    for trial in found.trials:
        table.add_row(trial.changed, "none" if trial.equal else f"{trial.largest:.3g}")
    return table


def _culprit(found: Bisection) -> list[RenderableType]:
    culprit = found.culprit
    assert culprit is not None
    parts: list[RenderableType] = [Text(f"CULPRIT  {culprit.kind}: {culprit.text}", style="bold")]
    if (fault := culprit.fault) is not None:
        meaning, remedy = KINDS[fault.kind]
        rows = f" ({fault.rows[0]} live rows in a bucket of {fault.rows[1]})" if fault.rows else ""
        code = [fault.source.code] if fault.source and fault.source.code else []
        parts += [indented(2, Text(line)) for line in (*code, f"{fault.what}{rows}", meaning, remedy)]
    if found.repro is not None and found.repro.path is not None:
        parts += [
            Text(),
            Text(f"wrote {found.repro.path} ({found.repro.holds}): python {shlex.quote(str(found.repro.path))}"),
            indented(2, Text(found.repro.says)),
        ]
    elif found.repro is not None:
        parts += [Text(), Text("No reproduction was written: nothing smaller than this run shows the difference.")]
    return parts
