"""Equal layers are traced once (run with torch 2.11, 2.13 and 2.14).

Dynamo runs the Python code of each layer of a model, a tenth of a second each, and finds the same operations again.
Here what the call of one module has put into the graph is put there for its equal siblings as well, with their own
tensors, if nothing that code could read tells the calls apart:

* the modules look alike (``likeness``); of numbers and strings that differ, as the layer's index does, none was read
  under a name like theirs, in the whole trace;
* the arguments have the same structure, constants and descriptions of tensors, and are the same objects otherwise;
* nothing that was there before has been changed in Python, by the layer or by the code around it;
* grad mode, autocast and the like are the same, and no stream or mode is entered.

The graph is the one that Dynamo would have made: names, order of inputs, module paths and source lines included. Guards
are not made, so that a trace whose guards are kept must not be made like this.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_compiler.compat.call_record import Call, Record, Recording, Seen, Unlike
from bcg_compiler.compat.dynamo import unwrapped

#: Records kept for each class of modules: different kinds of layers, or kinds of arguments.
_RECORDS = 8


@dataclass
class EqualCalls:
    """Calls of modules that have siblings of their class.

    ``copied`` from the trace of an equal one; ``traced``, by why none of those before was equal; ``not_kept`` of these,
    by why their trace is not copied.
    """

    copied: int = 0
    traced: Counter[str] = field(default_factory=Counter)
    not_kept: Counter[str] = field(default_factory=Counter)


@contextmanager
def equal_calls(model: Any) -> Iterator[EqualCalls]:
    """Let Dynamo, in this thread, trace equal layers of a module once."""
    from torch._dynamo.variables import builder, functions, nn_module

    trace = _Trace(unwrapped(model))
    thread = threading.get_ident()
    modules: Any = nn_module.UnspecializedNNModuleVariable
    values: Any = builder.VariableBuilder
    constants: Any = functions
    call, build, constant = modules.call_function, values.__call__, constants.invoke_and_store_as_constant

    def see_call(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread or not trace.is_wanted(variable, tx):
            return call(variable, tx, args, kwargs)
        return trace.call(lambda: call(variable, tx, args, kwargs), Call(variable, tx, args, kwargs))

    def see_value(self: Any, value: Any) -> Any:
        if threading.get_ident() == thread:
            trace.seen.add(self.source, value)
        return build(self, value)

    def see_constant(tx: Any, fn: Any, *args: Any) -> Any:
        # A method that runs for real while it is traced, and nobody sees what it reads.
        trace.opaque |= threading.get_ident() == thread and getattr(fn, "__self__", None) is not None
        return constant(tx, fn, *args)

    modules.call_function, values.__call__ = see_call, see_value
    constants.invoke_and_store_as_constant = see_constant
    try:
        yield trace.calls
    finally:
        modules.call_function, values.__call__ = call, build
        constants.invoke_and_store_as_constant = constant


class _Trace:
    """One trace of Dynamo's: what has been read in it, and what calls have put into its graph."""

    def __init__(self, model: Any) -> None:
        self.calls = EqualCalls()
        self.opaque = False
        self._siblings, self._parents = _siblings(model)
        self._records: dict[type, list[Record]] = {}
        self.seen = Seen()
        self._recording = False

    def is_wanted(self, variable: Any, tx: Any) -> bool:
        """Whether a call is to be seen as one: none within another one, nor in a graph within the graph."""
        return (
            not self._recording
            and id(variable.value) in self._siblings
            and variable.source is not None
            and len(tx.output.tracers) == 1
        )

    def call(self, trace_it: Callable[[], Any], call: Call) -> Any:
        """The result of a call, which is copied if an equal one was traced before."""
        records = self._records.setdefault(type(call.module), [])
        why = "" if records else "first of its class"
        for record in records:
            try:
                result = record.copy(call, self.seen, self._parents)
            except Unlike as error:
                why = str(error)
            else:
                self.calls.copied += 1
                return result
        self.calls.traced[why] += 1
        recording = self._begin(call) if len(records) < _RECORDS else None
        if recording is None:
            return trace_it()
        self._recording, self.opaque = True, False
        try:
            result = trace_it()
        finally:
            self._recording = False
        try:
            if self.opaque:
                raise Unlike("runs code that is not traced")
            records.append(recording.record(result))
        except Unlike as error:
            self.calls.not_kept[str(error)] += 1
        return result

    def _begin(self, call: Call) -> Recording | None:
        try:
            return Recording(call)
        except Unlike as error:
            self.calls.not_kept[str(error)] += 1
            return None


def _siblings(model: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Modules that have parts and stand beside others of their class, and the modules around these, by ``id()``."""
    siblings: set[int] = set()
    around: set[int] = set()
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    for parent in reversed(modules):  # children first
        children = list(parent.children())
        classes = Counter(map(type, children))
        found = {id(m) for m in children if classes[type(m)] > 1 and next(m.children(), None) is not None}
        siblings |= found
        if found or any(id(child) in around for child in children):
            around.add(id(parent))
    return frozenset(siblings), frozenset(around)
