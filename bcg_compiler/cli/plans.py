"""``bcg explain``, ``bcg diff``, ``bcg check``: what a model compiles to."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.text import Text

from bcg_compiler.cli.arguments import (
    Assume,
    ConfigPairs,
    Device,
    Dtype,
    DtypeOption,
    LadderSpec,
    Layers,
    LayoutPairs,
    Length,
    LengthsFile,
    Model,
    OptionPairs,
)
from bcg_compiler.cli.common import build_asked, errors_in_words, fields_of, plan_asked, quiet, read_layout, read_pairs
from bcg_compiler.debug import golden, screen
from bcg_compiler.debug.diff import diff_plans, diff_view, plans_of
from bcg_compiler.debug.doctor import kernels_line, layout_view
from bcg_compiler.debug.lengths import read_lengths, sample_lengths
from bcg_compiler.debug.padded import unpadded_view
from bcg_compiler.debug.report import Report, check_report, read_passes, write_report
from bcg_compiler.debug.watched import watch_model

#: How many calls ``bcg explain --measure`` takes medians of.
MEASURED_CALLS = 10

#: What ``bcg diff`` compares.
PLANS = "a file that bcg explain --json wrote, the folder of a dump, or a model"


def explain(
    model: Model,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    length: Length = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans in full, as a JSON list.")] = False,
    as_text: Annotated[bool, typer.Option("--text", help="Print the stable text of the plans.")] = False,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write graphs, plans and generated code there: the option of that name."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at: one HTML file.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --html: run MODEL, too, and show what each step takes.")
    ] = False,
    lengths: LengthsFile = None,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
    layout: LayoutPairs = None,
) -> None:
    """Print what MODEL compiles to: segments, breaks, and why each break is one. Needs neither weights nor a GPU."""
    with quiet(), errors_in_words(), TemporaryDirectory() as scratch:
        if as_json and as_text:
            raise typer.BadParameter("--json and --text exclude each other.")
        if measure and html is None:
            raise typer.BadParameter("--measure is for --html FILE.")
        if html is not None:
            check_report(html)
        prompts = sample_lengths() if lengths is None else read_lengths(lengths)
        kept = dump if dump is not None else Path(scratch) if html is not None else None
        dumped = option if kept is None else [*(option or []), f"dump={json.dumps(str(kept))}"]
        found, where, options = plan_asked(
            model, [length], device, dtype, layers, ladder, assume, dumped, config, prompts
        )
        if html is not None and kept is not None:
            about = dict(model=f"{dtype} on {where}", prompt=f"{length} tokens", torch=torch.__version__)
            about |= {name: str(value) for name, value in options.items() if name not in ("ladder", "dump")}
            report = Report.of(found, about, length, prompts, read_passes(kept, found.plans))
            if measure:
                built, options = build_asked(model, device, dtype, layers, 0, config, option, ladder, assume, [length])
                timeline = watch_model(built, [length] * MEASURED_CALLS, options=options, warm=True).timeline
                report = replace(report, times={n: timeline.steps(graph=n + 1) for n in range(len(found.plans))})
            write_report(report, html)
        out = screen.console()
        if as_json or as_text:
            print(found.json() if as_json else found.text(), end="\n" if as_json else "")
            return
        header = screen.header(model=f"{found.label}, {dtype} on {where}", prompt=f"{length} tokens", note=found.note)
        out.print(header, "")
        out.print(screen.plans_view(found.plans))
        out.print(screen.breaks_view(found.plans))
        out.print(unpadded_view(found.plans))
        out.print(screen.uncompiled_view(found.uncompiled))
        if used := kernels_line(found.plans, where):
            out.print(screen.header(kernels=used))
        out.print(Text(screen.explanation_summary(found.plans), style="bold"))
        if html is not None:
            out.print(Text(f"wrote {html}"))
        if layout:
            out.print("", layout_view(read_layout(fields_of(model) if ":" not in model else None, layout)))


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=f"Before: {PLANS}.")],
    after: Annotated[str, typer.Argument(metavar="B", help="After: the same.")],
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    length: Length = 128,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
) -> None:
    """Print what changed from A to B: segments, breaks and which reason at which line, units, buckets, bytes. The
    options are for models.

    Exits with 1 if anything differs, and with 2 if what was asked for is not possible.
    """
    with quiet(), errors_in_words():
        given = (device, dtype, layers, ladder, assume, option, config, sample_lengths())
        both = [plans_of(name, lambda model: plan_asked(model, [length], *given)[0].plans) for name in (before, after)]
        found = diff_plans(*both)
        out = screen.console()
        out.print(screen.header(before=before, after=after), "")
        out.print(diff_view(found))
    raise typer.Exit(0 if all(graph.equal for graph in found) else 1)


def check(
    model: Model,
    file: Annotated[
        Path, typer.Option("--golden", metavar="FILE", help="What it is compared with: a small JSON file.")
    ],
    update: Annotated[bool, typer.Option("--update", help="Write FILE.")] = False,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    length: Length = 128,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
) -> None:
    """Compile MODEL for three prompt lengths, --length, one more and twice as many, and compare with FILE: segments,
    breaks, units to compile, captures, recompiles, bytes forecast. Runs nothing, and needs neither weights nor a GPU.

    Exits with 1 if any of them has grown, and with 2 if there is no such file, or what was asked for is not possible.
    """
    with quiet(), errors_in_words():
        if not update and not file.exists():
            raise golden.missing(file, shlex.join(["bcg", *sys.argv[1:]]))
        lengths = [length, length + 1, 2 * length]
        given = (device, dtype, layers, ladder, assume, option, config, sample_lengths())
        found, where, options = plan_asked(model, lengths, *given)
        now = golden.Golden.of(
            found,
            dict(
                model=model,
                lengths=lengths,
                device=where.type,
                dtype=str(dtype),
                layers=layers,
                ladder=ladder,
                options={name: value for name, value in options.items() if name != "ladder"},
                config=read_pairs(config),
            ),
            lengths,
        )
        out = screen.console()
        out.print(screen.header(model=f"{found.label}, {dtype} on {where}", now=golden.about(now), note=found.note), "")
        if update:
            now.save(file)
            out.print(Text(f"wrote {file}"))
            return
        verdict = golden.compare(golden.Golden.read(file), now)
        out.print(golden.verdict_view(verdict, found.plans))
    raise typer.Exit(1 if verdict.grown else 0)
