"""One capture of a program: for one set of shapes and one set of addresses."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bcg_compiler.compat.cuda_graphs import unowned
from bcg_compiler.compat.fake import storage_key
from bcg_compiler.context import captured_context
from bcg_compiler.errors import BreakMutationError, SegmentError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import Captured, Code, Lowered, Stub, Texts, write_replay
from bcg_compiler.plan import Plan
from bcg_compiler.plan.memory import Interval, assign, passing_bridges
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.arena import Arena
from bcg_compiler.runtime.buckets import Bucket
from bcg_compiler.runtime.capture import CaptureDevice, Replay
from bcg_compiler.runtime.pads import Pads
from bcg_compiler.runtime.watch import CaptureWatch


class Capture(NamedTuple):
    """``run`` takes the graph's arguments; ``replays`` are the captured segments, by the index of their step;
    ``filled`` what the breaks of a step write for them; ``rows`` those of its bucket, ``None`` for an exact shape.
    """

    run: Callable[..., Any]
    code: Code
    replays: Mapping[int, Replay]
    filled: Mapping[int, list[Tensor]]
    rows: int | None = None


def record(
    graph: AnnotatedGraph,
    plan: Plan,
    lowered: Lowered,
    device: CaptureDevice,
    args: Sequence[Any],
    forms: Mapping[int, Any],
    arena: Arena,
    name: str,
    bucket: Bucket | None = None,
    outputs: Literal["copy", "alias"] = "copy",
    texts: Texts | None = None,
    watch: CaptureWatch | None = None,
) -> Capture:
    """Capture every segment of ``plan`` at the addresses of ``args`` and write the function that replays them.

    Nothing computes: segments are recorded; of breaks only what looks at memory or allocates is done, and their
    stubs. ``forms`` are what the breaks' results look like. Slots and bridges lie in ``arena``; with a ``bucket`` they
    have its rows. ``texts`` keeps the text of the function under ``name``. ``watch`` looks at segments and breaks as
    they are captured and replayed. Raises ``SegmentError`` where a segment could not be captured; whatever else is
    raised is of a stub, a barrier or an allocation.
    """
    # Aliases of parameters and not they themselves: a capture must not keep a deleted model alive.
    values: dict[int, Any] = {
        o: memory.alias(arg) if isinstance(arg, Tensor) else arg for o, arg in zip(plan.inputs, args, strict=True)
    }
    pads = Pads(plan, bucket)
    values.update(pads.sizes())
    slots = {o: arena.buffer(f"slot {o}", pads.slot(o, values[o])) for o in (slot.ordinal for slot in plan.slots)}
    values.update(slots)
    callers = {storage_key(v) for o, v in values.items() if isinstance(v, Tensor) and o not in slots}
    bridges = _bridges(plan, forms, arena)
    values.update(bridges)
    made: dict[int, Any] = {}
    replays: dict[int, Replay] = {}
    references = _References(device, [*values.values(), *graph.constants.values()])
    held = _seen_by_breaks(graph, plan)
    unwritten = _filled(graph, plan)
    with capturing(device):
        for step in plan.steps:
            if step.kind == "segment":
                taken = tuple(values[o] for o in step.inputs if o in values)
                segment = lowered.segments[step.index]
                if watch is not None:
                    segment = watch.segment(step, segment, taken)
                try:
                    with captured_context():
                        result, replays[step.index] = device.capture(segment, taken)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    raise SegmentError(step.index, taken) from error
                results = (result,) if len(step.outputs) == 1 else result or ()
                values.update(zip(step.outputs, results, strict=True))
                made.update((o, references.of(values[o])) for o in step.outputs)
                if watch is not None:
                    left = tuple(made[o] for o in step.outputs)
                    replays[step.index] = watch.replay(step, taken, left, replays[step.index])
                del result, results
            elif step.index in lowered.fixed:
                fixed = lowered.fixed[step.index]
                before = set(values)
                values.update(zip(fixed.outputs, fixed.run(*(values[o] for o in fixed.inputs)), strict=True))
                references.see_fixed(values, before, fixed.outputs)
                made.update((o, references.of(values[o])) for o in fixed.outputs)
            for ordinal in unwritten.get(step.index, ()) if isinstance(device, _Rehearsal) else ():
                if isinstance(values.get(ordinal), Tensor):
                    values[ordinal].zero_()  # what stands there may be no index
            for stub in lowered.stubs.get(step.index, ()):
                _stand_in(stub, values, forms, bridges, callers)
            for ordinal in set(step.frees) - held:
                values.pop(ordinal, None)
    given = dict(zip(plan.inputs, args, strict=True))
    results, bound = _Results(graph, plan, given, slots, made, bridges, pads, outputs).expressions()
    bound |= {"fill_slot": memory.fill_slot, "fill_bridge": memory.fill_bridge, **pads.functions()}
    if watch is not None:
        bound["note"] = watch.note
    fills, kernels = pads.fills(slots)
    bound |= kernels
    write_backs = {slot.ordinal: pads.write_back(slot, slots[slot.ordinal]) for slot in plan.slots if slot.written}
    captured = Captured(
        replays=replays,
        values=slots | made,
        bridges=bridges,
        rows=pads.rows(),
        sizes=pads.sizes(),
        fills=fills,
        write_backs=write_backs,
        tails=pads.tails(),
        results=results,
        bound=bound,
    )
    code = write_replay(graph, plan, captured, name, texts, None if watch is None else watch.around)
    run = code.made if watch is None else watch.call(code.made, lowered.run)
    known = made | bridges
    tensors = {i: [known[o] for o in filled if isinstance(known.get(o), Tensor)] for i, filled in unwritten.items()}
    return Capture(run, code, replays, tensors, None if bucket is None else bucket.rows)


def _bridges(plan: Plan, forms: Mapping[int, Any], arena: Arena) -> dict[int, Tensor]:
    """A fixed buffer for each bridge; those that are never needed at once share memory."""
    passing = {ordinal: forms[ordinal] for ordinal in sorted(passing_bridges(plan))}
    ranges = {kept.ordinal: kept for kept in plan.bridge_ranges}
    offsets, size = assign(Interval(o, form.bytes, ranges[o].first, ranges[o].last) for o, form in passing.items())
    packed = arena.packed("bridges", passing, offsets, size)
    return {o: packed[o] if o in packed else arena.buffer(f"bridge {o}", forms[o]) for o in plan.bridges}


def rehearse(
    graph: AnnotatedGraph,
    plan: Plan,
    lowered: Lowered,
    args: Sequence[Any],
    forms: Mapping[int, Any],
    arena: Arena,
    bucket: Bucket,
) -> None:
    """Run every segment once in a bucket, on whatever stands in slots and bridges: kernels are chosen and compiled by
    their first run. Only for segments that write nothing outside.
    """
    device = torch.device(plan.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        record(graph, plan, replace(lowered, stubs={}), _Rehearsal(), args, forms, arena, "rehearsal", bucket)


class _Rehearsal:
    """A device that runs what it is given, and captures nothing."""

    name = "rehearsal"
    keeps_memory = False
    bytes = 0

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, segment: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Replay]:
        return segment(*args), lambda: None

    def before_replay(self) -> None: ...

    def release(self) -> None: ...


class _References:
    """What replays name in place of the values of a capture: the same memory, which they leave to the pool.

    Memory that is not of the pool keeps its identity, by which results are known to lie in an argument or a slot:
    that of ``others``, and what fixed operations of breaks allocate.
    """

    def __init__(self, device: CaptureDevice, others: Iterable[Any]) -> None:
        self._device = device
        self._kept = [value for value in others if isinstance(value, Tensor)]  # alive: no other storage has their key
        self._keys = {storage_key(value) for value in self._kept}
        self._places: dict[tuple[int, int], torch.UntypedStorage] = {}

    def see_fixed(self, values: Mapping[int, Any], before: Container[int], made: Iterable[int]) -> None:
        """Fixed operations made values: what is no view of one that was there before, they have allocated."""
        there = {storage_key(value) for o, value in values.items() if o in before and isinstance(value, Tensor)}
        for value in (values[ordinal] for ordinal in made):
            if isinstance(value, Tensor) and storage_key(value) not in there:
                self._kept.append(value)
                self._keys.add(storage_key(value))

    def of(self, value: Any) -> Any:
        """The value for replays."""
        if not isinstance(value, Tensor) or storage_key(value) in self._keys:
            return value
        owner = value.untyped_storage()
        place = owner.data_ptr(), owner.nbytes()
        if place[0] == 0:
            return value  # empty or meta: all would have one address, and look as if they shared memory
        if place not in self._places:
            self._places[place] = unowned(owner)
        found = memory.in_storage(self._places[place], memory.View.of(value))
        if not self._device.keeps_memory:
            found.bcg_owner = owner  # type: ignore[attr-defined]
        if memory.is_inference(value):
            memory.set_inference(found)
        return found


def _seen_by_breaks(graph: AnnotatedGraph, plan: Plan) -> set[int]:
    """What must stay where it is until the replay is over, as a break's body may have kept it: by ordinal."""
    facts = {f.ordinal: f for f in graph.facts.values()}
    bodies = (facts[n.ordinal] for step in plan.breaks for n in step.nodes if n.ordinal not in step.fixed)
    seen = frozenset().union(*(f.reads for f in bodies))
    return {ordinal for ordinal, f in facts.items() if f.results & seen}


def _filled(graph: AnnotatedGraph, plan: Plan) -> dict[int, list[int]]:
    """What breaks write for segments, by the index of their step: ordinals of bridges, and of what segments made."""
    nodes = {f.ordinal: node for node, f in graph.facts.items()}
    found: dict[int, list[int]] = {}
    for step in plan.breaks:
        filled = [o for o in step.outputs if o in plan.bridges]
        for node in (nodes[n.ordinal] for n in step.nodes):
            writes = graph.facts[node].writes - graph.outside
            given = [graph.facts[n] for n in node.all_input_nodes if n in graph.facts]
            filled += [f.ordinal for f in given if f.results & writes]
        found[step.index] = list(dict.fromkeys(filled))
    return found


def _stand_in(
    stub: Stub,
    values: Mapping[int, Any],
    forms: Mapping[int, Any],
    bridges: Mapping[int, Tensor],
    callers: Container[int | None],
) -> None:
    """Do what a break brings for capture. It must not be seen in the caller's memory: a capture has no effects."""
    given = [values[o] if o in values else memory.stand_in(forms[o]) for o in stub.inputs]
    watched = [(t, t._version) for t in given if isinstance(t, Tensor) and storage_key(t) in callers]
    made = stub.run(*given)
    if any(tensor._version != version for tensor, version in watched):
        raise BreakMutationError(
            f"The capture_stub of break {stub.name!r} wrote into memory of the caller's. A capture has no effects: "
            f"let the stub write only what the graph itself allocates, or nothing."
        )
    if made is not None:
        for position, ordinal in stub.items:
            if ordinal in bridges:
                memory.fill_bridge(bridges[ordinal], made[position], f"The capture_stub of break {stub.name!r}")


def _own(name: str, value: Tensor, live: str, strides: str) -> str:
    """The expression that copies the live rows of a value for the caller; ``strides`` are those of live rows."""
    if memory.is_inference(value):
        return f"own_rows_inference({name}{live}, {strides})" if live else f"own_inference({name})"
    # What is cut is no longer dense: a clone of it is, like the value of eager code.
    if memory.clone_keeps_strides(value):
        return f"{name}{live}.clone()"
    return f"own_rows({name}{live}, {strides})" if live else f"own({name})"


@contextmanager
def capturing(device: CaptureDevice) -> Iterator[None]:
    """A session of ``device`` in the modes that a capture needs, whatever those of the call are.

    Autocast keeps casts of weights until its region ends: a recorded address of one would be read after that.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with device.session(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Results:
    """How each returned value is made the caller's own: by the memory that it turned out to lie in."""

    def __init__(
        self,
        graph: AnnotatedGraph,
        plan: Plan,
        args: Mapping[int, Any],
        slots: Mapping[int, Tensor],
        made: Mapping[int, Any],
        bridges: Mapping[int, Tensor],
        pads: Pads,
        outputs: Literal["copy", "alias"],
    ) -> None:
        self._pads = pads
        self._outputs = outputs
        self._roots = {facts.ordinal: facts.results for facts in graph.facts.values()}
        self._plan = plan
        self._args = args
        self._slots = slots
        self._known = {**made, **bridges}
        self._bound: dict[str, Any] = {
            "own": memory.own,
            "own_inference": memory.own_inference,
            "own_rows": memory.own_rows,
            "own_rows_inference": memory.own_rows_inference,
            "own_if": self._own_if(),
            "view_of": memory.view_of,
        }

    def expressions(self) -> tuple[dict[int, str], dict[str, Any]]:
        """An expression for each returned value that must not be handed out as it is; the objects they use."""
        found: dict[int, str] = {}
        shared: dict[int | None, list[int]] = {}
        unknown = self._unknown()
        for ordinal in dict.fromkeys(self._plan.outputs):
            if ordinal in self._args:
                found[ordinal] = f"a{ordinal}"
                continue
            value = self._known.get(ordinal)
            live = self._pads.live(ordinal)
            if ordinal in unknown:
                copies = "None" if len(unknown) == 1 else "(copies := {})" if ordinal == unknown[0] else "copies"
                arguments = "".join(f", a{o}" for o in self._slots)
                found[ordinal] = f"own_if({copies}, v{ordinal}{live}{arguments}{self._pads.cut(ordinal)})"
            elif not isinstance(value, Tensor):
                continue
            elif (owner := self._owner(value)) is not None:
                found[ordinal] = self._view(ordinal, value, *owner) + live
            elif self._outputs == "alias":
                found[ordinal] = f"v{ordinal}{live}"
            else:
                found[ordinal] = _own(f"v{ordinal}", value, live, self._pads.strides(ordinal) if live else "")
                if _is_memory(value):
                    shared.setdefault(_storage(value), []).append(ordinal)
        for ordinals in shared.values():
            if len(ordinals) > 1:
                found.update(self._sharing(ordinals))
        return found, self._bound

    def _unknown(self) -> list[int]:
        """What a break makes at each call, of whatever memory; and the results that it may share this memory with."""
        outputs = [o for o in dict.fromkeys(self._plan.outputs) if o not in self._args]
        roots = frozenset().union(*(self._roots.get(o, frozenset()) for o in outputs if o not in self._known))

        def may_share(ordinal: int) -> bool:
            value = self._known[ordinal]
            own_copy = _is_memory(value) and not memory.is_inference(value) and self._owner(value) is None
            return own_copy and bool(self._roots[ordinal] & roots)

        return [o for o in outputs if o not in self._known or may_share(o)]

    def _owner(self, value: Tensor) -> tuple[int, Tensor] | None:
        """The argument whose memory ``value`` lies in, and the tensor that stands for it in the program."""
        for ordinal, argument in self._args.items():
            standing = self._slots.get(ordinal, argument)
            if _is_memory(standing) and _is_memory(value) and _storage(standing) == _storage(value):
                return ordinal, standing
        return None

    def _view(self, ordinal: int, value: Tensor, owner: int, standing: Tensor) -> str:
        self._bound[f"form_{ordinal}"] = memory.View.of(value, standing)
        return f"view_of(a{owner}, form_{ordinal})"

    def _sharing(self, ordinals: list[int]) -> dict[int, str]:
        """Results that share memory in eager code share it here: one copy of the storage, and a view for each."""
        self._bound |= {"own_storage": memory.own_storage, "in_storage": memory.in_storage}
        first = ordinals[0]
        values = [self._known[ordinal] for ordinal in ordinals]
        plain = all(v.dtype == values[0].dtype and not v.is_conj() and not v.is_neg() for v in values)
        if plain and (base := self._pads.base_stride(ordinals)) is not None:
            self._bound["own_together"] = memory.own_together
            parts = [f"(v{o}{self._pads.live(o)}, {self._pads.strides(o)})" for o in ordinals]
            copies = f"(copies_{first} := own_together(({', '.join(parts)}), {base[0]}, {base[1]}))[0]"
            return {o: f"copies_{first}[{i}]" if i else copies for i, o in enumerate(ordinals)}
        found = {}
        for ordinal in ordinals:
            value = self._known[ordinal]
            self._bound[f"form_{ordinal}"] = memory.View.of(value)
            copy = f"(storage_{first} := own_storage(v{first}))" if ordinal == first else f"storage_{first}"
            found[ordinal] = f"in_storage({copy}, form_{ordinal}){self._pads.live(ordinal)}"
        return found

    def _own_if(self) -> Callable[..., Any]:
        """For what a break made: copied if it lies in memory of the program, a view of the argument if in a slot.

        ``copies`` holds one copy for each storage, where several results may share one. ``cut``: it is the live part.
        """
        fixed = frozenset(_storage(t) for t in self._known.values() if _is_memory(t))
        fixed -= {_storage(t) for t in self._args.values() if _is_memory(t)}  # views of parameters and buffers
        slots = {_storage(slot): (i, slot) for i, slot in enumerate(self._slots.values()) if _is_memory(slot)}

        def own_if(
            copies: dict[int | None, torch.UntypedStorage] | None, value: Any, *arguments: Tensor, cut: str = ""
        ) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(own_if(copies, item, *arguments) for item in value)
            if not _is_memory(value):
                return value
            storage = _storage(value)
            if storage in slots:
                position, slot = slots[storage]
                if not cut or arguments[position].stride() == slot.stride():
                    return memory.view_of(arguments[position], memory.View.of(value, slot))
                if value.shape == arguments[position].shape and value.stride() == slot.stride():
                    return memory.alias(arguments[position])
            if storage not in fixed and (copies is not None or not cut):
                return value
            if copies is None:  # a view would keep the rows of the bucket alive
                return value.clone() if cut == "dense" else memory.own(value)
            if storage not in copies:
                copies[storage] = memory.own_storage(value)
            return memory.in_storage(copies[storage], memory.View.of(value))

        return own_if


def _storage(tensor: Tensor) -> int | None:
    return storage_key(tensor)


def _is_memory(value: Any) -> bool:
    return isinstance(value, Tensor)
