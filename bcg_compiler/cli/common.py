"""What commands share: reading their arguments, models, errors in words."""

import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bcg_compiler.cli.arguments import DEFAULT_CALLS, Dtype
from bcg_compiler.debug import screen, words
from bcg_compiler.debug.errors import building, user_error
from bcg_compiler.debug.explain import Explanation, plan_model
from bcg_compiler.debug.ladders import read_ladder
from bcg_compiler.debug.lengths import SAMPLE, read_lengths, sample_lengths
from bcg_compiler.debug.tokens import tokens_of
from bcg_compiler.distributed.launch import Launch
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.errors import BcgError, nearest
from bcg_compiler.models import serving, zoo
from bcg_compiler.options import Options


def build_asked(
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
    options, where = read_options(option, ladder, assume), find_device(device)
    look_here(model)
    with building(model):
        built = zoo.build(
            model, layers=layers, device=where, dtype=getattr(torch, dtype), seed=seed, config=read_pairs(config)
        )
    if ladder is not None:
        options["ladder"] = read_ladder(ladder, tokens_of(built.make_inputs, prompts))
    return built, options


def plan_asked(
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
    options = read_options(option, ladder, assume)
    if ladder is not None:
        options["ladder"] = read_ladder(ladder, prompts)
    where = find_device(device)
    look_here(model)
    found = plan_model(
        model,
        layers=layers,
        length=lengths[0],
        then=lengths[1:],
        device=where,
        dtype=getattr(torch, dtype),
        config=read_pairs(config),
        options=options,
    )
    return found, where, options


def fields_of(model: str) -> dict[str, Any]:
    """The configuration of a zoo name or a folder."""
    with building(model):
        return zoo.fields(model)


def read_layout(fields: dict[str, Any] | None, given: list[str] | None) -> Parallel:
    """A layout of ranks as it is asked for; of a serving model what it declares is known, too."""
    pairs = read_pairs(given)
    if fields is None or fields.get("model_type") not in serving.FAMILIES:
        return Parallel.parse(pairs)
    return serving.layout(fields, **pairs)


def find_launch(ranks: int) -> Launch:
    """This process among those of a launcher; without one, what to type."""
    found = Launch.found()
    if found is None:
        command = shlex.join(["torchrun", "--nproc-per-node", str(ranks), "-m", "bcg_compiler.cli", *sys.argv[1:]])
        raise typer.BadParameter(f"This is for {words.count(ranks, 'rank')}, which a launcher starts. Type:\n{command}")
    return found


def read_prompts(file: Path | None, calls: int | None) -> tuple[list[int], str]:
    """The lengths to run, and a word on what they are. More calls than lengths begin again with the first length."""
    lengths = sample_lengths() if file is None else read_lengths(file)
    calls = calls or (DEFAULT_CALLS if file is None else len(lengths))
    which = f"the first {calls} of {len(lengths)}" if calls < len(lengths) else f"all {len(lengths)}"
    again = f", again up to {calls} calls" if calls > len(lengths) else ""
    return [lengths[i % len(lengths)] for i in range(calls)], f"{which} lengths of {source_of(file)}{again}"


def source_of(file: Path | None) -> str:
    """A word on where lengths are from: a file, or the bundled sample."""
    return f"the bundled sample ({SAMPLE})" if file is None else str(file)


def read_options(given: list[str] | None, ladder: str | None, assume: bool) -> dict[str, Any]:
    """The options of the backend but for the ladder, which may depend on the model."""
    options = read_pairs(given)
    for name, flag in (("ladder", ladder), ("assume_rows_independent", assume)):
        if flag and name in options:
            raise typer.BadParameter(f"{name!r} is given twice: as an --option and as --{name.replace('_', '-')}.")
    if assume:
        options["assume_rows_independent"] = True
    Options.parse(options)
    return options


def read_pairs(given: list[str] | None) -> dict[str, Any]:
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


def look_here(model: str) -> None:
    """A factory is looked for where the user is."""
    if ":" in model and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def find_device(name: str, launch: Launch | None = None) -> torch.device:
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


def check_file(path: Path | None, example: str) -> None:
    """Say that a file cannot be written before the work is done rather than after it."""
    if path is not None and (why := words.unwritable(path, example)):
        raise typer.BadParameter(f"Cannot write {path}: {why}")


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = screen.console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("calls compared with eager", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Known errors are a message and the exit code 2; of others the user needs the traceback."""
    try:
        yield
    except (BcgError, zoo.ModelNotFound) as error:
        fail(str(error), 2)
    except typer.BadParameter as error:
        fail(error.message, 2)
    except typer.Exit:
        raise
    except Exception as error:
        if (users := user_error(error)) is not None:
            fail(str(users), 2)
        traceback.print_exc()
        fail(
            "The compiled model raised where eager did not, or the code did that makes its inputs: see the traceback. "
            "If it is not yours, this is a fault of bcg_compiler, or of torch.",
            1,
        )


def fail(message: str, code: int) -> None:
    launch = Launch.found()
    where = f" on rank {launch.rank}" if launch is not None and launch.ranks > 1 else ""
    typer.echo(f"error{where}: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep off the screen what transformers and torch tell developers; what a report needs is in the report."""
    # Read when transformers is imported, which is later.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
        yield
