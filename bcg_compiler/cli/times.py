"""``bcg trace``, ``bcg stats``: where time goes, and what happened."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bcg_compiler.cli.arguments import (
    DEFAULT_CALLS,
    Assume,
    ConfigPairs,
    Device,
    Dtype,
    DtypeOption,
    LadderSpec,
    Layers,
    Length,
    LengthsFile,
    Model,
    OptionPairs,
)
from bcg_compiler.cli.common import build_asked, check_file, errors_in_words, progress_bar, quiet, read_prompts
from bcg_compiler.debug import screen, words
from bcg_compiler.debug.prometheus import prometheus
from bcg_compiler.debug.trace_view import eager_runs, stats_view, trace_view
from bcg_compiler.debug.watched import watch_model
from bcg_compiler.errors import TraceError


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
    with quiet(), errors_in_words():
        check_file(out_file, "trace.json")
        built, options = build_asked(model, device, dtype, layers, seed, config, option, ladder, assume, [length])
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
    with quiet(), errors_in_words():
        prompts, source = read_prompts(lengths, calls)
        built, options = build_asked(model, device, dtype, layers, seed, config, option, ladder, assume, prompts)
        with progress_bar() as show:
            found = watch_model(built, prompts, options=options, seed=seed, progress=show)
        if as_prometheus:
            print(prometheus({model: found.compiled}), end="")
            return
        out = screen.console()
        told = f"{source}: {min(prompts)} to {max(prompts)} tokens"
        out.print(screen.header(model=f"{built.label}, {dtype} on {device}", prompts=told), "")
        out.print(stats_view(found))
