"""What code can see of a value of Dynamo's trace (see ``equal_calls``; run with torch 2.11, 2.13 and 2.14)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.compat.fake import FakeTensor, is_plain, size_expression
from bcg_compiler.compat.likeness import MARKS, notes_on


class Unlike(Exception):
    """Why one call is not taken for another one."""


@dataclass(frozen=True)
class Part:
    """An argument of a call, or of its result, or an item of one: what code can see of it, and the node that it is.

    ``waiting``: the value, in a tuple, if Dynamo has not looked at it.
    """

    seen: tuple[Any, ...]
    variable: Any
    node: Node | None = None
    waiting: tuple[Any, ...] = ()


def add_parts(variable: Any, parts: list[Part]) -> None:
    """Add what a variable of a trace is, and its items. Raises ``Unlike`` for what there is no saying of."""
    from torch._dynamo.variables import ConstantVariable, ListVariable, TensorVariable, TupleVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized() and type(variable.peek_value()) in (tuple, list):
            variable.realize()  # whose items are not looked at by that
        if not variable.is_realized():
            parts.append(Part(("waiting",), variable, waiting=(variable.peek_value(),)))
            return
        variable = variable.unwrap()
    kind = type(variable)
    if kind is TensorVariable:
        node = variable.as_proxy().node
        parts.append(Part((*seen_of(node.meta["example_value"]), _notes_key(node)), variable, node))
    elif kind is SymNodeVariable:
        parts.append(Part(("size", size_expression(variable.sym_num)), variable, variable.as_proxy().node))
    elif kind is ConstantVariable:
        parts.append(Part(constant_key(variable.value), variable))
    elif kind is TupleVariable or (kind is ListVariable and variable.source is not None):
        parts.append(Part(("items", kind, len(variable.items)), variable))
        for item in variable.items:
            add_parts(item, parts)
    elif getattr(variable, "source", None) is not None and hasattr(variable, "value"):
        parts.append(Part(("object", id(variable.value)), variable))
    else:
        raise Unlike(f"an argument is a {kind.__name__}")


def object_of(part: Part) -> Any:
    """What an argument is, if that was there before the trace and is more than its value."""
    if part.waiting:
        value = part.waiting[0]
        return value if isinstance(value, torch.Tensor) else None
    if part.node is not None:
        return part.node.meta["grapharg"].example if part.node.meta.get("grapharg") is not None else None
    return part.variable.value if part.seen[0] == "object" else None


def is_list(part: Part) -> bool:
    """Whether a part is a list, which may be changed."""
    from torch._dynamo.variables import ListVariable

    return part.seen[0] == "items" and part.seen[1] is ListVariable


def _notes_key(node: Node) -> Any:
    """A key of what code has noted on a tensor: none, or which tensor it is."""
    example = node.meta["grapharg"].example if "grapharg" in node.meta else None
    notes = notes_on(example) if isinstance(example, torch.Tensor) else ()
    return id(example) if any(not name.startswith(MARKS) for name in notes) else None


def seen_of(value: Any) -> tuple[Any, ...]:
    """All that code can see of a value of a trace, symbolic numbers by their expressions, which adds no guard."""
    if isinstance(value, (tuple, list)):
        return (type(value), *map(seen_of, value))
    if not isinstance(value, torch.Tensor):
        return ("number", size_expression(value))
    if type(value) is not FakeTensor or not is_plain(value) or value.constant is not None:
        raise Unlike("a tensor is not a plain one")
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return (
        "tensor",
        tuple([n if type(n) is int else str(size_expression(n)) for n in numbers]),
        value.dim(),
        value.dtype,
        value.device,
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
        value.requires_grad,
    )


def constant_key(value: Any) -> tuple[Any, ...]:
    """What is equal for constants that code cannot tell apart: 0.0 and -0.0 are two."""
    return ("constant", type(value), repr(value))
