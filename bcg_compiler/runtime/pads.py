"""The statements of a replay that have to do with padded rows: fills, cleared tails, results that are cut."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bcg_compiler.lower.replay import Fill
from bcg_compiler.plan import Plan, Slot
from bcg_compiler.plan.sizes import FUNCTIONS, evaluate, symbols_in
from bcg_compiler.runtime import memory
from bcg_compiler.runtime.buckets import Bucket
from bcg_compiler.runtime.fused_fill import FusedFill, can_fuse

#: (dimension, live part as an expression over ``rows``, size in the bucket)
Cut = tuple[int, str, int]


class Pads:
    """What one capture does about padding. Without a bucket nothing is padded: inputs are copied as they are."""

    def __init__(self, plan: Plan, bucket: Bucket | None) -> None:
        self._plan = plan
        self._bucket = bucket
        self._known: dict[int, list[Cut]] = {}
        self._values = plan.by_ordinal

    def sizes(self) -> dict[int, int]:
        """The numbers among the inputs that depend on the number of rows, in the bucket: by ordinal."""
        if self._bucket is None:
            return {}
        symbols = self._bucket.symbols
        given = [self._values[ordinal] for ordinal in self._plan.inputs if self._values[ordinal].size]
        return {v.ordinal: evaluate(v.size, symbols) for v in given if symbols_in(v.size) <= symbols.keys()}

    def rows(self) -> str:
        """The expression for the live rows of a call; "" without a bucket."""
        if self._bucket is None or self._plan.padding is None:
            return ""
        ordinal, dim = self._plan.padding.place
        return f"a{ordinal}.shape[{dim}]"

    def slot(self, ordinal: int, argument: Tensor) -> memory.Form:
        """What the slot of an argument looks like."""
        if self._cuts(ordinal) and self._bucket is not None:
            return self._bucket.form(self._values[ordinal].specs[0], argument.requires_grad)
        return memory.Form.of(argument)

    def fills(self, slots: Mapping[int, Tensor]) -> tuple[dict[int, Fill], dict[str, FusedFill]]:
        """What fills the slots, by the step that reads them first; the kernels that it calls, by name."""
        due = {slot.ordinal: slot for slot in self._plan.slots if slot.policy.kind != "once"}
        found: dict[int, Fill] = {}
        kernels: dict[str, FusedFill] = {}
        for step in self._plan.steps:
            here = [due.pop(ordinal) for ordinal in step.inputs if ordinal in due]
            fused = [slot for slot in here if self._is_of_rows(slot, slots[slot.ordinal])]
            statements = []
            if can_fuse([slots[slot.ordinal] for slot in fused]):
                kernels[f"fill_{step.index}"] = FusedFill([slots[slot.ordinal] for slot in fused])
                statements = [f"fill_{step.index}(rows, {', '.join(f'a{slot.ordinal}' for slot in fused)})"]
            else:
                fused = []
            statements += [self._fill(slot, slots[slot.ordinal]) for slot in here if slot not in fused]
            if here:
                found[step.index] = Fill(tuple(slot.ordinal for slot in here), tuple(statements))
        return found, kernels

    def _is_of_rows(self, slot: Slot, buffer: Tensor) -> bool:
        """Whether the slot is row behind row, and padded by zeros."""
        cuts = self._cuts(slot.ordinal)
        return [(dim, live) for dim, live, _ in cuts] == [(0, "rows")] and slot.policy.kind == "zero"

    def _fill(self, slot: Slot, buffer: Tensor) -> str:
        """The statement that fills a slot from the argument of a call."""
        name, given = f"v{slot.ordinal}", f"a{slot.ordinal}"
        cuts = self._cuts(slot.ordinal)
        if not cuts:
            return _copy(name, given, buffer)
        clear = f"fill_({_literal(slot.policy.value)})" if slot.policy.kind == "sentinel" else "zero_()"
        live = f"{name}{_narrowed(cuts)}.copy_({given})"
        if slot.policy.kind == "keep":
            return live
        if len(cuts) > 1:
            return f"{name}.{clear}; {live}"
        return f"{live}; {name}{_behind(cuts[0])}.{clear}"

    def write_back(self, slot: Slot, buffer: Tensor) -> str:
        """The statement that copies a slot to the caller's tensor."""
        cuts = self._cuts(slot.ordinal)
        if not cuts:
            return _copy(f"a{slot.ordinal}", f"v{slot.ordinal}", buffer)
        return f"a{slot.ordinal}.copy_(v{slot.ordinal}{_narrowed(cuts)})"

    def tails(self) -> dict[int, list[str]]:
        """Statements that clear padded rows, by the ordinal of the node of a break that they come behind."""
        found: dict[int, list[str]] = {}
        for step in self._plan.steps if self._bucket is not None else ():
            for node, value in step.tails:
                lines = found.setdefault(node, [])
                if node == value:  # a result: its memory may be the body's own, which keeps what is in it
                    bridge = f"fill_bridge(bridge_{value}, v{value}); v{value} = bridge_{value}"
                    lines.append(bridge if value in self._plan.bridges else f"v{value} = v{value}.clone()")
                lines += [f"v{value}{_behind(cut)}.zero_()" for cut in self._cuts(value)]
        return found

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the expressions call."""
        cleared = [value for step in self._plan.steps for _, value in step.tails]
        cut = (*(slot.ordinal for slot in self._plan.slots), *self._plan.outputs, *cleared)
        lives = [live for ordinal in cut for _, live, _ in self._cuts(ordinal)]
        lives += [self.strides(ordinal) for ordinal in self._plan.outputs if self._cuts(ordinal)]
        return {name: function for name, function in FUNCTIONS.items() if f"{name}(" in " ".join(lives)}

    def live(self, ordinal: int) -> str:
        """What to put behind the expression of a result to get its live rows; "" if it has no others."""
        return _narrowed(self._cuts(ordinal))

    def cut(self, ordinal: int) -> str:
        """The keyword that says how a cut result looks: ``dense`` where strides are others for other rows."""
        if not self._cuts(ordinal):
            return ""
        symbol = self._bucket.symbol if self._bucket is not None else ""
        dense = any(symbol in symbols_in(stride) for stride in self._values[ordinal].specs[0].strides)
        return ', cut="dense"' if dense else ', cut="strided"'

    def base_stride(self, ordinals: Sequence[int]) -> tuple[int, str] | None:
        """The smallest stride of some values that depends on the number of rows: in the bucket, and as an expression
        over ``rows``. ``None`` if there is none, or it does not divide the others.
        """
        bucket = self._bucket
        if bucket is None:
            return None
        strides = {s for ordinal in ordinals for s in self._values[ordinal].specs[0].strides}
        sizes = {evaluate(s, bucket.symbols): s for s in strides if bucket.symbol in symbols_in(s)}
        least = min(sizes, default=0)
        return (least, bucket.live(sizes[least])) if least and not any(size % least for size in sizes) else None

    def strides(self, ordinal: int) -> str:
        """The expression for the strides of a result's live rows, as eager code makes them."""
        assert self._bucket is not None
        return "(" + "".join(f"{self._bucket.live(s)}, " for s in self._values[ordinal].specs[0].strides) + ")"

    def _cuts(self, ordinal: int) -> list[Cut]:
        specs = self._values[ordinal].specs
        if self._bucket is None or not specs:
            return []
        if ordinal not in self._known:
            self._known[ordinal] = self._bucket.cuts(specs[0])
        return self._known[ordinal]


def _literal(number: float) -> str:
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def _narrowed(cuts: list[Cut]) -> str:
    return "".join(f".narrow({dim}, 0, {live})" for dim, live, _ in cuts)


def _behind(cut: Cut) -> str:
    dim, live, size = cut
    return f".narrow({dim}, {live}, {size} - ({live}))"


def _copy(target: str, source: str, form: Tensor) -> str:
    """The statement that copies one tensor of the form of ``form`` into another."""
    plain = form.numel() > 0 and not memory.overlaps_itself(form)
    return f"{target}.copy_({source})" if plain else f"fill_slot({target}, {source})"
