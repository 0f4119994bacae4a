"""Runs a compiled model against eager over many prompts: every result is compared, bit by bit."""

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.compat.dynamo_log import Uncompiled, dynamo_log
from bcg_compiler.debug.compare import Comparison, Difference, compare
from bcg_compiler.debug.errors import call_eager, model_failed, user_error
from bcg_compiler.models.zoo import ZooModel
from bcg_compiler.options import Options
from bcg_compiler.plan import Plan
from bcg_compiler.runtime import counters, programs_of

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

    ``captured_on`` is ``cuda``, ``emulated``, or "" if it was never captured.
    """

    plan: Plan | None
    eager_runs: Mapping[str, int]
    captures: int = 0
    replays: int = 0
    captured_on: str = ""


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

    ``calls``     compared, with ``tensors`` in their results; ``wrong`` of these calls differ
    ``state``     how the model's parameters and buffers differ from those of the eager model after all calls
    ``compiling`` seconds of each call in which a graph was compiled, that call included
    """

    calls: int
    tensors: int
    wrong: int
    mismatches: tuple[Mismatch, ...]
    state: Comparison
    ran: tuple[Ran, ...]
    uncompiled: Uncompiled
    compiling: tuple[float, ...]
    timing: Timing | None

    @property
    def equal(self) -> bool:
        """Whether every result, and the state that the calls left, is eager's bit for bit."""
        return not self.mismatches and self.state.equal

    @property
    def largest(self) -> float:
        """The largest absolute difference of all."""
        found = [m.difference.largest for m in self.mismatches] + [d.largest for d in self.state.differences]
        return max(found, default=0.0)

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

    Raises ``OptionError`` and ``RuleError``; ``ModelFailed`` where eager fails; and unchanged what only the compiled
    model raises.
    """
    Options.parse(options)
    return _Run(built, options, seed, progress).run(lengths, _lengths_to_time(lengths) if timed else [])


class _Run:
    def __init__(
        self, built: ZooModel, options: Mapping[str, Any] | None, seed: int, progress: Callable[[int, int], None]
    ) -> None:
        self.built = built
        self.seed = seed
        self.progress = progress
        try:
            self.reference = copy.deepcopy(built.model)
        except Exception as error:
            raise model_failed(error, "The model cannot be copied for the comparison with eager") from error
        self.compiled: Any = torch.compile(built.model, backend="bcg", options=dict(options) if options else None)
        self.calls = self.tensors = self.wrong = 0
        self.mismatches: list[Mismatch] = []
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
        return RunReport(
            calls=self.calls,
            tensors=self.tensors,
            wrong=self.wrong,
            mismatches=tuple(self.mismatches),
            state=compare(_state(self.built.model), _state(self.reference), "state"),
            ran=tuple(Ran(p.plan, dict(p.eager_runs), p.captures, p.replays, p.captured_on) for p in programs),
            uncompiled=log.uncompiled(),
            compiling=tuple(self.compiling),
            timing=_timing(seconds, timed),
        )

    def call(self, length: int, eager_first: bool = True) -> tuple[float, float]:
        """One call each, compared. Returns the seconds that the compiled and the eager one took."""
        seed = self.seed + self.calls
        inputs = self.built.make_inputs(length, torch.Generator().manual_seed(seed))
        given = copy.deepcopy(inputs)

        def eager() -> tuple[Any, float]:
            return _timed(lambda: call_eager(self.reference, given, length), seed)

        def compiled() -> tuple[Any, float]:
            return _timed(lambda: self.call_compiled(inputs), seed)

        graphs = counters.graphs
        if eager_first:
            (expected, eager_seconds), (got, seconds) = eager(), compiled()
        else:
            (got, seconds), (expected, eager_seconds) = compiled(), eager()
        if counters.graphs > graphs:
            self.compiling.append(seconds)
        results = compare(got, expected)
        written = compare(inputs, given, "inputs")  # a model may write into what it is given
        differences = (*results.differences, *written.differences)
        self.tensors += results.tensors
        self.wrong += bool(differences)
        self.mismatches += [Mismatch(self.calls, length, difference) for difference in differences]
        self.calls += 1
        self.progress(self.calls, self.total)
        return seconds, eager_seconds

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
