"""What a trace of Dynamo's has changed of Python objects that were there before it (see ``equal_calls``; run with torch
2.11, 2.13 and 2.14).
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from bcg_compiler.compat.dynamo import changed_objects
from bcg_compiler.compat.trace_values import Unlike, constant_key

#: Variables of objects whose attributes are all that a trace can change of them.
_OBJECTS = ("UserDefinedObjectVariable", "UnspecializedNNModuleVariable")


def changes_of(effects: Any) -> list[Any]:
    """What a trace has changed of objects that were there before it, and what it has put there, in one order."""
    found: list[Any] = [len(effects.tensor_hooks), len(effects.save_for_backward)]
    seen: set[int] = set()
    for _, variable in changed_objects(effects):
        _add_change(effects, variable, found, seen)
    return found


def _add_change(effects: Any, variable: Any, found: list[Any], seen: set[int]) -> None:
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.lists import BaseListVariable

    if isinstance(variable, LazyVariableTracker):
        variable = variable.unwrap()
    if type(variable) is ConstantVariable:
        found.append(constant_key(variable.value))
        return
    found.append(variable)
    if id(variable) in seen or type(variable) is LazyVariableTracker:
        return
    seen.add(id(variable))
    for name, value in effects.store_attr_mutations.get(variable, {}).items():
        found.append(name)
        _add_change(effects, value, found, seen)
    if isinstance(variable, ConstDictVariable):
        for key, value in variable.items.items():
            _add_change(effects, key.vt, found, seen)
            _add_change(effects, value, found, seen)
    elif isinstance(variable, BaseListVariable):
        for value in variable.items:
            _add_change(effects, value, found, seen)
    elif _is_hidden(effects, variable):
        raise Unlike("a Python object was changed in a way that is not seen")


def _is_hidden(effects: Any, variable: Any) -> bool:
    """Whether a variable that is not a container may have changed in another way than by its attributes."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if isinstance(variable, (TensorVariable, SymNodeVariable)):
        return False
    if variable in effects.store_attr_mutations:
        return isinstance(variable, UserDefinedObjectVariable) and type(variable).__name__ not in _OBJECTS
    if variable.mutation_type is None:
        return variable.source is None
    return bool(effects.is_modified(variable))


def same_changes(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether what was changed is the same: code that reads it gets the same variables of the trace."""
    return len(mine) == len(theirs) and all(
        a is b or (isinstance(a, (int, str, tuple)) and a == b) for a, b in zip(mine, theirs, strict=True)
    )


def nodes_in(changes: Sequence[Any]) -> set[Node]:
    """The nodes of tensors that were put into objects."""
    from torch._dynamo.variables import TensorVariable

    # By type(): to ask a lazy variable with isinstance() makes an input of it.
    return {change.as_proxy().node for change in changes if type(change) is TensorVariable}
