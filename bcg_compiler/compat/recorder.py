"""A dispatch mode that records which ATen operations a call makes, and what each reads and writes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Recorded:
    """One operation as it was dispatched: the op, its tensor arguments, those it writes, its results."""

    op: Any
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    results: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OpRecorder(TorchDispatchMode):
    """Records the operations below it; higher-order ones show as themselves.

    Under inference mode composite operations arrive whole; they are taken apart here, so that the record of a call
    does not depend on the mode it was made in. ``names`` has them all, a composite before its parts.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "prim":
            return func(*args, **kwargs)  # questions that fakes answer about themselves, such as their device
        self.names.append(func.name() if not isinstance(func, torch._ops.OpOverload) else _full_name(func))
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        reads = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.calls.append(Recorded(func, reads, _written(func, args, kwargs), tuple(tree_leaves(result)), args, kwargs))
        return result


def _full_name(op: Any) -> str:
    return f"{op._schema.name}.{op._overloadname}"


def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order op says nothing: take it to write whatever it is given
        return tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    written: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return tuple(written)
