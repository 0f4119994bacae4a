"""What ranks saw of a run, for a terminal."""

from collections.abc import Iterator
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bcg_compiler.debug.rank_run import RankReport, RanksReport
from bcg_compiler.debug.reasons import meaning_of_eager_run
from bcg_compiler.debug.screen import MOST_MISMATCHES, gap
from bcg_compiler.debug.words import count


def ranks_view(report: RanksReport) -> Group:
    """A line for each rank, why batches ran eagerly, and the verdict."""
    rows = ", ".join(str(tokens) if tokens == rows else f"{tokens} ({rows})" for tokens, rows in report.buckets.items())
    of_a_rank = " (rows of a rank)" if any(tokens != rows for tokens, rows in report.buckets.items()) else ""
    parts: list[RenderableType] = [Text(f"{count(len(report.buckets), 'bucket')}{of_a_rank}: {rows}"), Text()]
    parts += [_table(report), Text()]
    for code in sorted({code for rank in report.ranks for code in rank.eager_runs}):
        why, remedy = meaning_of_eager_run(code)
        parts.append(Text(f"{code}: {why}. {remedy}".rstrip()))
    return Group(*parts, *_verdict(report))


def _table(report: RanksReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("rank", "replica", "stage", "layers", "part", "captures", "replays"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("eager runs", overflow="fold")
    table.add_column("largest difference", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for number, rank in enumerate(report.ranks):
        table.add_row(
            *(str(number), str(rank.replica), str(rank.stage), _layers(rank), str(rank.place)),
            *(str(rank.captures), str(rank.replays)),
            ", ".join(f"{code} {times}" for code, times in rank.eager_runs.items()) or "none",
            gap(rank.largest),
            "DIFFERENT" if rank.mismatches else "EQUAL",
            style="red" if rank.mismatches else "",
        )
    return table


def _layers(rank: RankReport) -> str:
    start, end = rank.layers
    return "none" if start == end else str(start) if end == start + 1 else f"{start} to {end - 1}"


def _verdict(report: RanksReport) -> Iterator[Text]:
    found = [(number, mismatch) for number, rank in enumerate(report.ranks) for mismatch in rank.mismatches]
    for number, mismatch in islice(found, MOST_MISMATCHES):
        what = mismatch.difference
        when = "after all calls" if mismatch.batch is None else f"call {mismatch.batch}"
        yield Text(f"  rank {number}, {when}: {what.where} {what.what}, by {gap(what.largest)}")
    if (rest := len(found) - MOST_MISMATCHES) > 0:
        yield Text(f"  … and {rest} more")
    compared, exact = (sum(getattr(rank, name) for rank in report.ranks) for name in ("compared", "exact"))
    largest = gap(max(rank.largest for rank in report.ranks))
    if report.equal:
        how = f"{exact} bit for bit and {compared - exact} within the tolerance of the dtype"
        said = f"EQUAL  {count(compared, 'tensor')} of {count(report.batches, 'call')}, {how}"
    else:
        said = f"DIFFERENT  {len(found)} of {count(compared, 'tensor')} of {count(report.batches, 'call')}"
    yield Text(f"{said}. Largest difference: {largest}.", style="bold green" if report.equal else "bold red")
