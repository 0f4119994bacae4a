"""The structural key of a segment: equal keys, equal computation."""

import enum
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts.node import ModeState, NodeFacts, TensorSpec

_SYMBOL = re.compile(r"\b(?:zuf|zf|s|u)\d+\b")


class SymbolNames:
    """Renames symbols in the order they are met: torch numbers them by the names of the user's variables."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def text(self, text: str) -> str:
        """``text`` with its symbols renamed."""
        return _SYMBOL.sub(self._rename, text)

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """``spec`` with its symbols renamed, and the terms of each size in the order of the new names."""
        shape, strides = (tuple(_ordered(self.text(part)) for part in parts) for parts in (spec.shape, spec.strides))
        return TensorSpec(spec.dtype, shape, strides, spec.device)

    def _rename(self, match: re.Match[str]) -> str:
        prefix = match[0].rstrip("0123456789")
        return self._names.setdefault(match[0], f"{prefix}{len(self._names)}")


def _ordered(size: str) -> str:
    # sympy writes (a + b)//2 as floor(a/2 + b/2), which nobody evaluates, and which floats may round down too far.
    if len(set(_SYMBOL.findall(size))) < 2 or "//" in size:
        return size
    try:
        return str(sympy.sympify(size))
    except (sympy.SympifyError, TypeError, AttributeError):
        return size  # a function that only torch's own printer knows


def structural_key(
    nodes: Iterable[Node],
    facts: Mapping[Node, NodeFacts],
    specs: Mapping[Node, tuple[TensorSpec, ...]],
    sizes: Mapping[Node, str],
    modes: Mapping[ModeState, str],
    held: Mapping[Node, GraphModule],
    outputs: Iterable[Node],
    device: str,
    objects: dict[Any, int],
    symbols: SymbolNames | None = None,
) -> str:
    """A key over ops, constants, shapes, strides, dtypes, devices, argument order, modes and symbolic sizes.

    Names of nodes and parameters do not count: values are numbered in the order they are met. ``specs`` are those of
    values from outside, ``sizes`` the expressions of those that are numbers, ``modes`` the mode of each state as text,
    ``held`` the graphs that higher-order operations run. ``device``, the one that the graph computes on, is named by
    its role, so that a plan made on one machine is that of another: the key holds within one device. ``objects``
    numbers those of which nothing is known but their identity, in the order they are met. ``symbols`` are the names of
    sizes, where not any other ones would do as well: code that is compiled for one size may hold what is known of that
    one only.
    """
    numbers: dict[Node, int] = {}
    symbols = symbols or SymbolNames()
    lines: list[str] = []

    def reference(node: Node) -> str:
        if node not in numbers:  # from outside: described where it is first used
            numbers[node] = len(numbers)
            described = ";".join(f"{symbols.spec(s)}/{symbols.spec(s).strides}/{s.device}" for s in specs.get(node, ()))
            inner = held[node].code if node in held else ""
            inner += symbols.text(sizes.get(node, ""))
            lines.append(f"%{numbers[node]} = given {described}{inner}".replace(f"/{device}", "/main"))
        return f"%{numbers[node]}"

    def text(value: Any) -> str:
        return constant_text(value, reference, torch.device(device), objects)

    for node in nodes:
        given = text((node.args, node.kwargs))
        numbers[node] = len(numbers)
        called = text(node.target)  # in full: torch.max and max are not the same
        lines.append(f"%{numbers[node]} = {node.op} {called} {given} {modes[facts[node].mode]}")
    lines.append("return " + ", ".join(map(reference, outputs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def unit_key(key: str, outputs: Iterable[int]) -> str:
    """The key of a unit from that of its operations and the positions, among them, of the values that it gives."""
    return hashlib.sha256(f"{key} {sorted(outputs)}".encode()).hexdigest()[:12]


def constant_text(value: Any, reference: Callable[[Node], str], main: torch.device, objects: dict[Any, int]) -> str:
    """``value`` as text that is the same in every process; ``reference`` gives the text of a node."""

    def inner(item: Any) -> str:
        return constant_text(item, reference, main, objects)

    if isinstance(value, Node):
        return reference(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(inner, value)) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return "slice" + inner((value.start, value.stop, value.step))
    if isinstance(value, torch.device) and value.type == main.type and value.index in (None, main.index):
        return "main"
    if isinstance(value, GraphModule):
        return value.code
    if isinstance(value, (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout)):
        return repr(value)
    if isinstance(value, torch.memory_format):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return str(value)
    # Functions and other objects: what they are, never where they are.
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", None)
    if name and _found(module, name) is value:
        return f"{module}.{name}"
    name = name or getattr(value, "__name__", None) or type(value).__qualname__
    identity = value.identity if isinstance(value, BoundBreak) else id(value)
    return f"{module}.{name}#{objects.setdefault(identity, len(objects))}"


def _found(module: str, name: str) -> Any:
    """What a name stands for in a module that is loaded."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
