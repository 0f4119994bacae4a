"""One capture of a program: for one set of shapes and one set of addresses."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bcg_compiler.compat.fake import storage_key
from bcg_compiler.errors import BreakMutationError, SegmentError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import Captured, Code, Lowered, Stub, write_replay
from bcg_compiler.plan import Plan
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.capture import CaptureDevice, Replay


def record(
    graph: AnnotatedGraph,
    plan: Plan,
    lowered: Lowered,
    device: CaptureDevice,
    args: Sequence[Any],
    forms: Mapping[int, memory.Form],
    filename: str,
) -> Code:
    """Capture every segment of ``plan`` at the addresses of ``args`` and write the function that replays them.

    Nothing computes: segments are recorded; of breaks only what looks at memory or allocates is done, and their
    stubs. ``forms`` are what the breaks' results looked like when the program was warmed up. Raises ``SegmentError``
    where a segment could not be captured; whatever else is raised is of a stub, a barrier or an allocation.
    """
    # Aliases of parameters and not they themselves: a capture must not keep a deleted model alive.
    values: dict[int, Any] = {
        o: memory.alias(arg) if isinstance(arg, Tensor) else arg for o, arg in zip(plan.inputs, args, strict=True)
    }
    slots = {slot.ordinal: memory.Form.of(values[slot.ordinal]).buffer() for slot in plan.slots}
    values.update(slots)
    callers = {storage_key(v) for o, v in values.items() if isinstance(v, Tensor) and o not in slots}
    bridges = {ordinal: forms[ordinal].buffer() for ordinal in plan.bridges}
    values.update(bridges)
    made: dict[int, Any] = {}
    replays: dict[int, Replay] = {}
    with capturing(device):
        for step in plan.steps:
            if step.kind == "segment":
                taken = tuple(values[o] for o in step.inputs if o in values)
                try:
                    result, replays[step.index] = device.capture(lowered.segments[step.index], taken)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    raise SegmentError(step.index, taken) from error
                results = (result,) if len(step.outputs) == 1 else result or ()
                made.update(zip(step.outputs, results, strict=True))
            elif step.index in lowered.fixed:
                fixed = lowered.fixed[step.index]
                made.update(zip(fixed.outputs, fixed.run(*(values[o] for o in fixed.inputs)), strict=True))
            values.update(made)
            for stub in lowered.stubs.get(step.index, ()):
                _stand_in(stub, values, forms, bridges, callers)
    given = dict(zip(plan.inputs, args, strict=True))
    results, bound = _Results(graph, plan, given, slots, made, bridges).expressions()
    bound |= {"fill_slot": memory.fill_slot, "fill_bridge": memory.fill_bridge}
    fills = {o: _copy(f"v{o}", f"a{o}", slot) for o, slot in slots.items()}
    written = {slot.ordinal for slot in plan.slots if slot.written}
    write_backs = {o: _copy(f"a{o}", f"v{o}", slot) for o, slot in slots.items() if o in written}
    captured = Captured(replays, slots | made, bridges, fills, write_backs, results, bound)
    return write_replay(graph, plan, captured, filename)


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


def _own(ordinal: int, value: Tensor) -> str:
    """The expression that copies a value for the caller."""
    if memory.is_inference(value):
        return f"own_inference(v{ordinal})"
    return f"v{ordinal}.clone()" if memory.clone_keeps_strides(value) else f"own(v{ordinal})"


def _copy(target: str, source: str, form: Tensor) -> str:
    """The statement that copies one tensor of the form of ``form`` into another."""
    plain = form.numel() > 0 and not memory.overlaps_itself(form)
    return f"{target}.copy_({source})" if plain else f"fill_slot({target}, {source})"


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
    ) -> None:
        self._roots = {facts.ordinal: facts.results for facts in graph.facts.values()}
        self._plan = plan
        self._args = args
        self._slots = slots
        self._known = {**made, **bridges}
        self._bound: dict[str, Any] = {
            "own": memory.own,
            "own_inference": memory.own_inference,
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
            if ordinal in unknown:
                copies = "None" if len(unknown) == 1 else "(copies := {})" if ordinal == unknown[0] else "copies"
                arguments = "".join(f", a{o}" for o in self._slots)
                found[ordinal] = f"own_if({copies}, v{ordinal}{arguments})"
            elif not isinstance(value, Tensor):
                continue
            elif (owner := self._owner(value)) is not None:
                found[ordinal] = self._view(ordinal, value, *owner)
            else:
                found[ordinal] = _own(ordinal, value)
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
        found = {}
        for ordinal in ordinals:
            value = self._known[ordinal]
            self._bound[f"form_{ordinal}"] = memory.View.of(value)
            copy = f"(storage_{first} := own_storage(v{first}))" if ordinal == first else f"storage_{first}"
            found[ordinal] = f"in_storage({copy}, form_{ordinal})"
        return found

    def _own_if(self) -> Callable[..., Any]:
        """For what a break made: copied if it lies in memory of the program, a view of the argument if in a slot.

        ``copies`` holds one copy for each storage, where several results may share one.
        """
        fixed = frozenset(_storage(t) for t in self._known.values() if _is_memory(t))
        fixed -= {_storage(t) for t in self._args.values() if _is_memory(t)}  # views of parameters and buffers
        slots = {_storage(slot): (i, slot) for i, slot in enumerate(self._slots.values()) if _is_memory(slot)}

        def own_if(copies: dict[int | None, torch.UntypedStorage] | None, value: Any, *arguments: Tensor) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(own_if(copies, item, *arguments) for item in value)
            if not _is_memory(value):
                return value
            storage = _storage(value)
            if storage in slots:
                position, slot = slots[storage]
                return memory.view_of(arguments[position], memory.View.of(value, slot))
            if storage not in fixed:
                return value
            if copies is None:
                return memory.own(value)
            if storage not in copies:
                copies[storage] = memory.own_storage(value)
            return memory.in_storage(copies[storage], memory.View.of(value))

        return own_if


def _storage(tensor: Tensor) -> int | None:
    return storage_key(tensor)


def _is_memory(value: Any) -> bool:
    return isinstance(value, Tensor)
