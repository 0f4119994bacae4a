"""Runs a compiled model against eager over many prompts: every result is compared.

Bit by bit, and where inputs are padded, or segments compiled, within the tolerance of the dtype: kernels add up in
another order in a bucket, and compilers fuse.
"""

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bcg_compiler.backend import segment_compiler
from bcg_compiler.buckets import Ladder
from bcg_compiler.compat.dynamo_log import Uncompiled, dynamo_log
from bcg_compiler.compat.inductor import on_cuda
from bcg_compiler.debug.compare import Comparison, Difference, compare
from bcg_compiler.debug.errors import call_eager, model_failed, user_error
from bcg_compiler.debug.tokens import mark_open, token_dims, tokens
from bcg_compiler.models.zoo import ZooModel
from bcg_compiler.options import Options
from bcg_compiler.plan import Plan
from bcg_compiler.runtime import admission, counters, programs_of

#: How many of the lengths are timed, and how often each: after one more call that is not timed, as a program may still
#: be preparing itself at the second call of a shape.
TIMED_LENGTHS = 4
TIMED_CALLS = 3


@dataclass(frozen=True)
class Mismatch:
    """A call whose result is not eager's. ``call`` counts from 0."""

    call: int
    length: int
    difference: Difference


@dataclass(frozen=True)
class Ran:
    """A plan (``None``: a graph that runs unsplit) with how its program ran, by reason code of the eager runs.

    ``captured_on`` is ``cuda``, ``emulated``, or "" if it was never captured. ``forecast`` and ``measured`` are bytes.
    """

    plan: Plan | None
    eager_runs: Mapping[str, int]
    captures: int = 0
    replays: int = 0
    captured_on: str = ""
    forecast: int = 0
    measured: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds of the calls that were timed, compiled and eager in pairs, at some of the lengths."""

    compiled: tuple[float, ...]
    eager: tuple[float, ...]
    lengths: tuple[int, ...]

    def speed(self) -> tuple[float, float, float]:
        """How many times as fast as eager: the lower quartile of the pairs, the median, the upper quartile."""
        ratios = [eager / compiled for compiled, eager in zip(self.compiled, self.eager, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high


@dataclass(frozen=True)
class RunReport:
    """What a run saw.

    ``calls``     compared, with ``tensors`` in their results; ``wrong`` of these calls differ, and ``close`` of them
                  only within the tolerance
    ``state``     how the model's parameters and buffers differ from those of the eager model after all calls
    ``compiling`` seconds of each call in which a graph was compiled, that call included
    ``largest``   the largest absolute difference of all, those within the tolerance too
    ``ladder``    that the model was compiled with, if any
    ``live``      tokens of the calls that replayed in a bucket, and ``padded`` ones that the buckets added
    ``tolerant``  whether results need only be close: where inputs are padded, or segments are compiled
    """

    calls: int
    tensors: int
    wrong: int
    close: int
    mismatches: tuple[Mismatch, ...]
    state: Comparison
    ran: tuple[Ran, ...]
    uncompiled: Uncompiled
    compiling: tuple[float, ...]
    timing: Timing | None
    largest: float = 0.0
    ladder: Ladder | None = None
    live: int = 0
    padded: int = 0
    tolerant: bool = False

    @property
    def equal(self) -> bool:
        """Whether every result, and the state that the calls left, is eager's."""
        return not self.mismatches and self.state.equal

    def eager_runs(self) -> Counter[str]:
        """Runs of whole programs without replay, by reason code."""
        return sum((Counter(ran.eager_runs) for ran in self.ran), Counter())


def compare_with_eager(
    built: ZooModel,
    lengths: Sequence[int],
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    timed: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RunReport:
    """Call the model once for each of ``lengths`` (in tokens), compiled and eager, under ``torch.inference_mode()``.

    The eager model is a copy, so that what calls leave behind in a model is compared too. Both see the same inputs,
    which depend on ``seed``, and the same state of the random generators. Then, if ``timed``, some of the lengths are
    called again and timed; these calls are compared as well. ``progress`` is told how many calls are done.

    With a ladder among the options the number of tokens is left open. Results need only be close to eager's if a graph
    is padded, or segments are compiled; see ``compare.TOLERANCES``.

    Raises ``OptionError`` and ``RuleError``; ``ModelFailed`` where eager fails; and unchanged what only the compiled
    model raises.
    """
    return _Run(built, options, seed, progress).run(lengths, _lengths_to_time(lengths) if timed else [])


class _Run:
    def __init__(
        self, built: ZooModel, options: Mapping[str, Any] | None, seed: int, progress: Callable[[int, int], None]
    ) -> None:
        self.built = built
        self.ladder = Options.parse(options).ladder
        self.open = token_dims(built.make_inputs) if self.ladder is not None else {}
        self.seed = seed
        self.progress = progress
        try:
            self.reference = copy.deepcopy(built.model)
        except Exception as error:
            raise model_failed(error, "The model cannot be copied for the comparison with eager") from error
        given = {"segment_compiler": "eager", **(options or {})}  # compared bit for bit, on every device
        self.fused = segment_compiler(Options.parse(given), on_cuda=on_cuda(built.model.parameters())) != "eager"
        self.compiled: Any = torch.compile(built.model, backend="bcg", options=given)
        self.calls = self.tensors = self.live = self.padded = 0
        self.differing: list[Mismatch] = []
        self.compiling: list[float] = []
        self.total = 0

    def run(self, lengths: Sequence[int], timed: Sequence[int]) -> RunReport:
        self.total = len(lengths) + len(timed) * (1 + TIMED_CALLS)
        before = set(programs_of())
        seconds: list[tuple[float, float]] = []
        with dynamo_log() as log:
            for length in lengths:
                self.call(length)
            for length in timed:
                self.call(length)
                seconds += [self.call(length, eager_first=bool(turn % 2)) for turn in range(TIMED_CALLS)]
        programs = [program for program in programs_of(self.compiled) if program not in before]
        ran = tuple(
            Ran(p.plan, dict(p.eager_runs), p.captures, p.replays, p.captured_on, p.forecast_bytes, p.measured_bytes)
            for p in programs
        )
        tolerant = self.fused or any(r.plan is not None and r.plan.padding is not None for r in ran)
        state = compare(_state(self.built.model), _state(self.reference), "state")
        mismatches = tuple(m for m in self.differing if not (tolerant and m.difference.close))
        wrong = {m.call for m in mismatches}
        left = tuple(d for d in state.differences if not (tolerant and d.close))
        return RunReport(
            calls=self.calls,
            tensors=self.tensors,
            wrong=len(wrong),
            close=len({m.call for m in self.differing} - wrong),
            mismatches=mismatches,
            state=replace(state, differences=left),
            ran=ran,
            uncompiled=log.uncompiled(),
            compiling=tuple(self.compiling),
            timing=_timing(seconds, timed),
            largest=max(
                [m.difference.largest for m in self.differing] + [d.largest for d in state.differences] + [0.0]
            ),
            ladder=self.ladder,
            live=self.live,
            padded=self.padded,
            tolerant=tolerant,
        )

    def call(self, length: int, eager_first: bool = True) -> tuple[float, float]:
        """One call each, compared. Returns the seconds that the compiled and the eager one took."""
        seed = self.seed + self.calls
        inputs = self.built.make_inputs(length, torch.Generator().manual_seed(seed))
        given = copy.deepcopy(inputs)
        mark_open(inputs, self.open)

        def eager() -> tuple[Any, float]:
            return _timed(lambda: call_eager(self.reference, given, length), seed)

        def compiled() -> tuple[Any, float]:
            return _timed(lambda: self.call_compiled(inputs), seed)

        graphs, replays = counters.graphs, self.padded_replays()
        if eager_first:
            (expected, eager_seconds), (got, seconds) = eager(), compiled()
        else:
            (got, seconds), (expected, eager_seconds) = compiled(), eager()
        if counters.graphs > graphs:
            self.compiling.append(seconds)
        if self.padded_replays() > replays:
            rows = tokens(inputs, self.open)
            self.live += rows
            self.padded += (admission(self.compiled, rows=rows).bucket or rows) - rows
        results = compare(got, expected)
        written = compare(inputs, given, "inputs")  # a model may write into what it is given
        differences = (*results.differences, *written.differences)
        self.tensors += results.tensors
        self.differing += [Mismatch(self.calls, length, difference) for difference in differences]
        self.calls += 1
        self.progress(self.calls, self.total)
        return seconds, eager_seconds

    def padded_replays(self) -> int:
        """How often programs have replayed that pad their inputs."""
        return sum(p.replays for p in programs_of(self.compiled) if p.plan is not None and p.plan.padding is not None)

    def call_compiled(self, inputs: dict[str, Any]) -> Any:
        try:
            with torch.inference_mode():
                return self.compiled(**inputs)
        except Exception as error:
            if (users := user_error(error)) is not None:
                raise users from None
            raise


def _timed(call: Callable[[], Any], seed: int) -> tuple[Any, float]:
    torch.manual_seed(seed)
    _wait()
    start = time.perf_counter()
    result = call()
    _wait()
    return result, time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _lengths_to_time(lengths: Sequence[int]) -> list[int]:
    """Some of the different lengths, spread evenly from the shortest to the longest."""
    different = sorted(set(lengths))
    count = min(TIMED_LENGTHS, len(different))
    return [different[(2 * i + 1) * len(different) // (2 * count)] for i in range(count)]


def _timing(seconds: list[tuple[float, float]], lengths: Sequence[int]) -> Timing | None:
    if not seconds:
        return None
    compiled, eager = zip(*seconds, strict=True)
    return Timing(compiled, eager, tuple(lengths))
