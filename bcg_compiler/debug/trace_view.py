"""Timelines and counts for a terminal."""

import statistics
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bcg_compiler.debug.reasons import meaning_of_eager_run
from bcg_compiler.debug.steps import Replay, StepTime
from bcg_compiler.debug.timeline import Timeline
from bcg_compiler.debug.watched import Watched
from bcg_compiler.debug.words import count, indented

#: Parts of a replay that are listed: the slowest ones.
MOST_ROWS = 20

KINDS = {"segment": "segments", "break": "breaks", "fill": "fills", "copy_back": "copies back"}

EMULATED = (
    "The device is emulated: these are times of a CPU that runs operations one by one. They show order and shares, and "
    "nothing of a GPU's speed."
)


def trace_view(watched: Watched) -> Group:
    """The parts of a replay, slowest first, and what calls spend outside of replays."""
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
    """One graph: its parts in a table, the slowest first, and their sums."""
    replays = [replay for replay in timeline.replays if replay.graph == graph]
    steps = timeline.steps(graph)
    rows = {replay.rows for replay in replays} - {None}
    where = f" in {count(len(rows), 'bucket')}; that with the most" if len(rows) > 1 else ""
    title = Text(f"Graph {graph}: ", style="bold")
    title.append(f"{count(len(replays), 'replay')}{where}. Medians in µs, slowest first:", style="not bold")
    yield title
    on_device = steps[0].device_us is not None
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in ("host", *(["device"] if on_device else []), "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    total = sum(step.us for step in steps)
    slowest = sorted(steps, key=lambda step: -step.us)
    for step in slowest[:MOST_ROWS]:
        device = [f"{step.device_us:,.1f}"] if step.device_us is not None else []
        style = "yellow" if step.kind == "break" else ""
        share = f"{step.us / total:.1%}"
        table.add_row(str(step.index), step.kind, f"{step.host_us:,.1f}", *device, share, step.name, style=style)
    yield indented(2, table)
    if rest := slowest[MOST_ROWS:]:
        yield indented(
            2, Text(f"and {count(len(rest), 'part')} more, {sum(s.us for s in rest) / total:.1%}", style="dim")
        )
    yield indented(2, Text(_shares(steps, "device" if on_device else "host")))
    if on_device:
        yield indented(2, Text(_waiting(replays)))


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
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("graph", "bucket", "replays", "host µs", "device µs"):
        table.add_column(name, justify="right", no_wrap=True)
    found: dict[tuple[int, int], list[Replay]] = {}
    for replay in timeline.replays:
        if replay.rows is not None:
            found.setdefault((replay.graph, replay.rows), []).append(replay)
    for (graph, rows), replays in sorted(found.items()):
        device = [sum(step.device_us or 0.0 for step in replay.steps) for replay in replays]
        numbers = [statistics.median(replay.host_us for replay in replays), statistics.median(device)]
        table.add_row(str(graph), str(rows), str(len(replays)), *(f"{n:,.1f}" if n else "—" for n in numbers))
    return table
