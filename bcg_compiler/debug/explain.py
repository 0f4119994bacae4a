"""The plan of a model, without its weights and without a GPU."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from bcg_compiler.compat.dynamo_log import Uncompiled, dynamo_log
from bcg_compiler.debug.errors import building, call_eager, user_error
from bcg_compiler.debug.fakes import Faker, build_on_meta
from bcg_compiler.debug.tokens import mark_open, token_dims
from bcg_compiler.models.zoo import ZooModel, build
from bcg_compiler.options import Options
from bcg_compiler.plan import Plan, plan_text, plan_to_json
from bcg_compiler.runtime import programs_of, reset
from bcg_compiler.runtime.registry import AnyProgram

#: A model that cannot be followed without data is run for real if its weights take no more bytes than this.
LARGEST_REAL_MODEL = 2 << 30


@dataclass(frozen=True)
class Explanation:
    """What a model compiles to for one prompt length, or several.

    ``label``      of the model, for people
    ``plans``      one for each graph between Dynamo's own breaks, in the order they were made; ``None`` for a graph
                   that runs unsplit
    ``uncompiled`` what Dynamo left outside of the graphs
    ``note``       how the plans were made if it was not the usual way, e.g. because the model reads data; else ``""``
    ``calls``      how often each graph was called; ``recompiles`` how many graphs were made after the first call
    """

    label: str
    plans: tuple[Plan | None, ...]
    uncompiled: Uncompiled
    note: str = ""
    calls: tuple[int, ...] = ()
    recompiles: int = 0

    def text(self) -> str:
        """The stable text of all plans."""
        return "\n".join(plan_text(plan) if plan else "unsplit\n" for plan in self.plans)

    def json(self) -> str:
        """A list with each plan in full; ``null`` for a graph that runs unsplit."""
        return json.dumps([json.loads(plan_to_json(plan)) if plan else None for plan in self.plans], indent=1)


def plan_model(
    name: str,
    *,
    layers: int | None = None,
    length: int = 128,
    then: Sequence[int] = (),
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Compile the model called ``name`` (see ``bcg_compiler.models.zoo``) for one prompt of ``length`` tokens, and call
    it ``then`` with prompts of further lengths.

    The model is made of fake tensors on ``device``, so neither its size nor its weights matter, and the plan is the one
    that the real model gets. With a ladder among the options the number of tokens is left open. What the model does
    with data between Dynamo's graphs cannot be followed that way: then the model is built for real, if it is not too
    large, and ``note`` says so.

    Drops all compiled code of this process first (``bcg_compiler.reset``). Raises ``OptionError`` and ``RuleError``,
    ``ModelNotFound``, and ``ModelFailed`` if the model cannot be built or called.
    """
    Options.parse(options)
    given: dict[str, Any] = dict(layers=layers, dtype=dtype, config=config)
    with building(name):
        built = build_on_meta(name, **given)
    size = sum(parameter.nbytes for parameter in built.model.parameters())
    faker = Faker(device)
    built = ZooModel(faker.model(built.model), built.make_inputs, built.label)
    found, error = _compile(built, (length, *then), options, faker)
    if error is None:
        return found
    why = f"The model could not be followed without data ({_first_line(error)})"
    if size > LARGEST_REAL_MODEL:
        if not found.plans:
            raise error
        return replace(found, note=f"{why}. The graphs up to there are shown; what comes after them is not known.")
    with building(name):
        built = build(name, device=device, **given)
    found, error = _compile(built, (length, *then), options)
    if error is not None:
        call_eager(built.model, _inputs(built, length), length)
        raise error
    return replace(found, note=f"{why}, so it was built and run once.")


def _compile(
    built: ZooModel, lengths: Sequence[int], options: Mapping[str, Any] | None, faker: Faker | None = None
) -> tuple[Explanation, Exception | None]:
    """Compile and call once for each length; the error is what a call raised, if it is not the user's to mend."""
    reset()
    before = set(programs_of())
    compiled: Any = torch.compile(built.model, backend="bcg", options=dict(options) if options else None)
    dims = token_dims(built.make_inputs) if Options.parse(options).ladder is not None else {}
    calls = [_inputs(built, length) for length in lengths]
    if faker is not None:
        calls = [faker.inputs(inputs) for inputs in calls]
    error, first = None, 0

    def made() -> list[AnyProgram]:
        return [program for program in programs_of(compiled) if program not in before]

    with dynamo_log() as log, torch.inference_mode(), nullcontext() if faker is None else faker.mode:
        try:
            for inputs in calls:
                mark_open(inputs, dims)
                compiled(**inputs)
                first = first or len(made())
        except Exception as raised:
            if (users := user_error(raised)) is not None:
                raise users from None
            error = raised
    programs = made()
    return Explanation(
        label=built.label,
        plans=tuple(program.plan for program in programs),
        uncompiled=log.uncompiled(),
        calls=tuple(sum(program.eager_runs.values()) + program.replays for program in programs),
        recompiles=max(0, len(programs) - (first or len(programs))),
    ), error


def _inputs(built: ZooModel, length: int) -> dict[str, Any]:
    return built.make_inputs(length, torch.Generator().manual_seed(0))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
