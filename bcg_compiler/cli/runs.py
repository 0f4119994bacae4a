"""``bcg run``, ``bcg bisect``: a model beside eager."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bcg_compiler.buckets import Ladder
from bcg_compiler.cli.arguments import (
    DEFAULT_CALLS,
    DEFAULT_LADDER,
    Assume,
    ConfigPairs,
    Device,
    Dtype,
    DtypeOption,
    LadderSpec,
    Layers,
    LengthsFile,
    Model,
    OptionPairs,
)
from bcg_compiler.cli.common import (
    build_asked,
    check_file,
    errors_in_words,
    fields_of,
    find_device,
    find_launch,
    look_here,
    progress_bar,
    quiet,
    read_options,
    read_pairs,
    read_prompts,
)
from bcg_compiler.debug import screen
from bcg_compiler.debug.bisect import bisect_model
from bcg_compiler.debug.bisect.search import CALLS
from bcg_compiler.debug.bisect.view import bisection_view
from bcg_compiler.debug.ladders import read_ladder
from bcg_compiler.debug.rank_run import compare_over_ranks
from bcg_compiler.debug.rank_view import ranks_view
from bcg_compiler.debug.run import compare_with_eager
from bcg_compiler.debug.served import ServedModel
from bcg_compiler.distributed.launch import Launch
from bcg_compiler.models import serving
from bcg_compiler.options import Options

#: Seconds that ranks wait for each other, where they compare with eager in between.
RANKS_TIMEOUT = 120.0


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
    or segments compiled within the tolerance of the dtype.

    With --dp, --pp, --cp or --ep a serving model runs over ranks that torchrun starts, in batches of several requests.

    Exits with 1 if any result differs, and with 2 if what was asked for is not possible.
    """
    with quiet(), errors_in_words():
        options = read_options(option, ladder, assume)
        prompts, source = read_prompts(lengths, calls)
        sizes = dict(dp=dp, pp=pp, cp=cp, ep=ep)
        if max(sizes.values()) > 1:
            buckets = options.pop("ladder", None) or read_ladder(ladder or DEFAULT_LADDER, prompts)
            buckets = buckets if isinstance(buckets, Ladder) else Ladder(buckets)
            if lengths is None:
                prompts = [min(prompt, buckets.ceiling) for prompt in prompts]
                source += f", cut to {buckets.ceiling} tokens"
            if Launch.found() is None:  # before a command is named that could not do it
                serving.layout(fields_of(model), **sizes)
            launch = find_launch(dp * pp * cp)
            served = ServedModel.of(
                model,
                layers=layers,
                dtype=getattr(torch, dtype),
                device=find_device(device, launch),
                config=read_pairs(config),
                seed=seed,
            )
            equal = _run_over_ranks(launch, served, sizes, prompts, source, buckets, options)
            raise typer.Exit(0 if equal else 1)
        if (started := Launch.found()) is not None and started.ranks > 1:
            raise typer.BadParameter(
                f"A launcher has started {started.ranks} processes, and none of --dp, --pp, --cp and --ep says what "
                "each of them is to do."
            )
        built, options = build_asked(model, device, dtype, layers, seed, config, option, ladder, assume, prompts)
        out = screen.console()
        header = screen.header(
            model=f"{built.label}, {dtype} on {find_device(device)}",
            compiled=f'torch.compile(model, backend="bcg"{f", options={options}" if options else ""}), called under '
            "torch.inference_mode()",
            prompts=f"{source}: {min(prompts)} to {max(prompts)} tokens, {len(set(prompts))} different lengths, random "
            f"tokens (seed {seed})",
        )
        out.print(header, "")
        with progress_bar() as show:
            report = compare_with_eager(built, prompts, options=options, seed=seed, progress=show)
        out.print(screen.report_view(report))
    raise typer.Exit(0 if report.equal else 1)


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
    with quiet(), errors_in_words():
        options = read_options(option, ladder, assume)
        check_file(out, "repro.py")
        prompts = None if lengths is None else read_prompts(lengths, calls)[0]
        if ladder is not None:
            options["ladder"] = read_ladder(ladder, prompts or [length])
        where = find_device(device)
        look_here(model)
        with screen.console(stderr=True).status("comparing with eager"):
            found = bisect_model(
                model,
                lengths=prompts,
                length=length,
                calls=calls or CALLS,
                layers=layers,
                device=where,
                dtype=getattr(torch, dtype),
                config=read_pairs(config),
                options=options,
                seed=seed,
                out=out,
            )
        screen.console().print(bisection_view(found))
    raise typer.Exit(0 if found.equal else 1)


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
    with launch.group(model.device, RANKS_TIMEOUT), progress_bar(launch.rank == 0) as show:
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
