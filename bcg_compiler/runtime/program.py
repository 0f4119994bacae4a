"""A plan with its code: what Dynamo calls in place of the graph."""

import itertools
import linecache
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bcg_compiler.compat.addresses import same_addresses
from bcg_compiler.compat.backends import attention_kernels
from bcg_compiler.compat.fake import is_plain
from bcg_compiler.errors import ReleasedError, SegmentError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import Code, Lowered
from bcg_compiler.options import Options
from bcg_compiler.plan import Plan, PlanNode, Step
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.capture import CaptureDevice, CudaCapture, EmulatedCapture
from bcg_compiler.runtime.counters import counters
from bcg_compiler.runtime.recording import record
from bcg_compiler.runtime.trial import find_uncapturable

_numbers = itertools.count()

#: How often a tensor may be replaced, while others stay, before it is no longer read where it lies.
MOVES = 4


@dataclass(frozen=True)
class Compiled:
    """What a program is made of: the marked graph, its plan and its code."""

    graph: AnnotatedGraph
    plan: Plan
    lowered: Lowered


class Program:
    """Runs the steps of one plan: eagerly at the first call of a shape, captured and replayed from the second on.

    ``again`` makes the parts anew after a node was marked; it is used when a capture shows that a node cannot be
    captured. One lock for each program: a call while another one runs, from inside of it or from another thread, runs
    eagerly.
    """

    def __init__(self, compiled: Compiled, options: Options, again: Callable[[AnnotatedGraph], Compiled]) -> None:
        self.eager_runs: Counter[str] = Counter()
        self.replays = 0
        self.captures = 0
        self.recaptures = 0
        self._options = options
        self._again = again
        self._lock = threading.Lock()
        self._runner = 0  # the thread that holds the lock
        self._lines: dict[str, dict[int, tuple[Step, PlanNode]]] = {}
        self.captured_on = ""
        self._device: CaptureDevice | None = None
        self._counted = False
        self._never: str | None = None
        self._last: _Last | None = None
        self._replays: dict[Any, Code] = {}
        self._warm: dict[Any, dict[int, Any]] = {}
        self._watched: dict[Any, list[weakref.ref[Any]]] = {}
        self._dropped: list[list[weakref.ref[Any]]] = []
        self._moves: Counter[int] = Counter()
        self._take(compiled)

    def __call__(self, *args: Any) -> Any:
        if not self._counted:
            self._count_plan()
        # Nobody waits: a body may wait for a thread that calls this program, or be called by another program's body.
        if not self._lock.acquire(blocking=False):
            return self._eagerly("busy", args)
        self._runner = threading.get_ident()
        try:
            return self._call(args)
        except Exception as error:
            self._say_where(error)
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
            self._call = _released  # type: ignore[method-assign,assignment]
            self._lines.clear()

    @property
    def source(self) -> str:
        """The generated text of the eager program."""
        return self._compiled.lowered.codes[0].source

    @property
    def replay_sources(self) -> list[str]:
        """The generated texts of the replay functions, oldest first."""
        return [code.source for code in self._replays.values()]

    # -- one call

    def _call(self, args: tuple[Any, ...]) -> Any:
        if self._never is not None:
            return self._eagerly(self._never, args)
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            # The caller's graph would hold memory of ours, and a capture cannot start inside of one.
            return self._eagerly("outer_capture", args)
        shape = self._shape_key(args) if self._open else None
        last = self._last
        if last is not None and shape == last.shape and same_addresses(args, last.addresses, self._statics):
            code: Code | None = last.code
            key: Any = None
        else:
            key = (shape, tuple([args[i].data_ptr() for i in self._statics]))
            code = self._replays.get(key)
            if code is not None:
                addresses: list[int | None] = [None] * len(args)
                for position, address in zip(self._statics, key[1], strict=True):
                    addresses[position] = address
                self._last = _Last(shape, addresses, code)
        if code is not None:
            if self._written and self._overlapping(args):
                return self._eagerly("input_overlap", args)
            return self._replay(code, args)
        forms = self._warm.get(shape)
        if forms is None:
            return self._warm_up(shape, args)
        if self._overlapping(args):
            return self._eagerly("input_overlap", args)
        if len(self._replays) >= self._options.max_captures:
            return self._eagerly("capture_limit", args)
        code = self._capture(key, args, forms)
        if code is None:
            return self._call(args)
        return self._replay(code, args)

    def _eagerly(self, reason: str, args: tuple[Any, ...]) -> Any:
        self.eager_runs[reason] += 1
        counters.eager_runs[reason] += 1
        return self._compiled.lowered.run(*args)

    def _replay(self, code: Code, args: tuple[Any, ...]) -> Any:
        assert self._device is not None
        self._device.before_replay()
        result = code.made(*args)
        self.replays += 1
        counters.replays += 1
        return result

    def _warm_up(self, shape: Any, args: tuple[Any, ...]) -> Any:
        """The first call of a shape is the user's own: it runs eagerly, and what its breaks make is noted."""
        forms: dict[int, Any] = {}
        bridged: list[tuple[int, Any]] = []
        written = [args[i] for i in self._written]
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

    def _capture(self, key: Any, args: tuple[Any, ...], forms: Any) -> Code | None:
        """Capture for ``key``; ``None`` where that failed and the program has changed its mind about something."""
        if self._notice_moves():
            return None
        if self._device is None:
            self._device = self._make_device()
        compiled = self._compiled
        filename = f"<bcg replay {next(_numbers)}>"
        try:
            try:
                code = record(compiled.graph, compiled.plan, compiled.lowered, self._device, args, forms, filename)
            except SegmentError as failed:
                self._mark_failed(failed)
                return None
        except torch.OutOfMemoryError:
            self._forget_captures()
            self._never = "out_of_memory"
            return None
        self._remember(code)
        again = any(shape == key[0] for shape, _ in self._replays)
        self._replays[key] = code
        self.captured_on = self._device.name
        self.captures += 1
        counters.captures += 1
        if again:
            self.recaptures += 1
            counters.recaptures += 1
        self._forget_with_statics(key, args)
        return code

    def _make_device(self) -> CaptureDevice:
        device = torch.device(self.plan.device)
        wanted = self._options.capture
        if wanted == "cuda" or (wanted == "auto" and device.type == "cuda"):
            return CudaCapture(device)
        return EmulatedCapture(device)

    def _mark_failed(self, failed: SegmentError) -> None:
        """A node could not be captured: it becomes a break, and everything else is captured all the same."""
        assert self._device is not None
        error = failed.__cause__
        assert isinstance(error, Exception)
        named, graph = self._where(error), self._compiled.graph
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
        if fx_node is None or not graph.mark(fx_node, "capture_failed", f"{type(error).__name__}: {text[0]}"):
            self._never = "capture_failed"
            return
        self._take(self._again(graph))

    def _take(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.plan = plan = compiled.plan
        self._replays, self._warm, self._last, self._never = {}, {}, None, None
        self._watched, self._dropped, self._moves = {}, [], Counter()
        if self._options.capture == "off":
            self._never = "capture_off"
        elif plan.uncaptured is not None:
            self._never = plan.uncaptured.code
        elif not plan.segments:
            self._never = "no_segment"
        values = {value.ordinal: value for value in plan.values}
        positions = {ordinal: i for i, ordinal in enumerate(plan.inputs)}
        # What a capture reads where it lies: in segments, and in the views that it takes once.
        recorded = {o for step in plan.segments for o in step.inputs}
        recorded |= {o for fixed in compiled.lowered.fixed.values() for o in fixed.inputs}
        self._statics = [positions[o] for o in plan.inputs if values[o].kind == "static" and o in recorded]
        self._sizes = [positions[o] for o in plan.inputs if values[o].kind == "size"]
        self._symbolic = [
            positions[o]
            for o in plan.inputs
            if any(not part.lstrip("-").isdigit() for s in values[o].specs for part in (*s.shape, *s.strides))
        ]
        self._attends = any("attention" in n.op for step in plan.segments for n in step.nodes)
        self._open = bool(self._sizes or self._symbolic or self._attends)
        self._on_cuda = plan.device.startswith("cuda")
        self._written = [positions[o] for o in plan.written_inputs]
        written = compiled.graph.written
        by_ordinal = {facts.ordinal: facts for facts in compiled.graph.facts.values()}
        self._written_bridges = {o for o in plan.bridges if by_ordinal[o].results & written}
        self._tensors = [positions[o] for o in plan.inputs if values[o].specs]
        self._slotted = [positions[slot.ordinal] for slot in plan.slots]
        for code in compiled.lowered.codes:
            self._remember(code)

    def _shape_key(self, args: tuple[Any, ...]) -> Any:
        """What a capture is made for: the sizes that the graph leaves open, and which attention kernels are allowed.

        Dynamo guards everything else.
        """
        return (
            attention_kernels() if self._attends else None,
            tuple([args[i] for i in self._sizes]),
            tuple([(args[i].shape, args[i].stride()) for i in self._symbolic]),
        )

    def _overlapping(self, args: Sequence[Any]) -> bool:
        """Whether a written input shares memory with another input: with slots a write would not be seen there."""
        slots = {i: memory.byte_range(args[i]) for i in self._slotted}
        written = {i: slots.get(i) or memory.byte_range(args[i]) for i in self._written}
        if any(i in slots for i in written):
            others = {i: slots.get(i) or memory.byte_range(args[i]) for i in self._tensors}
        else:
            others = slots  # what is written has no slot: only a slot's copy would miss it
        for i, (start, end) in written.items():
            for j, (other_start, other_end) in others.items():
                if j != i and start < other_end and other_start < end:
                    return True
        return False

    def _forget_with_statics(self, key: Any, args: Sequence[Any]) -> None:
        """A capture goes when a tensor whose address it holds dies: when the model is deleted, say."""
        program = weakref.ref(self)

        def gone(_: Any) -> None:
            alive = program()
            if alive is not None and key in alive._watched:
                alive._replays.pop(key, None)
                alive._last = None
                alive._dropped.append(alive._watched.pop(key))

        self._watched[key] = [weakref.ref(args[i], gone) for i in self._statics]

    def _notice_moves(self) -> bool:
        """Make slots of tensors that keep being replaced while the others stay; whether there were any.

        A module that binds a new state at each call would be captured anew each time. Where all tensors of a capture
        have died, the whole model has.
        """
        for refs in self._dropped:
            dead = [i for i, ref in zip(self._statics, refs, strict=True) if ref() is None]
            if len(dead) < len(refs) or len(refs) == 1:
                self._moves.update(dead)
        self._dropped.clear()
        moving = {self.plan.inputs[i] for i, times in self._moves.items() if times >= MOVES}
        if not moving:
            return False
        self._compiled.graph.moving |= moving
        self._forget_captures()
        self._take(self._again(self._compiled.graph))
        return True

    def _forget_captures(self) -> None:
        self._replays.clear()
        self._watched.clear()
        self._last = None
        self._warm.clear()
        if self._device is not None:
            self._device.release()
            self._device = None

    # -- reports

    def _count_plan(self) -> None:
        self._counted = True
        counters.graphs += 1
        counters.segments += len(self.plan.segments)
        counters.breaks += len(self.plan.breaks)

    def _remember(self, code: Code) -> None:
        """Tracebacks and debuggers show the generated text as if it were a file."""
        self._lines[code.filename] = code.lines
        lines = code.source.splitlines(keepends=True)
        linecache.cache[code.filename] = (len(code.source), None, lines, code.filename)
        weakref.finalize(self, linecache.cache.pop, code.filename, None)

    def _where(self, error: BaseException) -> tuple[Step, PlanNode] | None:
        trace: TracebackType | None = error.__traceback__
        found = None
        while trace is not None:
            lines = self._lines.get(trace.tb_frame.f_code.co_filename, {})
            found = lines.get(trace.tb_lineno, found)
            trace = trace.tb_next
        filename, line = getattr(error, "bcg_line", None) or ("", 0)  # the emulated device's own word
        return self._lines.get(filename, {}).get(line, found)

    def _say_where(self, error: Exception) -> None:
        """Add the step, the operation and the user's line to an exception; the exception itself stays as it is."""
        found = self._where(error)
        if found is None:
            return
        step, node = found
        code = f"\n    {node.source.code}" if node.source and node.source.code else ""
        where = f" in {node.module}" if node.module else ""
        note = f"bcg: {step.kind} {step.index}, %{node.ordinal} {node.op}{where} ({node.source}){code}"
        if note not in getattr(error, "__notes__", ()):  # one exception object may be raised again and again
            error.add_note(note)


class _Last(NamedTuple):
    """The capture that was replayed last: most calls want it again."""

    shape: Any
    addresses: list[int | None]
    code: Code


def _released(*args: Any) -> Any:
    raise ReleasedError("This program was freed by bcg.reset(). Call the compiled model again: it is compiled anew.")


class UnsplitProgram:
    """A graph that runs as it is, with the reason why: no segments, no breaks."""

    plan = None
    source = captured_on = ""
    replays = captures = recaptures = 0

    def __init__(self, run: Any, reason: str) -> None:
        self.eager_runs: Counter[str] = Counter()
        self._run = run
        self._reason = reason

    def release(self) -> None:
        """Let go of the graph. A call after this raises ``ReleasedError``."""
        self._run = _released

    def __call__(self, *args: Any) -> Any:
        if not self.eager_runs:
            counters.graphs += 1
        self.eager_runs[self._reason] += 1
        counters.eager_runs[self._reason] += 1
        return self._run(*args)
