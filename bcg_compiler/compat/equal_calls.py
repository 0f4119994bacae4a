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

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_compiler.compat.call_record import Call, Record, Recording, Seen, Unlike
from bcg_compiler.compat.dynamo import name_of, unwrapped
from bcg_compiler.compat.patches import patched_here

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

    def seeing_calls(call: Any) -> Any:
        def see(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if not trace.is_wanted(variable, tx):
                return call(variable, tx, args, kwargs)
            return trace.call(lambda: call(variable, tx, args, kwargs), Call(variable, tx, args, kwargs))

        return see

    def seeing_values(build: Any) -> Any:
        def see(self: Any, value: Any) -> Any:
            trace.read(self.source, value)
            return build(self, value)

        return see

    def seeing_constants(run: Any) -> Any:
        def see(tx: Any, fn: Any, *args: Any) -> Any:
            if getattr(fn, "__self__", None) is not None:
                trace.unsafe = "runs a method that is not traced"
            return run(tx, fn, *args)

        return see

    with (
        patched_here(nn_module.UnspecializedNNModuleVariable, "call_function", seeing_calls),
        patched_here(builder.VariableBuilder, "__call__", seeing_values),
        patched_here(functions, "invoke_and_store_as_constant", seeing_constants),
    ):
        yield trace.calls


class _Trace:
    """One trace of Dynamo's: what has been read in it, and what calls have put into its graph."""

    def __init__(self, model: Any) -> None:
        self.calls = EqualCalls()
        #: Why what is traced must not be copied.
        self.unsafe = ""
        self._siblings, self._around = _siblings(model)
        self._parts = {id(part) for sibling in self._siblings.values() for part in sibling.modules()}
        self._records: dict[type, list[Record]] = {}
        self._output: Any = None
        self._seen = Seen()
        #: Where modules were found first, and whether one was found elsewhere as well: code may ask which one it is.
        self._paths: dict[int, str] = {}
        self._aliased = False
        #: Classes whose code does what must not be copied. Dynamo keeps what was read once, and is not seen to read it.
        self._unsafe_classes: set[type] = set()
        #: The parts of the module whose call is recorded.
        self._own: set[int] | None = None

    def is_wanted(self, variable: Any, tx: Any) -> bool:
        """Whether a call is to be seen as one: none within another one, nor in a graph within the graph."""
        return (
            self._own is None
            and id(variable.value) in self._siblings
            and variable.source is not None
            and len(tx.output.tracers) == 1
        )

    def read(self, source: Any, value: Any) -> None:
        """Dynamo takes a value from where the code that it traces finds it."""
        self._seen.add(source, value)
        if id(value) not in self._parts and id(value) not in self._around:
            return
        name = name_of(source)
        if self._own is not None and id(value) not in self._own:
            self.unsafe = "reads other modules"
        elif self._paths.setdefault(id(value), name) != name:
            self._aliased = True

    def call(self, trace_it: Callable[[], Any], call: Call) -> Any:
        """The result of a call, which is copied if an equal one was traced before."""
        if call.tx.output is not self._output:  # Dynamo has begun anew, with another graph
            self._output, self._records = call.tx.output, {}
        cls = type(call.module)
        records = self._records.setdefault(cls, [])
        why = "" if records else "first of its class"
        for record in records:
            if self._aliased:
                why = "a module has two names"
                break
            try:
                result = record.copy(call, self._seen, self._around)
            except Unlike as error:
                why = str(error)
            else:
                self.calls.copied += 1
                return result
        self.calls.traced[why] += 1
        recording = self._begin(call) if len(records) < _RECORDS and cls not in self._unsafe_classes else None
        if recording is None:
            return trace_it()
        self._own, self.unsafe = {id(part) for part in call.module.modules()}, ""
        try:
            result = trace_it()
        finally:
            self._own = None
        try:
            if self.unsafe:
                self._unsafe_classes.add(cls)
                raise Unlike(self.unsafe)
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


def _siblings(model: Any) -> tuple[dict[int, torch.nn.Module], frozenset[int]]:
    """Modules that have parts and stand beside others of their class, and those around them, by ``id()``."""
    siblings: dict[int, torch.nn.Module] = {}
    around: set[int] = set()
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    for parent in reversed(modules):  # children first
        children = list(parent.children())
        classes = Counter(map(type, children))
        found = {id(m): m for m in children if classes[type(m)] > 1 and next(m.children(), None) is not None}
        siblings |= found
        if found or any(id(child) in around for child in children):
            around.add(id(parent))
    return siblings, frozenset(around)
