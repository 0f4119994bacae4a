"""The registry of operators: which exist, for rules that name one."""

import torch


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
