"""``bcg ladder``, ``bcg simulate``: buckets for prompts, and for many ranks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bcg_compiler.buckets import Ladder
from bcg_compiler.cli.arguments import LengthsFile
from bcg_compiler.cli.common import errors_in_words, quiet, source_of
from bcg_compiler.debug import screen, words
from bcg_compiler.debug.bucket_times import FORM, read_times
from bcg_compiler.debug.ladder_plot import check_plot, plot
from bcg_compiler.debug.ladders import FORMS, Recipe, ladder_view, measure, read_ladder
from bcg_compiler.debug.lengths import iterate_lengths, read_lengths, sample_lengths
from bcg_compiler.debug.simulate import Fleet, simulate, simulation_view
from bcg_compiler.debug.simulate_plot import plot as plot_fleet


def ladder(
    lengths: LengthsFile = None,
    count: Annotated[
        int | None, typer.Option(help="At most so many buckets: those with the fewest padded tokens on the lengths.")
    ] = None,
    relative: Annotated[
        float | None,
        typer.Option(metavar="WASTE", help="Pad no prompt by more than this part of its length, e.g. 0.1."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="The default ladder.")] = False,
    multiple: Annotated[int, typer.Option(help="Every bucket is a multiple of this.")] = 1,
    ceiling: Annotated[int | None, typer.Option(help="The last bucket. Default: the longest prompt.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, to a .png or .svg file.")
    ] = None,
) -> None:
    """Choose a ladder by one of --count, --relative and --default, and print what it pads beside the default one."""
    with quiet(), errors_in_words():
        if (count is not None) + (relative is not None) + default != 1:
            raise typer.BadParameter("Give one of --count N, --relative WASTE and --default.")
        if picture is not None:
            check_plot(picture)
        recipe = Recipe(count=count, waste=relative, multiple=multiple, ceiling=ceiling)
        with screen.console(stderr=True).status("reading the lengths"):
            report = measure(sample_lengths() if lengths is None else iterate_lengths(lengths), recipe)
        out = screen.console()
        found = report.lengths
        header = screen.header(
            prompts=f"{words.count(found.total(), 'length')} of {source_of(lengths)}: "
            f"{min(found)} to {max(found)} tokens, {len(found):,} different",
            ladder=f"{recipe}, up to {report.ladder.ceiling} tokens",
        )
        out.print(header, "")
        out.print(ladder_view(report))
        if picture is not None:
            plot(report, picture)
            out.print(Text(f"\nwrote {picture}"))


def simulate_fleet(
    ranks: Annotated[int, typer.Option("--dp", help="Ranks, each with batches of its own.")],
    times: Annotated[Path, typer.Option(metavar="FILE", help=f"Measured microseconds, as JSON: {FORM}.")],
    lengths: LengthsFile = None,
    ladder: Annotated[
        str | None, typer.Option(metavar="SPEC", help=f"The buckets: {FORMS}. Default: those of --times.")
    ] = None,
    steps: Annotated[int, typer.Option(help="How many.")] = 200,
    requests: Annotated[int, typer.Option(help="Prompts of a batch.")] = 1,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens that a step takes of a batch at most; the rest is for later steps.")
    ] = None,
    idle: Annotated[float, typer.Option(help="How likely a rank has no batch for a step.")] = 0.0,
    refuse_idle: Annotated[
        bool, typer.Option("--refuse-idle", help="The graph takes no batch of no rows: an idle rank votes no.")
    ] = False,
    max_padding_factor: Annotated[float, typer.Option(help="The option of that name.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 0,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, to a .png or .svg file.")
    ] = None,
) -> None:
    """Simulate a fleet: how much replays, what is padded, and what waiting for the slowest rank and agreeing on one
    bucket cost. Nothing is run: times come from --times.
    """
    with quiet(), errors_in_words():
        if picture is not None:
            check_plot(picture)
        measured = read_times(times)
        prompts = sample_lengths() if lengths is None else read_lengths(lengths)
        buckets = Ladder(tuple(measured.buckets)) if ladder is None else read_ladder(ladder, prompts)
        fleet = Fleet(
            ranks=ranks,
            steps=steps,
            requests=requests,
            chunk=chunk,
            idle=idle,
            max_padding_factor=max_padding_factor,
            tolerates_idle=not refuse_idle,
            seed=seed,
        )
        with screen.console(stderr=True).status("simulating"):
            found = simulate(fleet, prompts, buckets, measured)
        out = screen.console()
        header = screen.header(
            fleet=f"{words.count(ranks, 'rank')}, {words.count(steps, 'step')}, {words.count(requests, 'prompt')} a "
            f"batch{f' in chunks of {chunk}' if chunk else ''}, {idle:.0%} idle (seed {seed})",
            prompts=f"{words.count(len(prompts), 'length')} of {source_of(lengths)}",
            ladder=f"{words.count(len(buckets), 'bucket')} up to {buckets.ceiling}",
            times=f"{times}, {words.count(len(measured.buckets), 'bucket')} measured",
        )
        out.print(header, "")
        out.print(simulation_view(found))
        if picture is not None:
            plot_fleet(found, picture)
            out.print(Text(f"\nwrote {picture}"))
