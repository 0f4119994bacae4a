"""Nodes that set a mode instead of computing: grad, autocast, inference; and functorch regions.

Note [Modes are facts, not nodes]
    ``_enter_autocast`` and its like act on the thread. Left in a segment they would act at capture only, and a step
    between them would have to trust whatever ran before. So they are taken out of the graph: each node knows the
    mode that it runs in, and every step sets its own, with ``with`` blocks that an exception cannot leave open.
"""

from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.facts.node import ModeState

_ENTER = frozenset({"_enter_autocast", "_enter_inference_mode"})
_EXIT = frozenset({"_exit_autocast", "_exit_inference_mode"})


def is_mode_node(node: Node) -> bool:
    """Whether the node only sets grad, autocast or inference mode."""
    return node.op == "call_function" and (
        node.target is torch._C._set_grad_enabled or _name(node.target) in _ENTER | _EXIT
    )


def is_functorch_node(node: Node) -> bool:
    """Whether the node drives a functorch transform (vmap, grad, jvp)."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and module.startswith(("torch._functorch", "torch._C._functorch"))


def nesting_change(node: Node) -> int:
    """+1 where a functorch transform begins, -1 where it ends, else 0."""
    name = _name(node.target) if is_functorch_node(node) else ""
    return 1 if name.endswith("_increment_nesting") else -1 if name.endswith("_decrement_nesting") else 0


class ModeTracker:
    """Follows the mode nodes of a graph in order; ``state`` is the mode of the next node."""

    def __init__(self) -> None:
        self.state = ModeState()
        self._outer: list[ModeState] = []

    def see(self, node: Node, ordinal: int) -> None:
        """Take one mode node into account."""
        name = _name(node.target)
        if name in _ENTER:
            self._outer.append(self.state)
            # Inference mode switches grad mode itself; autocast leaves it as it is.
            grad = None if name == "_enter_inference_mode" else self.state.grad
            self.state = ModeState((*self.state.stack, ordinal), grad)
        elif name in _EXIT:
            outer = self._outer.pop() if self._outer else ModeState()
            grad = outer.grad if name == "_exit_inference_mode" else self.state.grad
            self.state = ModeState(outer.stack, grad)
        else:
            self.state = ModeState(self.state.stack, bool(node.args[0]))


def _name(target: Any) -> str:
    return getattr(target, "__name__", "")
