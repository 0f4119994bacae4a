"""What a plan says of the arguments of a call, and what is remembered of them for captures to come."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from bcg_compiler.compat.backends import attention_kernels
from bcg_compiler.errors import ReleasedError
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.compiled import Compiled


class Inputs:
    """The arguments of one program.

    ``statics`` are read where they lie, ``written`` are written to; ``positions`` are all of them, by ordinal.
    """

    def __init__(self, compiled: Compiled) -> None:
        plan = compiled.plan
        values = plan.by_ordinal
        self.positions = {ordinal: i for i, ordinal in enumerate(plan.inputs)}
        # What a capture reads where it lies: in segments, and in the views that it takes once.
        recorded = {o for step in plan.segments for o in step.inputs}
        recorded |= {o for fixed in compiled.lowered.fixed.values() for o in fixed.inputs}
        self.statics = self._of(o for o in plan.inputs if values[o].kind == "static" and o in recorded)
        self.written = self._of(plan.written_inputs)
        self._sizes = self._of(o for o in plan.inputs if values[o].kind == "size")
        self._symbolic = self._of(
            o
            for o in plan.inputs
            if any(not part.lstrip("-").isdigit() for s in values[o].specs for part in (*s.shape, *s.strides))
        )
        self._tensors = self._of(o for o in plan.inputs if values[o].specs)
        self._slotted = self._of(slot.ordinal for slot in plan.slots)
        self._copied_once = self._of(slot.ordinal for slot in plan.slots if slot.policy.kind == "once")
        self._attends = any("attention" in n.op for step in plan.segments for n in step.nodes)
        self._open = bool(self._sizes or self._symbolic or self._attends)

    def _of(self, ordinals: Iterable[int]) -> list[int]:
        return [self.positions[ordinal] for ordinal in ordinals]

    def shape(self, args: Sequence[Any]) -> Any:
        """What a capture is made for: the sizes that the graph leaves open, and which attention kernels are allowed.

        Dynamo guards everything else.
        """
        if not self._open:
            return None
        return (
            self.kernels(),
            tuple([args[i] for i in self._sizes]),
            tuple([(args[i].shape, args[i].stride()) for i in self._symbolic]),
        )

    def kernels(self) -> Any:
        """The kernels of attention that are allowed, where it matters."""
        return attention_kernels() if self._attends else None

    def overlap(self, args: Sequence[Any]) -> bool:
        """Whether a written input shares memory with another input: with slots a write would not be seen there."""
        slots = {i: memory.byte_range(args[i]) for i in self._slotted}
        written = {i: slots.get(i) or memory.byte_range(args[i]) for i in self.written}
        if any(i in slots for i in written):
            others = {i: slots.get(i) or memory.byte_range(args[i]) for i in self._tensors}
        else:
            others = slots  # what is written has no slot: only a slot's copy would miss it
        for i, (start, end) in written.items():
            for j, (other_start, other_end) in others.items():
                if j != i and start < other_end and other_start < end:
                    return True
        return False

    def example(self, args: Sequence[Any]) -> list[Any]:
        """What a call is made of, without what it holds: parameters weakly, other tensors by their form.

        But for what is copied once: later captures need it, too.
        """
        found = [memory.Form.of(arg) if isinstance(arg, Tensor) else arg for arg in args]
        for position in self._copied_once:
            found[position] = memory.own(args[position])
        self.bind(found, [args[position] for position in self.statics])
        return found

    def bind(self, example: list[Any], statics: Sequence[Tensor]) -> None:
        """Let an example be one of a call with these parameters, in the order of ``statics``."""
        for position, static in zip(self.statics, statics, strict=True):
            example[position] = weakref.ref(static)

    def is_bound(self, example: Sequence[Any]) -> bool:
        """Whether the parameters of an example live."""
        return all(example[position]() is not None for position in self.statics)

    def check_bound(self, example: Sequence[Any]) -> None:
        """Raise ``ReleasedError`` where a parameter of an example is gone."""
        if not self.is_bound(example):
            raise ReleasedError(
                "A parameter of the model is no longer there. Call the compiled model, then capture again."
            )

    def recall(self, example: Sequence[Any]) -> tuple[Any, ...]:
        """Arguments that look like those of the call that ``example`` was made of; parameters are the model's own.

        Raises ``ReleasedError`` where one of them is gone.
        """
        self.check_bound(example)
        found = [value.buffer() if isinstance(value, memory.Form) else value for value in example]
        for position in self.statics:
            found[position] = example[position]()
        return tuple(found)
