"""The plan of a model, without its weights and without a GPU."""

import json
from collections.abc import Mapping
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

#: A model that cannot be followed without data is run for real if its weights take no more bytes than this.
LARGEST_REAL_MODEL = 2 << 30


@dataclass(frozen=True)
class Explanation:
    """What a model compiles to for one prompt length.

    ``label``      of the model, for people
    ``plans``      one for each graph between Dynamo's own breaks, in the order they were made; ``None`` for a graph
                   that runs unsplit
    ``uncompiled`` what Dynamo left outside of the graphs
    ``note``       how the plans were made if it was not the usual way, e.g. because the model reads data; else ``""``
    """

    label: str
    plans: tuple[Plan | None, ...]
    uncompiled: Uncompiled
    note: str = ""

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
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Compile the model called ``name`` (see ``bcg_compiler.models.zoo``) for one prompt of ``length`` tokens.

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
    inputs = faker.inputs(built.make_inputs(length, torch.Generator().manual_seed(0)))
    found, error = _compile(built, inputs, options, faker)
    if error is None:
        return found
    why = f"The model could not be followed without data ({_first_line(error)})"
    if size > LARGEST_REAL_MODEL:
        if not found.plans:
            raise error
        return replace(found, note=f"{why}. The graphs up to there are shown; what comes after them is not known.")
    with building(name):
        built = build(name, device=device, **given)
    inputs = built.make_inputs(length, torch.Generator().manual_seed(0))
    found, error = _compile(built, inputs, options)
    if error is not None:
        call_eager(built.model, inputs, length)
        raise error
    return replace(found, note=f"{why}, so it was built and run once.")


def _compile(
    built: ZooModel, inputs: dict[str, Any], options: Mapping[str, Any] | None, faker: Faker | None = None
) -> tuple[Explanation, Exception | None]:
    """Compile and call once; the error is what the call raised, if it is not the user's to mend."""
    reset()
    if Options.parse(options).ladder is not None:
        mark_open(inputs, token_dims(built.make_inputs))
    before = set(programs_of())
    compiled: Any = torch.compile(built.model, backend="bcg", options=dict(options) if options else None)
    error = None
    with dynamo_log() as log, torch.inference_mode():
        try:
            if faker is None:
                compiled(**inputs)
            else:
                with faker.mode:
                    compiled(**inputs)
        except Exception as raised:
            if (users := user_error(raised)) is not None:
                raise users from None
            error = raised
    plans = tuple(program.plan for program in programs_of(compiled) if program not in before)
    return Explanation(built.label, plans, log.uncompiled()), error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
