"""Timelines and counts for a terminal."""

import re
import statistics
from collections.abc import Hashable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bcg_compiler.debug.reasons import meaning_of_eager_run
from bcg_compiler.debug.steps import Replay, StepTime, medians
from bcg_compiler.debug.timeline import Timeline
from bcg_compiler.debug.watched import Watched
from bcg_compiler.debug.words import common_text, count, indented
from bcg_compiler.plan import Plan

#: Lines for the parts of a replay, alike ones on one line: those that take the most.
MOST_ROWS = 20

KINDS = {"segment": "segments", "break": "breaks", "fill": "fills", "copy_back": "copies back"}

EMULATED = (
    "The device is emulated: these are times of a CPU that runs operations one by one. They show order and shares, and "
    "nothing of a GPU's speed."
)


def trace_view(watched: Watched) -> Group:
    """The parts of a replay, those that take the most first, and what calls spend outside of replays."""
    timeline = watched.timeline
    parts: list[RenderableType] = []
    for graph in sorted({replay.graph for replay in timeline.replays}):
        parts += [*_graph(timeline, graph), Text()]
    parts += [Text(line) for line in (*_calls(timeline), *eager_runs(watched))]
    if timeline.missed:
        parts.append(Text(f"{count(timeline.missed, 'replay')} more: the timeline was full, and has no times of them."))
    if watched.captured_on == "emulated":
        parts.append(Text(EMULATED, style="dim"))
    return Group(*parts)


def stats_view(watched: Watched) -> Group:
    """How calls ran: replays by bucket, padding, and what ``trace_view`` shows."""
    stats = watched.stats
    calls = sum(span.kind == "call" for span in watched.timeline.spans)
    numbers = (count(calls, "call"), count(stats.graphs, "graph"), count(stats.captures, "capture"))
    replays = f"{count(stats.replays, 'replay')}, {count(sum(stats.eager_runs.values()), 'run')} without replay"
    parts: list[RenderableType] = [Text(f"{', '.join(numbers)}, {replays}", style="bold"), Text()]
    if stats.bucket_replays:
        padding = f"{count(stats.padded_rows, 'row')} over {stats.live_rows:,} live ones"
        ratio = stats.padded_rows / max(1, stats.live_rows)  # a batch may have no row at all
        said = f"Padding: {padding} of replays in buckets, {ratio:.2%}."
        parts += [_buckets(watched.timeline), indented(2, Text(said)), Text()]
    return Group(*parts, trace_view(watched))


def _graph(timeline: Timeline, graph: int) -> Iterator[RenderableType]:
    """One graph: its parts in a table, and their sums."""
    replays = [replay for replay in timeline.replays if replay.graph == graph]
    shown = timeline.alike(graph)
    steps = medians(shown)
    rows = {replay.rows for replay in replays} - {None}
    where = f" in {count(len(rows), 'bucket')}; that with the most" if len(rows) > 1 else ""
    title = Text(f"Graph {graph}: ", style="bold")
    title.append(f"{count(len(replays), 'replay')}{where}. Medians in µs, the largest share first:", style="not bold")
    yield title
    on_device = steps[0].device_us is not None
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("step", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in ("times", "host", *(["device"] if on_device else []), "slowest", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    total = sum(step.us for step in steps)
    groups = sorted(_alike(steps, shown[0].plan), key=lambda group: -sum(step.us for step in group))
    for group in groups[:MOST_ROWS]:
        table.add_row(*_row(group, total), style="yellow" if group[0].kind == "break" else "")
    yield indented(2, table)
    if rest := [step for group in groups[MOST_ROWS:] for step in group]:
        share = f"{sum(step.us for step in rest) / total:.1%}"
        yield indented(2, Text(f"and {count(len(rest), 'part')} more, {share}", style="dim"))
    yield indented(2, Text(_shares(steps, "device" if on_device else "host")))
    if on_device:
        yield indented(2, Text(_waiting(shown)))


def _alike(steps: Sequence[StepTime], plan: Plan) -> list[list[StepTime]]:
    """Parts that do the same in different layers, together."""
    found: dict[Hashable, list[StepTime]] = {}
    for step in steps:
        unit = plan.steps[step.index].unit if step.kind == "segment" else ""
        found.setdefault((step.kind, unit, re.sub(r"\d+", "0", step.name)), []).append(step)
    return list(found.values())


def _row(group: Sequence[StepTime], total: float) -> list[str]:
    """Medians of a group, which of it is slowest, and what part of the whole it takes."""
    slowest = max(group, key=lambda step: step.us)
    host = statistics.median(step.host_us for step in group)
    device = [step.device_us for step in group if step.device_us is not None]
    return [
        f"{group[0].index}{' …' if len(group) > 1 else ''}",
        group[0].kind,
        f"{len(group)}",
        f"{host:,.1f}",
        *([f"{statistics.median(device):,.1f}"] if device else []),
        f"{slowest.us:,.1f} in {slowest.index}" if len(group) > 1 else "",
        f"{sum(step.us for step in group) / total:.1%}",
        common_text([step.name for step in group]),
    ]


def _shares(steps: Sequence[StepTime], clock: str) -> str:
    total = sum(step.us for step in steps)
    shares = (
        f"{name} {sum(step.us for step in steps if step.kind == kind) / total:.1%}"
        for kind, name in KINDS.items()
        if any(step.kind == kind for step in steps)
    )
    return f"{', '.join(shares)} of {total:,.1f} µs of the {clock}."


def _waiting(replays: Sequence[Replay]) -> str:
    waits = [sum(end - start for _, start, end in replay.waits()) for replay in replays]
    return f"The device waits for the host to launch segments: {statistics.median(waits):,.1f} µs a replay."


def _calls(timeline: Timeline) -> Iterator[str]:
    """What a call spends outside of replays."""
    calls = [span for span in timeline.spans if span.kind == "call"]
    busy = [(s.start_us, s.start_us + s.host_us) for s in timeline.spans if s.kind == "other"]
    replays = [(r.start_us, r.start_us + r.host_us) for r in timeline.replays]
    outside = []
    for call in calls:
        end = call.start_us + call.host_us
        inside = [stop - start for start, stop in replays if call.start_us <= start and stop <= end]
        if inside and not any(call.start_us <= start <= end for start, _ in busy):
            outside.append((call.host_us - sum(inside), call.host_us))
    if outside:
        gap, whole = (statistics.median(column) for column in zip(*outside, strict=True))
        yield (
            f"A call that only replays takes the host {whole:,.1f} µs, and {gap:,.1f} of them outside of replays: "
            "guards, and what Dynamo left between graphs."
        )


def eager_runs(watched: Watched) -> Iterator[str]:
    for code, times in watched.stats.eager_runs.items():
        why, remedy = meaning_of_eager_run(code)
        yield f"{count(times, 'run')} of graphs without replay ({code}): {why}. {remedy}".rstrip()


def _buckets(timeline: Timeline) -> Table:
    """Replays by bucket."""
    found: dict[tuple[int, int], list[Replay]] = {}
    for replay in timeline.replays:
        if replay.rows is not None:
            found.setdefault((replay.graph, replay.rows), []).append(replay)
    on_device = any(replay.device_start_us is not None for replay in timeline.replays)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("graph", "bucket", "replays", "host µs", *(["device µs"] if on_device else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for (graph, rows), replays in sorted(found.items()):
        medians_us = [statistics.median(replay.host_us for replay in replays)]
        if on_device:
            medians_us.append(statistics.median(sum(s.device_us or 0.0 for s in replay.steps) for replay in replays))
        table.add_row(str(graph), str(rows), str(len(replays)), *(f"{us:,.1f}" for us in medians_us))
    return table
