"""The command ``bcg``: run a model against eager, explain its plan, choose a ladder, simulate a fleet, see what is
installed.

Parses and prints; no more.
"""

import enum
import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bcg_compiler.buckets import Ladder
from bcg_compiler.debug import golden, screen, words
from bcg_compiler.debug.bisect import bisect_model
from bcg_compiler.debug.bisect.search import CALLS
from bcg_compiler.debug.bisect.view import bisection_view
from bcg_compiler.debug.bucket_times import FORM, read_times
from bcg_compiler.debug.diff import diff_plans, diff_view, plans_of
from bcg_compiler.debug.doctor import examine, health_view, kernels_line, layout_view
from bcg_compiler.debug.errors import building, user_error
from bcg_compiler.debug.explain import Explanation, plan_model
from bcg_compiler.debug.ladder_plot import check_plot, plot
from bcg_compiler.debug.ladders import FORMS, Recipe, ladder_view, measure, read_ladder
from bcg_compiler.debug.lengths import SAMPLE, iterate_lengths, read_lengths, sample_lengths
from bcg_compiler.debug.padded import unpadded_view
from bcg_compiler.debug.prometheus import prometheus
from bcg_compiler.debug.rank_doctor import examine_ranks, plan_of, ranks_health_view
from bcg_compiler.debug.rank_run import compare_over_ranks
from bcg_compiler.debug.rank_view import ranks_view
from bcg_compiler.debug.report import Report, check_report, read_passes, write_report
from bcg_compiler.debug.run import compare_with_eager
from bcg_compiler.debug.self_test import self_test, self_test_view
from bcg_compiler.debug.served import ServedModel
from bcg_compiler.debug.simulate import Fleet, simulate, simulation_view
from bcg_compiler.debug.simulate_plot import plot as plot_fleet
from bcg_compiler.debug.tokens import tokens_of
from bcg_compiler.debug.trace_view import eager_runs, stats_view, trace_view
from bcg_compiler.debug.watched import watch_model
from bcg_compiler.distributed.launch import Launch
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.errors import BcgError, TraceError, nearest
from bcg_compiler.models import serving, zoo
from bcg_compiler.options import Options

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help='The tools of bcg_compiler, a backend of torch.compile: torch.compile(model, backend="bcg").',
)

#: The buckets of a run over ranks without ``--ladder``.
DEFAULT_LADDER = "32,64,128,256"

#: Seconds that ranks wait for each other: in a run, where they compare with eager in between, and in ``bcg doctor``.
RANKS_TIMEOUT = 120.0
DOCTOR_TIMEOUT = 60.0

#: How many of the bundled lengths are run where ``--calls`` is not given: under a minute for glm5 on two free cores.
DEFAULT_CALLS = 12

#: How many calls ``bcg explain --measure`` takes medians of.
MEASURED_CALLS = 10

#: What ``bcg diff`` compares.
PLANS = "a file that bcg explain --json wrote, the folder of a dump, or a model"


class Dtype(enum.StrEnum):
    """The dtypes that a model can be built in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A zoo name (such as glm5, deepseek_v3, llama), a folder with a Hugging Face config.json, or "
        "package.module:factory.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda with a number.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the weights.")]
Length = Annotated[int, typer.Option(min=1, help="Prompt length, in tokens.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Number of layers, in place of the model's own.")]
OptionPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help='An option of the backend, e.g. min_segment_kernels=4 or breaks=["module:*.mlp"]; can be repeated.',
    ),
]
ConfigPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--config", metavar="KEY=VALUE", help="A field of the Hugging Face configuration to override; can be repeated."
    ),
]
LadderSpec = Annotated[
    str | None,
    typer.Option(
        "--ladder",
        metavar="SPEC",
        help=f"Pad prompts to these buckets, and leave the number of tokens open: {FORMS}.",
    ),
]
Assume = Annotated[
    bool,
    typer.Option(
        "--assume-rows-independent",
        help="Pad although it is not proven that padding cannot reach live rows: the option of that name.",
    ),
]
LayoutPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--layout",
        metavar="KEY=VALUE",
        help="How a model is laid out over ranks, e.g. cp=4 or attention_does_cp=true; can be repeated.",
    ),
]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompt lengths: a CSV with a column ContextTokens or lengths, or one number a line. Default: a bundled "
        "sample of a production trace.",
    ),
]


@app.command(short_help="Run MODEL compiled, and compare it with eager.")
def run(
    model: Model,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    lengths: LengthsFile = None,
    calls: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many of the lengths to run. Default: all of FILE, or {DEFAULT_CALLS} bundled."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and of the prompts.")] = 0,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
    dp: Annotated[int, typer.Option("--dp", min=1, help="Replicas, each with batches of its own.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel ranks of a stage.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Ranks of a stage that share its experts out.")] = 1,
) -> None:
    """Run MODEL compiled and eager over many prompts, and compare every result: bit by bit, or where prompts are padded
    within the tolerance of the dtype.

    With --dp, --pp, --cp or --ep a serving model runs over ranks that torchrun starts, in batches of several requests.

    Exits with 1 if any result differs, and with 2 if what was asked for is not possible.
    """
    with _quiet(), _errors_in_words():
        options = _options(option, ladder, assume)
        prompts, source = _prompts(lengths, calls)
        sizes = dict(dp=dp, pp=pp, cp=cp, ep=ep)
        if max(sizes.values()) > 1:
            buckets = options.pop("ladder", None) or read_ladder(ladder or DEFAULT_LADDER, prompts)
            buckets = buckets if isinstance(buckets, Ladder) else Ladder(buckets)
            if lengths is None:
                prompts = [min(prompt, buckets.ceiling) for prompt in prompts]
                source += f", cut to {buckets.ceiling} tokens"
            launch = _launch(dp * pp * cp)
            served = ServedModel.of(
                model,
                layers=layers,
                dtype=getattr(torch, dtype),
                device=_device(device, launch),
                config=_pairs(config),
                seed=seed,
            )
            equal = _run_over_ranks(launch, served, sizes, prompts, source, buckets, options)
            raise typer.Exit(0 if equal else 1)
        if (started := Launch.found()) is not None and started.ranks > 1:
            raise typer.BadParameter(
                f"A launcher has started {started.ranks} processes, and none of --dp, --pp, --cp and --ep says what "
                "each of them is to do."
            )
        built, options = _built(model, device, dtype, layers, seed, config, option, ladder, assume, prompts)
        out = screen.console()
        header = screen.header(
            model=f"{built.label}, {dtype} on {_device(device)}",
            compiled=f'torch.compile(model, backend="bcg"{f", options={options}" if options else ""}), called under '
            "torch.inference_mode()",
            prompts=f"{source}: {min(prompts)} to {max(prompts)} tokens, {len(set(prompts))} different lengths, random "
            f"tokens (seed {seed})",
        )
        out.print(header, "")
        with _progress() as show:
            report = compare_with_eager(built, prompts, options=options, seed=seed, progress=show)
        out.print(screen.report_view(report))
    raise typer.Exit(0 if report.equal else 1)


@app.command(short_help="Print what MODEL compiles to, and why.")
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
    with _quiet(), _errors_in_words(), TemporaryDirectory() as scratch:
        if as_json and as_text:
            raise typer.BadParameter("--json and --text exclude each other.")
        if measure and html is None:
            raise typer.BadParameter("--measure is for --html FILE.")
        if html is not None:
            check_report(html)
        prompts = sample_lengths() if lengths is None else read_lengths(lengths)
        kept = dump if dump is not None else Path(scratch) if html is not None else None
        dumped = option if kept is None else [*(option or []), f"dump={json.dumps(str(kept))}"]
        found, where, options = _planned(
            model, [length], device, dtype, layers, ladder, assume, dumped, config, prompts
        )
        if html is not None and kept is not None:
            about = dict(model=f"{dtype} on {where}", prompt=f"{length} tokens", torch=torch.__version__)
            about |= {name: str(value) for name, value in options.items() if name not in ("ladder", "dump")}
            report = Report.of(found, about, length, prompts, read_passes(kept, found.plans))
            if measure:
                built, options = _built(model, device, dtype, layers, 0, config, option, ladder, assume, [length])
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
            out.print("", layout_view(_layout(_fields(model) if ":" not in model else None, layout)))


@app.command(short_help="Choose the buckets that prompts are padded to.")
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
    with _quiet(), _errors_in_words():
        if (count is not None) + (relative is not None) + default != 1:
            raise typer.BadParameter("Give one of --count N, --relative WASTE and --default.")
        if picture is not None:
            check_plot(picture)
        recipe = Recipe(count=count, waste=relative, multiple=multiple, ceiling=ceiling)
        with screen.console(stderr=True).status("reading the lengths"):
            report = measure(sample_lengths() if lengths is None else iterate_lengths(lengths), recipe)
        out = screen.console()
        found = report.lengths
        source = f"the bundled sample ({SAMPLE})" if lengths is None else str(lengths)
        header = screen.header(
            prompts=f"{words.count(found.total(), 'length')} of {source}: {min(found)} to {max(found)} tokens, "
            f"{len(found):,} different",
            ladder=f"{recipe}, up to {report.ladder.ceiling} tokens",
        )
        out.print(header, "")
        out.print(ladder_view(report))
        if picture is not None:
            plot(report, picture)
            out.print(Text(f"\nwrote {picture}"))


@app.command(short_help="Print what is installed, and what is slower or off because of it; try it.")
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A serving model: a zoo name, or a folder with a config.json."),
    ] = None,
    layout: LayoutPairs = None,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Compare the ranks that torchrun has started: this command on each of them.")
    ] = False,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Print versions, devices, libraries, the kernels that serving models use here, and what is slower or off; compile,
    capture and replay a tiny program, and exit with 1 if that fails.

    With --layout also which rules speak against replay on ranks that are laid out like that; of MODEL it is known what
    it declares. With --ranks also whether all ranks come and have the same environment, and of MODEL the same plans:
    exits with 1 if not.
    """
    with _quiet(), _errors_in_words():
        fields = None if model is None else _fields(model)
        parallel = _layout(fields, layout)
        launch = _launch(max(2, parallel.dp * parallel.pp * parallel.cp)) if ranks else None
        health, failed = examine(), False
        out = screen.console()
        out.quiet = launch is not None and launch.rank != 0
        out.print(health_view(health), "")
        if model is None and not layout and launch is None:
            checks = self_test(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            out.print(self_test_view(checks), "")
            failed = any(check.state == "failed" for check in checks)
        out.print(layout_view(parallel))
        if launch is None:
            raise typer.Exit(1 if failed else 0)
        where = _device(device, launch)
        with launch.group(where, DOCTOR_TIMEOUT):
            joined = Ranks.join(parallel) if model or layout else None
            plan = ""
            if model is not None and joined is not None:
                served = ServedModel.of(model, dtype=getattr(torch, dtype), device=where)
                plan = plan_of(served, joined, read_ladder(DEFAULT_LADDER, []))
            found = examine_ranks(health, DOCTOR_TIMEOUT, joined, plan)
        out.print("", ranks_health_view(found))
    raise typer.Exit(0 if found.healthy else 1)


@app.command(name="simulate", short_help="Simulate a fleet of ranks that vote on replay, from measured times.")
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
    with _quiet(), _errors_in_words():
        if picture is not None:
            check_plot(picture)
        measured = read_times(times)
        prompts = sample_lengths() if lengths is None else read_lengths(lengths)
        source = f"the bundled sample ({SAMPLE})" if lengths is None else str(lengths)
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
            prompts=f"{words.count(len(prompts), 'length')} of {source}",
            ladder=f"{words.count(len(buckets), 'bucket')} up to {buckets.ceiling}",
            times=f"{times}, {words.count(len(measured.buckets), 'bucket')} measured",
        )
        out.print(header, "")
        out.print(simulation_view(found))
        if picture is not None:
            plot_fleet(found, picture)
            out.print(Text(f"\nwrote {picture}"))


@app.command(name="trace", short_help="Time each step of a replay of MODEL, and write a timeline for Perfetto.")
def trace_model(
    model: Model,
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the timeline, for https://ui.perfetto.dev.")
    ] = None,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    length: Length = 128,
    calls: Annotated[int, typer.Option(min=1, help="How many calls to trace, after those that capture.")] = 10,
    seed: Annotated[int, typer.Option(help="Of random weights and of the prompts.")] = 0,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Open NVTX ranges, for Nsight Systems.")] = False,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
) -> None:
    """Time each step of a replay of MODEL: segments, breaks, fills of slots, copies back, and what is spent between."""
    with _quiet(), _errors_in_words():
        built, options = _built(model, device, dtype, layers, seed, config, option, ladder, assume, [length])
        found = watch_model(built, [length] * calls, options=options, seed=seed, warm=True, nvtx=nvtx)
        if not found.timeline.replays:
            raise TraceError("\n".join(["Nothing replays.", *eager_runs(found)]))
        out = screen.console()
        prompt = f"{length} tokens, {words.count(calls, 'call')} traced"
        out.print(screen.header(model=f"{built.label}, {dtype} on {device}", prompt=prompt), "")
        out.print(trace_view(found))
        if out_file is not None:
            found.timeline.save(out_file)
            out.print(Text(f"\nwrote {out_file}"))


@app.command(
    name="stats", short_help="Run MODEL over prompts, and count what replays, what not, and how long steps take."
)
def stats_of_model(
    model: Model,
    lengths: LengthsFile = None,
    calls: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many of the lengths to run. Default: all of FILE, or {DEFAULT_CALLS} bundled."),
    ] = None,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    seed: Annotated[int, typer.Option(help="Of random weights and of the prompts.")] = 0,
    as_prometheus: Annotated[bool, typer.Option("--prometheus", help="Print the page of a server's endpoint.")] = False,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
) -> None:
    """Run MODEL over prompts, without eager: replays, runs without replay by reason, padding, and the time of steps."""
    with _quiet(), _errors_in_words():
        prompts, source = _prompts(lengths, calls)
        built, options = _built(model, device, dtype, layers, seed, config, option, ladder, assume, prompts)
        with _progress() as show:
            found = watch_model(built, prompts, options=options, seed=seed, progress=show)
        if as_prometheus:
            print(prometheus({model: found.compiled}), end="")
            return
        out = screen.console()
        told = f"{source}: {min(prompts)} to {max(prompts)} tokens"
        out.print(screen.header(model=f"{built.label}, {dtype} on {device}", prompts=told), "")
        out.print(stats_view(found))


@app.command(short_help="Print what two plans differ in.")
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
    with _quiet(), _errors_in_words():
        given = (device, dtype, layers, ladder, assume, option, config, sample_lengths())
        both = [plans_of(name, lambda model: _planned(model, [length], *given)[0].plans) for name in (before, after)]
        found = diff_plans(*both)
        out = screen.console()
        out.print(screen.header(before=before, after=after), "")
        out.print(diff_view(found))
    raise typer.Exit(0 if all(graph.equal for graph in found) else 1)


@app.command(short_help="Fail if MODEL compiles to more than it once did.")
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
    with _quiet(), _errors_in_words():
        if not update and not file.exists():
            raise golden.missing(file, shlex.join(["bcg", *sys.argv[1:]]))
        lengths = [length, length + 1, 2 * length]
        given = (device, dtype, layers, ladder, assume, option, config, sample_lengths())
        found, where, options = _planned(model, lengths, *given)
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
                config=_pairs(config),
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


@app.command(short_help="Find what makes MODEL give other numbers than eager.")
def bisect(
    model: Model,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
    layers: Layers = None,
    length: Annotated[int, typer.Option(min=1, help="Prompt length, in tokens.")] = 128,
    lengths: LengthsFile = None,
    calls: Annotated[int | None, typer.Option(min=1, help=f"How many calls. Default: {CALLS}, or all of FILE.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and of the prompts.")] = 0,
    ladder: LadderSpec = None,
    assume: Assume = False,
    option: OptionPairs = None,
    config: ConfigPairs = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a Python file that shows the difference by itself.")
    ] = None,
) -> None:
    """Find the pass, break, segment or operation that makes MODEL give other numbers than eager, and its line.

    Exits with 1 if anything differs, with 0 if nothing does, and with 2 if what was asked for is not possible.
    """
    with _quiet(), _errors_in_words():
        options = _options(option, ladder, assume)
        prompts = None if lengths is None else _prompts(lengths, calls)[0]
        if ladder is not None:
            options["ladder"] = read_ladder(ladder, prompts or [length])
        where = _device(device)
        _look_here(model)
        with screen.console(stderr=True).status("comparing with eager"):
            found = bisect_model(
                model,
                lengths=prompts,
                length=length,
                calls=calls or CALLS,
                layers=layers,
                device=where,
                dtype=getattr(torch, dtype),
                config=_pairs(config),
                options=options,
                seed=seed,
                out=out,
            )
        screen.console().print(bisection_view(found))
    raise typer.Exit(0 if found.equal else 1)


def main() -> None:
    """Entry point of the console script."""
    app()


def _built(
    model: str,
    device: str,
    dtype: Dtype,
    layers: int | None,
    seed: int,
    config: list[str] | None,
    option: list[str] | None,
    ladder: str | None,
    assume: bool,
    prompts: list[int],
) -> tuple[zoo.ZooModel, dict[str, Any]]:
    """A model as it is asked for, and the options to compile it with."""
    options, where = _options(option, ladder, assume), _device(device)
    _look_here(model)
    with building(model):
        built = zoo.build(
            model, layers=layers, device=where, dtype=getattr(torch, dtype), seed=seed, config=_pairs(config)
        )
    if ladder is not None:
        options["ladder"] = read_ladder(ladder, tokens_of(built.make_inputs, prompts))
    return built, options


def _planned(
    model: str,
    lengths: list[int],
    device: str,
    dtype: Dtype,
    layers: int | None,
    ladder: str | None,
    assume: bool,
    option: list[str] | None,
    config: list[str] | None,
    prompts: list[int],
) -> tuple[Explanation, torch.device, dict[str, Any]]:
    """What a model compiles to for these lengths, on which device, by which options. ``prompts`` choose the ladder."""
    options = _options(option, ladder, assume)
    if ladder is not None:
        options["ladder"] = read_ladder(ladder, prompts)
    where = _device(device)
    _look_here(model)
    found = plan_model(
        model,
        layers=layers,
        length=lengths[0],
        then=lengths[1:],
        device=where,
        dtype=getattr(torch, dtype),
        config=_pairs(config),
        options=options,
    )
    return found, where, options


def _fields(model: str) -> dict[str, Any]:
    """The configuration of a zoo name or a folder."""
    with building(model):
        return zoo.fields(model)


def _layout(fields: dict[str, Any] | None, given: list[str] | None) -> Parallel:
    """A layout of ranks as it is asked for; of a serving model what it declares is known, too."""
    pairs = _pairs(given)
    if fields is None or fields.get("model_type") not in serving.FAMILIES:
        return Parallel.parse(pairs)
    return serving.layout(fields, **pairs)


def _launch(ranks: int) -> Launch:
    """This process among those of a launcher; without one, what to type."""
    found = Launch.found()
    if found is None:
        command = shlex.join(["torchrun", "--nproc-per-node", str(ranks), "-m", "bcg_compiler.cli", *sys.argv[1:]])
        raise typer.BadParameter(f"This is for {words.count(ranks, 'rank')}, which a launcher starts. Type:\n{command}")
    return found


def _run_over_ranks(
    launch: Launch,
    model: ServedModel,
    sizes: dict[str, int],
    prompts: list[int],
    source: str,
    ladder: Ladder,
    options: dict[str, Any],
) -> bool:
    """Run on all ranks and print on the first one. Whether all is equal, on all of them alike."""
    parallel = serving.layout(model.fields, dual_stream=Options.parse(options).dual_stream, **sizes)
    out = screen.console()
    out.quiet = launch.rank != 0
    header = screen.header(
        model=f"{model.label} on {model.device.type}",
        compiled=f"bcg.PrefillRunner{f', options={options}' if options else ''}",
        ranks=f"{launch.ranks}: " + ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1),
        prompts=f"{source}: {min(prompts)} to {max(prompts)} tokens in batches of several, random tokens "
        f"(seed {model.seed})",
    )
    out.print(header, "")
    with launch.group(model.device, RANKS_TIMEOUT), _progress(launch.rank == 0) as show:
        report = compare_over_ranks(
            model,
            prompts,
            parallel=parallel,
            ladder=ladder,
            options=options,
            timeout=RANKS_TIMEOUT,
            progress=show,
        )
    out.print(ranks_view(report))
    return report.equal


def _prompts(file: Path | None, calls: int | None) -> tuple[list[int], str]:
    """The lengths to run, and a word on what they are. More calls than lengths begin again with the first length."""
    lengths = sample_lengths() if file is None else read_lengths(file)
    source = f"the bundled sample ({SAMPLE})" if file is None else str(file)
    calls = calls or (DEFAULT_CALLS if file is None else len(lengths))
    which = f"the first {calls} of {len(lengths)}" if calls < len(lengths) else f"all {len(lengths)}"
    again = f", again up to {calls} calls" if calls > len(lengths) else ""
    return [lengths[i % len(lengths)] for i in range(calls)], f"{which} lengths of {source}{again}"


def _options(given: list[str] | None, ladder: str | None, assume: bool) -> dict[str, Any]:
    """The options of the backend but for the ladder, which may depend on the model."""
    options = _pairs(given)
    for name, flag in (("ladder", ladder), ("assume_rows_independent", assume)):
        if flag and name in options:
            raise typer.BadParameter(f"{name!r} is given twice: as an --option and as --{name.replace('_', '-')}.")
    if assume:
        options["assume_rows_independent"] = True
    Options.parse(options)
    return options


def _pairs(given: list[str] | None) -> dict[str, Any]:
    """``key=value`` pairs; values are JSON where they can be, else text."""
    pairs: dict[str, Any] = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text!r} is not of the form key=value.")
        if key in pairs:
            raise typer.BadParameter(f'{key!r} is given twice; give several values as a list: {key}=\'["a", "b"]\'.')
        try:
            pairs[key] = json.loads(value)
        except json.JSONDecodeError:
            pairs[key] = value
    return pairs


def _look_here(model: str) -> None:
    """A factory is looked for where the user is."""
    if ":" in model and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _device(name: str, launch: Launch | None = None) -> torch.device:
    """The device of a name; ``cuda`` is each rank's own."""
    if name == "cuda" and launch is not None:
        name = f"cuda:{launch.local_rank}"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise typer.BadParameter(f"{name!r} is not a device. {nearest(name, ['cpu', 'cuda', 'cuda:0'])}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise typer.BadParameter(f"{name!r} is not there: torch {torch.__version__} sees no CUDA device.")
    if int(number or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"{name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices.")
    if launch is not None:
        torch.cuda.set_device(int(number or 0))  # collectives of a rank use the current one
    return torch.device("cuda", int(number or 0))


@contextmanager
def _progress(shown: bool = True) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = screen.console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("calls compared with eager", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _errors_in_words() -> Iterator[None]:
    """Known errors are a message and the exit code 2; of others the user needs the traceback."""
    try:
        yield
    except (BcgError, zoo.ModelNotFound) as error:
        _fail(str(error), 2)
    except typer.BadParameter as error:
        _fail(error.message, 2)
    except typer.Exit:
        raise
    except Exception as error:
        if (users := user_error(error)) is not None:
            _fail(str(users), 2)
        traceback.print_exc()
        _fail("The compiled model raised where eager did not. This is a fault of bcg_compiler, or of torch.", 1)


def _fail(message: str, code: int) -> None:
    launch = Launch.found()
    where = f" on rank {launch.rank}" if launch is not None and launch.ranks > 1 else ""
    typer.echo(f"error{where}: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep off the screen what transformers and torch tell developers; what a report needs is in the report."""
    # Read when transformers is imported, which is later.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
        yield


if __name__ == "__main__":
    main()
