"""Python statements for graph nodes: what a program runs is source text that anyone can read and stop in."""

import builtins
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat.side_streams import on_stream
from bcg_compiler.facts import ModeState

#: The text's own names; those of builtins it uses, too (torch.ops.aten.slice must not hide slice).
_OWN_NAME = re.compile(
    r"[va]\d+|(segment|bridge|replay|fixed|filled|fill|stub)_\d+|program|make|warm_up|note|mark|replay|rows"
)
_PLAIN = (int, bool, str, type(None), type(Ellipsis))


class Namespace:
    """The objects that a source text refers to, each under a readable name of its own."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def bind(self, value: Any, hint: str) -> str:
        """The name of ``value`` in the text; the same object has one name."""
        if id(value) in self._names:
            return self._names[id(value)]
        base = re.sub(r"\W", "_", hint) or "value"
        if keyword.iskeyword(base) or base[0].isdigit() or _OWN_NAME.fullmatch(base) or hasattr(builtins, base):
            base = f"_{base}"
        name, count = base, 1
        while name in self.objects:
            count += 1
            name = f"{base}_{count}"
        self.objects[name] = value
        self._names[id(value)] = name
        return name

    def expression(self, value: Any, name_of: Callable[[Node], str]) -> str:
        """``value``, an argument of a node, as an expression."""
        if isinstance(value, Node):
            return name_of(value)
        if isinstance(value, list):  # FX's own list type, too
            return f"[{', '.join(self.expression(item, name_of) for item in value)}]"
        if type(value) in (tuple, torch.Size):
            items = [self.expression(item, name_of) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        if isinstance(value, tuple):  # a named tuple
            fields = ", ".join(self.expression(item, name_of) for item in value)
            return f"{self.bind(type(value), type(value).__name__)}({fields})"
        if isinstance(value, dict):
            pairs = (f"{self.expression(k, name_of)}: {self.expression(v, name_of)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            parts = (self.expression(part, name_of) for part in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        if type(value) in _PLAIN:
            return repr(value)
        if type(value) is float and value == value and abs(value) != float("inf"):
            return repr(value)
        return self.bind(value, _hint(value))


class Emitter:
    """Writes statements for nodes; values are named ``v<ordinal>``. ``of_break`` gives what is called for a break."""

    def __init__(
        self,
        namespace: Namespace,
        ordinals: Mapping[Node, int],
        constants: Mapping[Node, Any],
        modes: Mapping[Node, ModeState],
        mode_nodes: Mapping[int, Node],
        of_break: Callable[[BoundBreak], Callable[..., Any]],
        device: str,
        around: Callable[[Node, Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.namespace = namespace
        self._of_break = of_break
        self._around = around
        self._device = device
        self._ordinals = ordinals
        self._constants = constants
        self._modes = modes
        self._contexts = {ordinal: _context(node) for ordinal, node in mode_nodes.items()}

    def name(self, node: Node) -> str:
        """The variable that holds a node's value, or the name of a constant of the graph."""
        if node in self._constants:
            return self.namespace.bind(self._constants[node], f"c_{node.target}")
        return f"v{self._ordinals[node]}"

    def expression(self, value: Any) -> str:
        """An argument or a returned structure as an expression."""
        return self.namespace.expression(value, self.name)

    def statements(
        self,
        nodes: list[Node],
        kept: Iterable[Node],
        indent: str,
        behind: Callable[[Node, Node], Node] = lambda value, user: user,
    ) -> list[tuple[str, Node | None]]:
        """The lines that run ``nodes`` in order, each with the node it is for.

        Values are deleted after their last use, or what ``behind`` says of it, but for ``kept``: memory is then as low
        as in eager code.
        """
        last_use: dict[Node, Node] = {}
        for node in nodes:
            last_use[node] = node
            last_use.update(dict.fromkeys(node.all_input_nodes, node))
        dying: dict[Node, list[str]] = {}
        own, kept = set(nodes), set(kept)
        for node, user in last_use.items():
            if node in own and node not in kept and node.users:
                dying.setdefault(behind(node, user), []).append(self.name(node))
        lines: list[tuple[str, Node | None]] = []
        for mode, run in groupby(nodes, key=self._modes.__getitem__):
            depth = indent
            if mode != ModeState():
                lines.append((f"{indent}with {self._with_items(mode)}:", None))
                depth = indent + "    "
            for node in run:
                assigned = f"{self.name(node)} = " if node.users else ""
                lines.append((f"{depth}{assigned}{self._call(node)}", node))
                if node in dying:
                    lines.append((f"{depth}del {', '.join(dying[node])}", node))
        return lines

    def _call(self, node: Node) -> str:
        if node.op == "call_function" and node.target is operator.getitem:
            return f"{self.expression(node.args[0])}[{self.expression(node.args[1])}]"
        args = [self.expression(arg) for arg in node.args]
        kwargs = [f"{key}={self.expression(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:] + kwargs)})"
        target: Any = node.target
        if node.op == "call_module":
            module = node.graph.owning_module
            assert module is not None
            target = module.get_submodule(str(target))
        hint = _hint(target)
        if isinstance(target, BoundBreak):
            target = self._of_break(target)
        if self._around is not None:
            target = self._around(node, target)
        return f"{self.namespace.bind(target, hint)}({', '.join(args + kwargs)})"

    def _with_items(self, mode: ModeState) -> str:
        items = [f"{self.namespace.bind(self._contexts[o], f'mode_{o}')}()" for o in mode.stack]
        if mode.stream:
            items.append(f"{self.namespace.bind(on_stream, 'on_stream')}({mode.stream}, {self._device!r})")
        if mode.grad is not None:
            items.append(f"{self.namespace.bind(torch.set_grad_enabled, 'set_grad_enabled')}({mode.grad})")
        return ", ".join(items)


def _context(node: Node) -> Callable[[], Any]:
    """The context manager that a mode-entering node of Dynamo's stands for."""
    args: tuple[Any, ...] = node.args
    entered = getattr(node.target, "__name__", "")
    return partial(torch.autocast if entered == "_enter_autocast" else torch.inference_mode, *args)


def _hint(value: Any) -> str:
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    return str(getattr(value, "__name__", None) or type(value).__name__)
