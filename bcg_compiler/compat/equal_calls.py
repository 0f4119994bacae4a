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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_compiler.compat.call_copy import Copy
from bcg_compiler.compat.call_record import Call, Record, Recording, Seen
from bcg_compiler.compat.dynamo import unwrapped
from bcg_compiler.compat.patches import patched_here
from bcg_compiler.compat.trace_values import Unlike

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
    from torch._dynamo.variables import BuiltinVariable, TensorVariable, builder, functions, nn_module

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

    def seeing_names(give: Any) -> Any:
        def see(variable: Any, name: str) -> Any:
            if trace.recording is not None:
                trace.recording.note_name(variable, name)
            return give(variable, name)

        return see

    def seeing_texts(write: Any) -> Any:
        def see(self: Any, tx: Any, arg: Any) -> Any:
            if hasattr(arg.realize(), "value_type"):
                trace.unsafe = "asks for the text of an object"  # by code of its own, which runs for real
            return write(self, tx, arg)

        return see

    def seeing_constants(run: Any) -> Any:
        def see(tx: Any, fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            result = run(tx, fn, name, args, kwargs)
            trace.ran(fn, args, kwargs, result)
            return result

        return see

    with ExitStack() as stack:
        stack.enter_context(patched_here(nn_module.UnspecializedNNModuleVariable, "call_function", seeing_calls))
        stack.enter_context(patched_here(builder.VariableBuilder, "__call__", seeing_values))
        stack.enter_context(patched_here(TensorVariable, "set_name_hint", seeing_names))
        stack.enter_context(patched_here(functions, "invoke_and_store_as_constant", seeing_constants))
        if "call_str" in vars(BuiltinVariable):  # up to torch 2.13
            stack.enter_context(patched_here(BuiltinVariable, "call_str", seeing_texts))
            handlers: Any = BuiltinVariable.call_function_handler_cache
            for key in [key for key in handlers if key[0] is str]:
                del handlers[key]  # it holds the function from before
        yield trace.calls


def _is_constant(variable: Any) -> bool:
    return not variable.is_tensor() and bool(variable.is_python_constant())


class _Trace:
    """One trace of Dynamo's: what has been read in it, and what calls have put into its graph."""

    def __init__(self, model: Any) -> None:
        self.calls = EqualCalls()
        #: Why what is traced must not be copied.
        self.unsafe = ""
        self._siblings, self._around = _siblings(model)
        self._parts = {id(part) for sibling in self._siblings.values() for part in sibling.modules()}
        self._records: dict[type, list[Record]] = {}
        self._seen = Seen()
        #: Whether a layer was seen to read others. Dynamo keeps what was read once, and is not seen to read it again.
        self._others_read = False
        self.recording: Recording | None = None
        self._output: Any = None

    def is_wanted(self, variable: Any, tx: Any) -> bool:
        """Whether a call is to be seen as one: none within another one, nor in a graph within the graph."""
        return (
            self.recording is None
            and id(variable.value) in self._siblings
            and variable.source is not None
            and len(tx.output.tracers) == 1
        )

    def read(self, source: Any, value: Any) -> None:
        """Dynamo takes a value from where the code that it traces finds it."""
        self._seen.add(source, value)
        is_module = id(value) in self._parts or id(value) in self._around
        if is_module and self.recording is not None and not self.recording.is_own(value):
            self.unsafe, self._others_read = "reads other modules", True

    def ran(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Dynamo has run a function for real. What that reads of objects and tensors is not seen."""
        if self.recording is None:
            return
        if getattr(fn, "__self__", None) is None and all(map(_is_constant, (*args, *kwargs.values(), result))):
            values = [arg.as_python_constant() for arg in args]
            named = {key: arg.as_python_constant() for key, arg in kwargs.items()}
            self.recording.note_constant(lambda: fn(*values, **named), result.as_python_constant())
        else:
            self.unsafe = "runs code that is not traced"

    def call(self, trace_it: Callable[[], Any], call: Call) -> Any:
        """The result of a call, which is copied if an equal one was traced before."""
        if self._output is not call.tx.output:  # Dynamo began anew, with another graph
            self._output = call.tx.output
            self._records.clear()
        records = self._records.setdefault(type(call.module), [])
        why = "" if records else "first of its class"
        for record in records:
            try:
                result = Copy(record, call, *record.match(call, self._seen, self._around)).result()
            except Unlike as error:
                why = str(error)
            else:
                self.calls.copied += 1
                return result
        self.calls.traced[why] += 1
        recording = self._begin(call) if len(records) < _RECORDS and not self._others_read else None
        if recording is None:
            return trace_it()
        self.recording, self.unsafe = recording, ""
        try:
            result = trace_it()
        finally:
            self.recording = None
        try:
            if self._seen.identities:
                raise Unlike("asks which object it is")
            if self.unsafe:
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


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether a module is worth it: torch's own ones without parts are an operation each."""
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")


def _siblings(model: Any) -> tuple[dict[int, torch.nn.Module], frozenset[int]]:
    """Modules that have parts and stand beside others of their class, and those around them, by ``id()``."""
    siblings: dict[int, torch.nn.Module] = {}
    around: set[int] = set()
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    for parent in reversed(modules):  # children first
        children = list(parent.children())
        classes = Counter(map(type, children))
        found = {id(m): m for m in children if classes[type(m)] > 1 and _is_layer(m)}
        siblings |= found
        if found or any(id(child) in around for child in children):
            around.add(id(parent))
    return siblings, frozenset(around)
