"""A plan with its code: what Dynamo calls in place of the graph."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bcg_compiler.buckets import Admission, Batch, Ladder
from bcg_compiler.compat.backends import autocast_as, autocast_now
from bcg_compiler.compat.fake import is_plain
from bcg_compiler.context import PLANNED, forward_context, published
from bcg_compiler.errors import LadderError, LateCaptureError, SegmentError, TraceError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import Lowered, lower
from bcg_compiler.options import Options
from bcg_compiler.plan import Plan
from bcg_compiler.plan.memory import forecast_ladder
from bcg_compiler.plan.padding import token_place
from bcg_compiler.plan.sizes import evaluate
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.admissions import Admissions
from bcg_compiler.runtime.arena import Arena
from bcg_compiler.runtime.buckets import Bucket, Sizes, read_sizes
from bcg_compiler.runtime.capture import CaptureDevice, CudaCapture, EmulatedCapture
from bcg_compiler.runtime.compiled import Compiled
from bcg_compiler.runtime.counters import counters
from bcg_compiler.runtime.inputs import Inputs
from bcg_compiler.runtime.lines import Lines
from bcg_compiler.runtime.places import Place, Places
from bcg_compiler.runtime.recording import Capture, record, rehearse
from bcg_compiler.runtime.trial import find_uncapturable
from bcg_compiler.runtime.unsplit import released
from bcg_compiler.runtime.watch import watching

#: Why a rung is not captured whose capture showed what the plan did not know: what a break makes is seen in a call.
REPLANNED = "an operation cannot be captured and has become a break; call the model once, and capture again"


class Rung(NamedTuple):
    """One bucket that was captured ahead, or why it was not.

    ``others`` are the other open sizes that it was captured for; ``bytes`` what all captures hold after it.
    """

    rows: int
    others: tuple[int, ...]
    seconds: float
    bytes: int
    error: str = ""


class Watcher(Protocol):
    """Sees what the calls of a program do."""

    def copy(self, capture: Capture) -> Capture:
        """What is replayed in place of a capture."""

    def around(self, what: str) -> AbstractContextManager[None]:
        """Around all else that a call does: an eager run with its reason, a capture."""


class Program:
    """Runs the steps of one plan: eagerly at the first call of a shape, captured and replayed from the second on.

    ``again`` makes the parts anew after a node was marked; it is used when a capture shows that a node cannot be
    captured. One lock for each program: a call while another one runs, from inside of it or from another thread, runs
    eagerly.
    """

    def __init__(
        self, compiled: Compiled, options: Options, again: Callable[[AnnotatedGraph, Options], Compiled]
    ) -> None:
        self.eager_runs: Counter[str] = Counter()
        self.replays = 0
        self.bucket_replays: Counter[int] = Counter()
        self.live_rows = 0  # of the replays in buckets
        self.captures = 0
        self.recaptures = 0
        self._options = options
        self._again = again
        self._watch = watching()
        self._lock = threading.Lock()
        self._runner = 0  # the thread that holds the lock
        self._lines = Lines()
        self.captured_on = ""
        self._device: CaptureDevice | None = None
        self._counted = False
        self._never: str | None = None
        self._warm: dict[Any, dict[int, Any]] = {}
        self._arena = Arena()
        self._captured: list[Mapping[str, int]] = []  # open sizes, in the order of captures
        self._forecast: tuple[Plan | None, list[Mapping[str, int]], int] = None, [], 0  # for what, and how many bytes
        self._others: tuple[int, ...] = ()  # open sizes of the last call, but for the rows
        self._grad = False  # whether calls are made under grad mode
        self._autocast = autocast_now()
        self._examples: dict[tuple[int, ...], list[Any]] = {}  # by these sizes: what arguments look like
        self._lost: dict[int, str] = {}  # rungs of the ladder that could not be captured, and why
        self.complete = False  # whether bcg.capture has captured all there is
        self._take(compiled)

    def __call__(self, *args: Any) -> Any:
        if not self._counted:
            self._count_plan()
        fields: dict[str, Any] = {}
        if self._rows_at is not None:
            position, dim = self._rows_at
            given, agreed = args[position].shape[dim], published("admission")
            fields["live_rows"] = given if agreed is None else min(agreed.rows, given)
        if self._has_plans:
            fields[PLANNED] = set()
        if not fields:
            return self._call_alone(args)
        with forward_context(**fields):
            return self._call_alone(args)

    def _call_alone(self, args: tuple[Any, ...]) -> Any:
        # Nobody waits: a body may wait for a thread that calls this program, or be called by another program's body.
        if not self._lock.acquire(blocking=False):
            return self._eagerly("busy", args)
        self._runner = threading.get_ident()
        try:
            return self._call(args)
        except Exception as error:
            self._lines.say_where(error)
            raise
        finally:
            self._runner = 0
            self._lock.release()

    def release(self) -> None:
        """Let go of captures and code. A call after this raises ``ReleasedError``.

        Waits for a call in another thread; one that it is called from, by a break's body, loses its captures.
        """
        with nullcontext() if self._runner == threading.get_ident() else self._lock:
            self._forget_captures()
            self._call = released  # type: ignore[method-assign,assignment]
            self._lines.clear()

    @property
    def source(self) -> str:
        """The generated text of the eager program."""
        return self._compiled.lowered.codes[0].source

    # -- one call

    def _call(self, args: tuple[Any, ...]) -> Any:
        if self._never is not None:
            return self._eagerly(self._never, args)
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            # The caller's graph would hold memory of ours, and a capture cannot start inside of one.
            return self._eagerly("outer_capture", args)
        if self._admissions is not None:
            return self._call_padded(self._admissions, args)
        shape = self._inputs.shape(args)
        place = self._places.of(args)
        capture = place.captures.get(shape)
        if capture is not None:
            if self._inputs.written and self._inputs.overlap(args):
                return self._eagerly("input_overlap", args)
            return self._replay(capture, args)
        forms = self._warm.get(shape)
        if forms is None:
            return self._warm_up(shape, args)
        if self._inputs.overlap(args):
            return self._eagerly("input_overlap", args)
        if self.kept_captures >= self._options.max_captures:
            return self._eagerly("capture_limit", args)
        capture = self._capture(place, shape, args, forms)
        return self._call(args) if capture is None else self._replay(capture, args)

    def _call_padded(self, admissions: Admissions, args: tuple[Any, ...]) -> Any:
        """A call whose inputs are padded: it replays the bucket that it is admitted to."""
        sizes = admissions.sizes
        rows, others = sizes.rows(args), sizes.others(args)
        if others not in self._examples and len(self._examples) < self._options.max_captures:
            self._examples[others] = self._inputs.example(args)
            # Both are the same at each call: Dynamo guards on them.
            self._grad, self._autocast = torch.is_grad_enabled(), autocast_now()
        self._others = others
        admission = admissions.of_call(rows, others)
        if admission.bucket is None:
            return self._eagerly(admission.reason, args)
        bucket = sizes.bucket(admission.bucket, others)
        shape = self._bucket_key(bucket)
        place = self._places.of(args)
        capture = place.captures.get(shape)
        if capture is None:
            self._bind_examples([args[position] for position in self._inputs.statics])
        if (capture is None or self._inputs.written) and self._inputs.overlap(args):
            return self._eagerly("input_overlap", args)
        if capture is not None:
            return self._replay_in_bucket(capture, args, admission.rows)
        if self.complete and self._options.on_late_capture == "eager":
            return self._eagerly("late_capture", args)
        if self.complete and self._options.on_late_capture == "error":
            raise LateCaptureError(
                f"A call with {rows} rows needs a capture of bucket {admission.bucket}, after bcg.capture had "
                f"captured all. Its parameters have moved, or its other sizes, {others}, are new. Capture again, "
                f"or compile with options={{'on_late_capture': 'eager'}}."
            )
        if self.kept_captures >= max(self._options.max_captures, len(sizes.padding.buckets)):
            return self._eagerly("capture_limit", args)
        if self._warm:
            capture = self._capture(place, shape, args, self._forms(bucket), bucket)
            return self._call(args) if capture is None else self._replay_in_bucket(capture, args, admission.rows)
        result = self._warm_up(None, args)
        if self._never is None and self._admissions is admissions:
            self._capture(place, shape, args, self._forms(bucket), bucket)
        return result

    def _bind_examples(self, statics: Sequence[Tensor]) -> None:
        """Let calls whose parameters were replaced, or were those of an instance that is gone, be of these ones."""
        for example in self._examples.values():
            if not self._inputs.is_bound(example):
                self._inputs.bind(example, statics)

    def _bucket_key(self, bucket: Bucket) -> Any:
        return self._inputs.kernels(), bucket.rows, bucket.others

    @property
    def kept_captures(self) -> int:
        """How many captures there are, over all shapes and sets of addresses."""
        return len(list(self._places.captures()))

    @property
    def replay_sources(self) -> list[str]:
        """The generated texts of the replay functions."""
        return [capture.code.source for capture in self._places.captures()]

    def admit(self, batch: Batch, others: tuple[int, ...] | None = None) -> Admission:
        """Whether a batch replays. ``others``: its open sizes but for the rows; if ``None`` those of the last call."""
        if self._never is not None:
            return Admission(None, self._never, "The program is not captured.", batch.rows)
        if self._admissions is None:
            return Admission(None, "no_ladder", "The program captures exact shapes.", batch.rows)
        return self._admissions.of(batch, self._others if others is None else others)

    def takes(self, rows: int) -> bool:
        """Whether a call with so many rows, and other sizes like the last one, may be of this graph and is padded."""
        return self._admissions is not None and self._admissions.sizes.holds(rows, self._others)

    def _eagerly(self, reason: str, args: tuple[Any, ...]) -> Any:
        self.eager_runs[reason] += 1
        counters.eager_runs[reason] += 1
        return self._compiled.lowered.run(*args)

    def _replay(self, capture: Capture, args: tuple[Any, ...]) -> Any:
        assert self._device is not None
        self._device.before_replay()
        if self._has_plans and capture.rows is not None:
            with forward_context(bucket_rows=capture.rows):
                result = capture.run(*args)
        else:
            result = capture.run(*args)
        self.replays += 1
        counters.replays += 1
        return result

    def _replay_in_bucket(self, capture: Capture, args: tuple[Any, ...], live_rows: int) -> Any:
        assert capture.rows is not None
        result = self._replay(capture, args)
        self.bucket_replays[capture.rows] += 1
        self.live_rows += live_rows
        return result

    def _warm_up(self, shape: Any, args: tuple[Any, ...]) -> Any:
        """The first call of a shape is the user's own: it runs eagerly, and what its breaks make is noted."""
        forms: dict[int, Any] = {}
        bridged: list[tuple[int, Any]] = []
        written = [args[i] for i in self._inputs.written]
        if not all(is_plain(arg) and not arg.is_conj() and not arg.is_neg() for arg in args if isinstance(arg, Tensor)):
            self._never = "odd_input"  # Dynamo guards on all of it

        def note(ordinal: int, value: Any, *given: Any) -> None:
            forms[ordinal] = memory.Form.of(value) if isinstance(value, Tensor) else value
            if ordinal not in self.plan.bridges:
                return
            # A copy on a bridge of its own does not see what is written to the memory that it was copied from.
            mine = args if ordinal in self._written_bridges else written
            others = [*given, *mine, *(v for o, v in bridged if {o, ordinal} & self._written_bridges)]
            if any(memory.share_storage(value, other) for other in others):
                self._never = "break_alias"
            bridged.append((ordinal, value))

        self.eager_runs["warm_up"] += 1
        counters.eager_runs["warm_up"] += 1
        result = self._compiled.lowered.warm_up(note, *args)
        self._warm[shape] = forms
        return result

    # -- capture

    def _capture(
        self, place: Place, shape: Any, args: tuple[Any, ...], forms: Mapping[int, Any], bucket: Bucket | None = None
    ) -> Capture | None:
        """Capture for a shape; ``None`` where that failed and the program has changed its mind about something."""
        if moving := self._places.moving():
            self._compiled.graph.moving |= {self.plan.inputs[position] for position in moving}
            self._forget_captures()
            self._take(self._again(self._compiled.graph, self._options))
            return None
        if self._device is None:
            self._device = self._make_device()
        self._fill_once(args)
        try:
            capture: Capture | None = None
            with self._planned_for_capture(bucket):
                try:
                    capture = self._record(self._device, args, forms, bucket)
                except SegmentError as failed:
                    capture = self._try_warm(failed, args, forms, bucket)
        except torch.OutOfMemoryError as error:
            if bucket is None:
                self._forget_captures()
                self._never = "out_of_memory"
            else:
                self.lose(bucket.rows, str(error) or type(error).__name__)
            return None
        if capture is None:
            return None
        self._lines.add(capture.code)
        self._captured.append(self._open_sizes(args, bucket))
        again = self._places.has(shape)
        self._places.keep(place, args)
        place.captures[shape] = capture
        self.captured_on = self._device.name
        self.captures += 1
        counters.captures += 1
        if again:
            self.recaptures += 1
            counters.recaptures += 1
        return capture

    @contextmanager
    def _planned_for_capture(self, bucket: Bucket | None) -> Iterator[None]:
        """Let the plans prepare what is captured: for all rows of the bucket, which no later plan exceeds."""
        calls = self._compiled.graph.hoisted.values()
        if not calls:
            yield
            return
        rows = {} if bucket is None else {"live_rows": bucket.rows, "bucket_rows": bucket.rows}
        with forward_context(capturing=True, limits=self._options.limits, **rows, **{PLANNED: set()}):
            for call in calls:
                call()
            yield

    def _record(
        self, device: CaptureDevice, args: tuple[Any, ...], forms: Mapping[int, Any], bucket: Bucket | None
    ) -> Capture:
        compiled = self._compiled
        name = _name_for("replay", self._open_sizes(args, bucket))
        watch = None
        if self._watch is not None:
            watch = self._watch.capture(compiled.graph, self.plan, compiled.compiler, bucket, self._lines.add)
        return record(
            compiled.graph,
            compiled.plan,
            self._lowered(bucket),
            device,
            args,
            forms,
            self._arena,
            name,
            bucket,
            self._options.outputs,
            compiled.texts,
            watch,
        )

    def _open_sizes(self, args: Sequence[Any], bucket: Bucket | None) -> Mapping[str, int]:
        return bucket.symbols if bucket is not None else read_sizes(self.plan, args)

    def _lowered(self, bucket: Bucket | None) -> Lowered:
        """The code that is captured in a bucket: units for exactly its sizes, if it is one that is specialised."""
        compiled, padding = self._compiled, self.plan.padding
        if bucket is None or padding is None or bucket.rows not in padding.specialized or compiled.compiler is None:
            return compiled.lowered
        key = bucket.rows, bucket.others
        if key not in self._specialized:
            sizes = {raw: bucket.symbols[size] for raw, size in compiled.size_names().items() if size in bucket.symbols}
            units = compiled.compiler.units_for(compiled.graph, self.plan, sizes)
            name = _name_for("program", bucket.symbols)
            lowered = self._specialized[key] = lower(compiled.graph, self.plan, units, name, compiled.texts)
            for code in lowered.codes:
                self._lines.add(code)
        return self._specialized[key]

    def _try_warm(
        self, failed: SegmentError, args: tuple[Any, ...], forms: Mapping[int, Any], bucket: Bucket | None
    ) -> Capture | None:
        """A segment could not be captured. In a new bucket its kernels may only have to run once before, to be chosen
        or compiled; else an operation is marked as a break.
        """
        assert self._device is not None
        if bucket is not None and len(self._unseen) == len(self.plan.segments):
            try:
                rehearse(self._compiled.graph, self.plan, self._lowered(bucket), args, forms, self._arena, bucket)
                return self._record(self._device, args, forms, bucket)
            except SegmentError as again:
                failed = again
        self._mark_failed(failed)
        return None

    def capture_ladder(self, smoke: bool = True) -> Iterator[Rung]:
        """Capture every bucket for all other sizes that were seen, the largest first; one rung after the other.

        Effects of the model do not happen. A bucket that runs out of memory is dropped and reported.
        """
        with self._alone():
            if (statics := self._places.living()) is not None:
                self._bind_examples(statics)
            for example in self._examples.values():
                self._inputs.check_bound(example)
            self.complete = False
            examples, warm = self._examples, dict(self._warm)
            self._forget_captures()  # of smaller buckets, which would not leave room for larger ones
            self._examples, self._warm = examples, warm
            done: set[Any] = set()
            while left := [b for b in self.planned if (b.rows, b.others) not in done]:
                with torch.set_grad_enabled(self._grad), autocast_as(self._autocast):
                    rung = self._capture_rung(left[0], done, smoke)
                yield rung
            if self._on_cuda:
                torch.cuda.synchronize(self.plan.device)
            self.complete = bool(self._examples)

    def _capture_rung(self, bucket: Bucket, done: set[Any], smoke: bool) -> Rung:
        began = time.perf_counter()
        args = self._inputs.recall(self._examples[bucket.others])
        place, plan = self._places.of(args), self.plan
        shape = self._bucket_key(bucket)
        capture = place.captures.get(shape)
        if capture is None:
            capture = self._capture(place, shape, args, self._forms(bucket), bucket)
        if self.plan is plan:
            done.add((bucket.rows, bucket.others))
        else:
            done.clear()
        if capture is not None and smoke:
            self._smoke(capture)
        return Rung(
            rows=bucket.rows,
            others=bucket.others,
            seconds=time.perf_counter() - began,
            bytes=self.measured_bytes,
            error=self._lost.get(bucket.rows, "" if capture is not None else REPLANNED),
        )

    def _smoke(self, capture: Capture) -> None:
        """Replay what nobody sees, so that a fault shows now, and the first call finds the graphs on the device.

        What breaks fill holds anything, which may be no index: zeros stand there.
        """
        assert self._device is not None
        self._device.before_replay()
        for step in self.plan.steps:
            with torch.no_grad():
                for filled in capture.filled.get(step.index, ()):
                    filled.zero_()
            if step.index in self._unseen:
                capture.replays[step.index]()

    @property
    def never(self) -> str | None:
        """The code of the reason why nothing of it is captured, if so."""
        return self._never

    @property
    def lost(self) -> Mapping[int, str]:
        """The rungs of the ladder that could not be captured, and why."""
        return self._lost

    @property
    def measured_bytes(self) -> int:
        """What captures, slots and bridges hold, in bytes."""
        return self._arena.bytes + (self._device.bytes if self._device is not None else 0)

    @property
    def eager_units(self) -> Counter[str]:
        """The units that were not compiled, by reason code."""
        return self._compiled.eager_units

    def size_conditions(self) -> list[str]:
        """What holds of the sizes that the plan leaves open, what compilers of units assumed of them included."""
        return self._compiled.size_conditions()

    @property
    def specialized_units(self) -> int:
        """How many units were compiled once more for exactly one bucket."""
        return self._compiled.specialized_units

    @property
    def forecast_bytes(self) -> int:
        """What the captures so far were forecast to hold, in bytes; 0 where a size of theirs cannot be told.

        It takes 15 ms for each capture of a deep model, and servers ask again and again: it is computed anew only where
        something was captured.
        """
        plan, captured, known = self._forecast
        if plan is not self.plan or captured != self._captured:
            try:
                known = forecast_ladder(self.plan, self._captured).captures
            except KeyError:
                known = 0
            self._forecast = self.plan, list(self._captured), known
        return known

    @property
    def planned(self) -> list[Bucket]:
        """What ``capture_ladder`` will capture, in order."""
        if self._admissions is None:
            return []
        sizes = self._admissions.sizes
        rungs = [(rows, others) for others in self._examples for rows in sizes.usable(others) if rows not in self._lost]
        return [sizes.bucket(rows, others) for rows, others in sorted(rungs, reverse=True)]

    @property
    def planned_bytes(self) -> int:
        """What those captures are forecast to hold, in bytes."""
        return forecast_ladder(self.plan, [bucket.symbols for bucket in self.planned]).captures

    def use_ladder(self, ladder: Ladder) -> None:
        """Take another ladder: captures of the old one go.

        If there was none before, or other parameters than before are read where they lie, a call must follow.
        """
        with self._alone():
            options = replace(self._options, ladder=ladder)
            compiled = self._again(self._compiled.graph, options)
            padded = self._admissions is not None and compiled.plan.padding is not None
            never, examples, warm, statics = self._never, self._examples, dict(self._warm), self._inputs.statics
            self._forget_captures()
            self._options = options
            self._take(compiled)
            self._lost.clear()
            if padded and self._inputs.statics == statics:
                self._never, self._examples, self._warm = never, examples, warm

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no call runs. Raises ``LadderError`` inside of one: it would wait for itself."""
        if self._runner == threading.get_ident():
            raise LadderError("The model is running: capture it before or after a call, and not in a break's body.")
        with self._lock:
            self._runner = threading.get_ident()
            try:
                yield
            finally:
                self._runner = 0

    def lose(self, rows: int, why: str) -> None:
        """Do without a rung of the ladder."""
        self._lost[rows] = why
        if self._admissions is not None:
            self._admissions.forget()

    def _forms(self, bucket: Bucket) -> dict[int, Any]:
        """What the results of breaks look like in a bucket."""
        values = self.plan.by_ordinal
        found = dict(self._warm.get(None, {}))
        for ordinal in (*self.plan.bridges, *found):
            value = values.get(ordinal)
            if value is None or not bucket.tells(value):
                continue  # as it was in the first call
            if value.specs:
                found[ordinal] = bucket.form(value.specs[0])
            elif value.size:
                found[ordinal] = evaluate(value.size, bucket.symbols)
        return found

    def _fill_once(self, args: Sequence[Any]) -> None:
        """Fill the slots that are filled once, when there is a call to take their values from."""
        for slot in self.plan.slots:
            if slot.policy.kind == "once" and slot.ordinal not in self._filled:
                argument = args[self._inputs.positions[slot.ordinal]]
                buffer = self._arena.buffer(f"slot {slot.ordinal}", memory.Form.of(argument))
                memory.fill_slot(buffer, argument)
                self._filled.add(slot.ordinal)

    def _make_device(self) -> CaptureDevice:
        device = torch.device(self.plan.device)
        wanted = self._options.capture
        if self._watch is not None and (watched := self._watch.device(device, wanted)) is not None:
            return watched
        if wanted == "cuda" or (wanted == "auto" and device.type == "cuda"):
            return CudaCapture(device)
        return EmulatedCapture(device)

    def _mark_failed(self, failed: SegmentError) -> None:
        """A node could not be captured: it becomes a break, and everything else is captured all the same."""
        assert self._device is not None
        error = failed.__cause__
        assert isinstance(error, Exception)
        named, graph, compiler = self._lines.where(error), self._compiled.graph, self._compiled.compiler
        keys = [unit.key for unit in self.plan.steps[failed.step].units]
        found = find_uncapturable(
            graph,
            self.plan,
            self.plan.steps[failed.step],
            self._device,
            failed.given,
            named[1].ordinal if named else None,
        )
        self._forget_captures()
        fx_node = next((n for n, f in graph.facts.items() if found and f.ordinal == found.ordinal), None)
        text = str(error).strip().splitlines() or ["no message"]
        if fx_node is None and compiler is not None and compiler.give_up(keys, "unit_capture_failed"):
            self._take(self._again(graph, self._options))
            return
        if fx_node is None or not graph.mark(fx_node, "capture_failed", f"{type(error).__name__}: {text[0]}"):
            self._never = "capture_failed"
            return
        if fx_node in graph.hoisted:  # what its body does, it does in every layer
            for node in graph.hoisted:
                if node.target.spec is fx_node.target.spec:  # type: ignore[union-attr]
                    graph.mark(node, "capture_failed", f"{type(error).__name__}: {text[0]}")
        self._take(self._again(graph, self._options))

    def _take(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.plan = plan = compiled.plan
        self._warm, self._never = {}, None
        self._specialized: dict[tuple[int, tuple[int, ...]], Lowered] = {}  # by rows and other sizes of the bucket
        self._filled: set[int] = set()
        self._examples = {}
        self._others = ()
        if self._options.capture == "off":
            self._never = "capture_off"
        elif plan.uncaptured is not None:
            self._never = plan.uncaptured.code
        elif not plan.segments:
            self._never = "no_segment"
        self._inputs = Inputs(compiled)
        self._places = Places(self._inputs.statics, self._empty_arena)
        self._has_plans = compiled.has_plans
        self._unseen = compiled.unseen_segments()
        self._on_cuda = plan.device.startswith("cuda")
        place = token_place(self._options, plan)
        self._rows_at = (self._inputs.positions[place[0]], place[1]) if place is not None else None
        self._admissions: Admissions | None = None
        if plan.padding is not None and self._never is None:
            # Compilers of units may have assumed more of sizes than the trace did.
            sizes = Sizes(plan, plan.padding, self.size_conditions())
            factor, least = self._options.max_padding_factor, plan.padding.least
            limits = replace(self._options.limits, max_padding_factor=factor, least=least)
            self._admissions = Admissions(sizes, limits, self._lost)
        written = compiled.graph.written
        by_ordinal = {facts.ordinal: facts for facts in compiled.graph.facts.values()}
        self._written_bridges = {o for o in plan.bridges if by_ordinal[o].results & written}
        for code in compiled.lowered.codes:
            self._lines.add(code)

    def _empty_arena(self) -> None:
        self._arena = Arena()
        self._filled.clear()

    def _forget_captures(self) -> None:
        self._places.clear()
        self._warm.clear()
        self._empty_arena()
        self._captured.clear()
        if self._device is not None:
            self._device.release()
            self._device = None

    # -- reports

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Let somebody see what calls do. Raises ``TraceError`` if somebody does already.

        Methods of this one object are replaced for the time: where nobody watches, a call asks for nobody.
        """
        if "_replay" in vars(self):
            raise TraceError("This program is traced already: end that trace first.")
        copies: dict[Callable[..., Any], Capture] = {}
        replay, eagerly, warm_up, capture = self._replay, self._eagerly, self._warm_up, self._capture

        def replay_copy(kept: Capture, args: tuple[Any, ...]) -> Any:
            if kept.run not in copies:
                copies[kept.run] = watcher.copy(kept)
                self._lines.add(copies[kept.run].code)
            return replay(copies[kept.run], args)

        def around(what: str, method: Callable[..., Any], *given: Any) -> Any:
            with watcher.around(what):
                return method(*given)

        seen: dict[str, Callable[..., Any]] = {
            "_replay": replay_copy,
            "_eagerly": lambda reason, args: around(f"eager run: {reason}", eagerly, reason, args),
            "_warm_up": partial(around, "eager run: warm_up", warm_up),
            "_capture": partial(around, "capture", capture),
        }
        vars(self).update(seen)
        try:
            yield
        finally:
            for name in seen:
                del vars(self)[name]

    def _count_plan(self) -> None:
        self._counted = True
        counters.graphs += 1
        counters.segments += len(self.plan.segments)
        counters.breaks += len(self.plan.breaks)


def _name_for(text: str, sizes: Mapping[str, int]) -> str:
    """The name of a generated text that is for these sizes only."""
    return "_".join([text, *(f"{symbol}_{size}" for symbol, size in sizes.items())])
