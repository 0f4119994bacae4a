"""A replay of a segment beside its operations, on the same values.

The operations run first, on copies of what the segment will be given, at the exact number of rows; each value that they
make is kept. Then the segment is replayed, and looked at: on the emulated device each value as soon as it is there, on
CUDA what the segment leaves. Where the two differ, it is asked which step from operations to replay makes the
difference: the rows of the bucket, the compiled code, or the capture.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.checks.fault import Fault, Kind
from bcg_compiler.checks.numbers import Difference, tensor_difference
from bcg_compiler.compat.fake import storage_key
from bcg_compiler.context import published
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import UnitCompiler, lower_noted
from bcg_compiler.plan import Plan, PlanNode, Step
from bcg_compiler.plan.sizes import evaluate
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.buckets import Bucket
from bcg_compiler.runtime.capture import Replay
from bcg_compiler.runtime.capture.emulated import at_replay, spoil

log = logging.getLogger("bcg_compiler")

#: Names of operations that allocate begin like this.
_ALLOCATES = ("aten::empty", "aten::new_empty")

#: (ordinal, copy of the value) in the order in which values were made or written.
Notes = list[tuple[int, Tensor]]


class SegmentCheck:
    """Checks one segment of one capture."""

    def __init__(
        self,
        graph: AnnotatedGraph,
        plan: Plan,
        step: Step,
        bucket: Bucket | None,
        compiler: UnitCompiler | None,
        report: Callable[[Fault], None],
        eagerly: bool = False,
    ) -> None:
        self.code = lower_noted(graph, plan, step)
        self._graph = graph
        self._plan = plan
        self._step = step
        self._bucket = bucket
        self._report = report
        self._eagerly = eagerly
        self._nodes = {f.ordinal: node for node, f in graph.known.items()}
        self._taken = [o for o in step.inputs if self._nodes[o] not in graph.constants]
        self._units = {} if compiler is None else compiler.units(graph, plan)
        self._units = {unit.key: self._units[unit.key] for unit in step.units if unit.key in self._units}
        self._compiler = compiler
        facts = [graph.facts[self._nodes[node.ordinal]] for node in step.nodes]
        self._writes = frozenset().union(*(f.writes for f in facts))
        self._empty = {
            f.ordinal for f in facts if not f.kernels and any(name.startswith(_ALLOCATES) for name in f.aten)
        }
        # A body whose plan was made for the bucket cannot run at another number of rows.
        self._seen = not any(isinstance(self._nodes[n.ordinal].target, BoundBreak) for n in step.nodes)
        self._failed: Exception | None = None
        self._rows: int | None = None
        self._expected: Notes = []
        self._met = 0
        self._first: tuple[int, Difference] | None = None

    def captured(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What to capture for ``run``: the same with a look at each value, or itself where its units are compiled."""
        empty = set(self._empty)

        def note(ordinal: int, value: Any) -> None:
            if ordinal in empty:
                empty.remove(ordinal)  # whatever is written into it is noted, too
            elif isinstance(value, Tensor):
                at_replay(partial(self._meet, ordinal), value)

        return run if self._units else partial(self.code.made, note)

    def replay(self, args: tuple[Any, ...], results: tuple[Any, ...], replay: Replay) -> None:
        """Run the operations, then the replay, and report the first difference; the operations alone if ``eagerly``."""
        __tracebackhide__ = True
        if not self._seen:
            return replay()
        rows = self._rows = self._live_rows()
        with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
            given = self._copies(args, rows)
            in_bucket = self._copies(args, None) if rows is not None else given
        self._expected, self._met, self._first = [], 0, None
        wanted = self._operations(given, self._expected)
        if wanted is None and rows is not None:  # an index of a padded row, say
            self._report(self._about("padding", -1, Difference("", f"At the exact length: {self._failed!r}"), rows))
            given, rows, self._rows, self._expected = in_bucket, None, None, []
            wanted = self._operations(given, self._expected)
        left, right = (*results, *args), (*(wanted or ()), *given)
        if wanted is not None and self._eagerly:
            if rows is not None:  # what stands in padded rows may be an index
                _put(results, self._operations(in_bucket, []) or ())
            _put(left, right)
            return None
        replay()
        if wanted is None:
            log.warning("bcg: segment %d is not checked: its operations alone raise %r", self._step.index, self._failed)
            return None
        found = self._first
        for ordinal, got, want in zip((*self._step.outputs, *self._taken), left, right, strict=True):
            if found is None and isinstance(want, Tensor) and got is not want:
                difference = self._differs(got, want)
                found = None if difference is None else (ordinal, difference)
        if found is not None:
            fault = self._fault(*found, in_bucket, rows)
            taken = dict(zip(self._taken, given, strict=True))
            self._report(replace(fault, graph=self._graph, given=taken, made=dict(self._expected)))
        return None

    def _meet(self, ordinal: int, value: Tensor) -> None:
        """A replay has come to a value."""
        if self._first is None and self._met < len(self._expected):
            expected, want = self._expected[self._met]
            if expected == ordinal and (difference := self._differs(value, want)) is not None:
                self._first = ordinal, difference
        self._met += 1

    def _live_rows(self) -> int | None:
        """The live rows of the call, if there are padded ones beside them."""
        live = published("live_rows")
        return live if self._bucket is not None and live is not None and live < self._bucket.rows else None

    def _operations(self, args: Sequence[Any], notes: Notes) -> tuple[Any, ...] | None:
        """Run the operations; ``None`` if they raise: a replay raises for itself what there is to raise, else it is
        said that the segment was not checked.
        """
        empty = set(self._empty)

        def note(ordinal: int, value: Any) -> None:
            if ordinal in empty:
                empty.remove(ordinal)
                spoil(value)  # as the capture's is
            elif isinstance(value, Tensor):
                notes.append((ordinal, value.clone()))

        with undrawn(self._plan.device), torch.inference_mode(False), torch.no_grad():
            try:
                result = self.code.made(note, *args)
            except Exception as error:
                self._failed = error
                return None
        return (result,) if len(self._step.outputs) == 1 else result or ()

    def _copies(self, args: Sequence[Any], rows: int | None) -> list[Any]:
        """The arguments of the segment as they are now, at ``rows`` rows if given: copies where it writes them."""
        values, copies = self._plan.by_ordinal, dict[int | None, torch.UntypedStorage]()
        exact = None
        if rows is not None and self._bucket is not None:
            symbols = {**self._bucket.symbols, self._bucket.symbol: rows}
            exact = replace(self._bucket, rows=rows, symbols=symbols)
        found: list[Any] = []
        for ordinal, arg in zip(self._taken, args, strict=True):
            value = values[ordinal]
            if not isinstance(arg, Tensor):
                tells = exact is not None and value.size and exact.tells(value)
                found.append(evaluate(value.size, exact.symbols) if tells and exact is not None else arg)
                continue
            facts = self._graph.producer_facts(self._nodes[ordinal])
            form = exact.form(value.specs[0]) if exact is not None and exact.tells(value) else memory.Form.of(arg)
            if facts is not None and facts.results & self._writes:
                key = storage_key(arg)
                if key not in copies:
                    copies[key] = memory.own_storage(arg)
                arg = _cut(memory.in_storage(copies[key], memory.View.of(arg)), form.shape)
            elif form.shape != arg.shape:
                arg = memory.own_rows(_cut(arg, form.shape), form.strides)
            found.append(arg)
        return found

    def _differs(self, got: Any, want: Tensor) -> Difference | None:
        """How the live part of ``got`` differs: in any bit, or where rows or code are others beyond the tolerance."""
        padded = self._rows is not None
        if padded and not want.is_floating_point():
            return None  # an order or a count of rows may be another one, of which live rows are independent
        difference = tensor_difference(_cut(got, want.shape), want)
        tolerant = padded or self._units
        return None if difference is None or (tolerant and difference.close) else difference

    # -- what makes the difference

    def _fault(self, ordinal: int, difference: Difference, in_bucket: Sequence[Any], rows: int | None) -> Fault:
        notes: Notes = self._expected
        if rows is not None:
            notes = []
            self._operations(in_bucket, notes)
            for (at, got), (_, want) in zip(notes, self._expected, strict=False):
                if (found := self._differs(got, want)) is not None:
                    return self._about("padding", at, found, rows)
        if self._units:
            made = {**dict(zip(self._taken, in_bucket, strict=True)), **dict(notes)}
            for at, found in self._wrong_units(made):
                return self._about("compiler", at, found, rows)
        return self._about("capture", ordinal, difference, rows)

    def _wrong_units(self, made: Mapping[int, Any]) -> Iterator[tuple[int, Difference]]:
        """The operations at which compiled code first differs, unit by unit: ``made`` are the values of all of them."""
        for unit in self._step.units:
            compiled = self._units.get(unit.key)
            args = [made.get(ordinal) for ordinal in unit.inputs]
            if compiled is None or self._compiler is None or any(arg is None for arg in args):
                continue
            with undrawn(self._plan.device), torch.inference_mode(False), torch.no_grad():
                results = compiled.run(*_apart(args))
                found = list(self._different(unit.outputs, results, made))
                if found:
                    every = self._compiler.with_every_value(self._graph, unit, self._nodes)
                    inner = [] if every is None else self._different(every[0], every[1](*_apart(args)), made)
                    yield next(iter(inner), found[0])

    def _different(
        self, ordinals: Sequence[int], results: Sequence[Any], made: Mapping[int, Any]
    ) -> Iterator[tuple[int, Difference]]:
        for ordinal, got in zip(ordinals, results, strict=True):
            want = made.get(ordinal)
            if isinstance(want, Tensor) and (difference := tensor_difference(got, want)) and not difference.close:
                yield ordinal, difference

    def _about(self, kind: Kind, ordinal: int, difference: Difference, rows: int | None) -> Fault:
        node = next((n for n in self._step.nodes if n.ordinal == ordinal), None) or self._writer_of(ordinal)
        far = f", at most by {difference.largest:.3g}" if difference.largest < math.inf else ""
        what = difference.what + far
        padded = (rows, self._bucket.rows) if rows is not None and self._bucket is not None else None
        place = (self._step.index, "segment", node.ordinal, node.op, node.module, node.source)
        return Fault(kind, *place, what, difference.largest, padded)  # type: ignore[arg-type]

    def _writer_of(self, ordinal: int) -> PlanNode:
        """The first operation of the segment that writes an input of it."""
        known = self._graph.producer_facts(self._nodes.get(ordinal))
        roots = frozenset() if known is None else known.results
        writers = (n for n in self._step.nodes if self._graph.facts[self._nodes[n.ordinal]].writes & roots)
        return next(writers, self._step.nodes[0])


def _cut(value: Any, shape: Sequence[int]) -> Any:
    """The part of a value that has another value's shape: its live rows are the first ones."""
    if not isinstance(value, Tensor) or value.dim() != len(shape):
        return value
    for dim, size in enumerate(shape):
        if size < value.shape[dim]:
            value = value.narrow(dim, 0, size)
    return value


def _put(places: Sequence[Any], values: Sequence[Any]) -> None:
    """Copy values to where they belong; of a place with more rows, to its first ones."""
    for place, value in zip(places, values, strict=bool(values)):
        if isinstance(place, Tensor) and place is not value:
            _cut(place, value.shape).copy_(value)


def _apart(args: Sequence[Any]) -> list[Any]:
    """Copies of tensors: what runs on them may write them."""
    return [memory.own(arg) if isinstance(arg, Tensor) else arg for arg in args]


@contextmanager
def undrawn(device: str) -> Iterator[None]:
    """Leave the generators as they are found."""
    with torch.random.fork_rng([torch.device(device)] if device.startswith("cuda") else []):
        yield
