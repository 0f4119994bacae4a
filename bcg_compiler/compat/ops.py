"""The registry of operators: which exist, for rules that name one; and what a custom one runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS


def op_exists(name: str) -> bool:
    """Whether ``ns::name`` or ``ns::name.overload`` is registered."""
    qualified, _, overload = name.partition(".")
    namespace, _, op = qualified.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), op)
    except AttributeError:
        return False
    return not overload or overload in packet.overloads()


def registered_ops() -> list[str]:
    """``ns::name`` of every registered operator."""
    return sorted({name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()})


def defined_in(name: str) -> str | None:
    """The module whose function became the operator ``ns::name`` by ``torch.library.custom_op``; ``None`` of others."""
    definition = OPDEFS.get(name)
    return None if definition is None else definition._init_fn.__module__


def python_body(op: Any, device: str) -> Callable[..., Any] | None:
    """The Python function that an operator of ``torch.library.custom_op`` runs on a device; ``None`` for all others.

    Written in C++, or registered by a ``torch.library.Library``, an operator cannot be looked into.
    """
    definition = OPDEFS.get(op._schema.name)
    if definition is None:
        return None
    bodies = definition._backend_fns
    return bodies.get(device, bodies.get(None))
