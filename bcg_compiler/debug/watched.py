"""A model that is called over some prompts while a trace is on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.debug.errors import call_eager, user_error
from bcg_compiler.debug.timeline import Timeline, trace
from bcg_compiler.debug.tokens import mark_open, token_dims
from bcg_compiler.models.zoo import ZooModel
from bcg_compiler.options import Options
from bcg_compiler.runtime import Stats, programs_of, reset, stats

#: Calls before a trace of one length: one to compile, one to capture, one more where a graph is planned anew.
WARM_UPS = 3


@dataclass(frozen=True)
class Watched:
    """What was seen of a model.

    ``timeline``     of all calls that were traced
    ``captured_on``  ``cuda``, ``emulated``, or "" if nothing was captured
    ``compiled``     the compiled model, and its ``stats`` of all calls
    """

    timeline: Timeline
    captured_on: str
    compiled: Callable[..., Any]
    stats: Stats


def watch_model(
    built: ZooModel,
    lengths: Sequence[int],
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    warm: bool = False,
    nvtx: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Watched:
    """Call a model once for each of ``lengths`` (in tokens), compiled, under ``torch.inference_mode()``, and trace it.

    With ``warm`` the first length is called a few times before the trace begins. With a ladder among the options the
    number of tokens is left open. Drops all compiled code of this process first (``bcg_compiler.reset``).

    Raises ``OptionError``, ``RuleError`` and ``TraceError``; ``ModelFailed`` where the model itself fails.
    """
    open_dims = token_dims(built.make_inputs) if Options.parse(options).ladder is not None else {}
    reset()
    compiled: Any = torch.compile(built.model, backend="bcg", options=dict(options) if options else None)

    def call(length: int, number: int, timed: AbstractContextManager[None]) -> None:
        inputs = built.make_inputs(length, torch.Generator().manual_seed(seed + number))
        mark_open(inputs, open_dims)
        try:
            with torch.inference_mode(), timed:  # inputs on their way to a device wait for the call before
                compiled(**inputs)
        except Exception as error:
            if (users := user_error(error)) is not None:
                raise users from None
            call_eager(built.model, inputs, length)
            raise

    for number in range(WARM_UPS if warm else 0):
        call(lengths[0], number, nullcontext())
    with trace(compiled, nvtx=nvtx) as timeline:
        for number, length in enumerate(lengths):
            call(length, number, timeline.call(f"{length} tokens"))
            progress(number + 1, len(lengths))
    captured_on = next((p.captured_on for p in programs_of(compiled) if p.captured_on), "")
    return Watched(timeline, captured_on, compiled, stats(compiled))
