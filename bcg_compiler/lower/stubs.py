"""Writes what a capture does in place of break functions: their barriers and stubs."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.texts import Texts
from bcg_compiler.lower.writer import Code, Writer
from bcg_compiler.plan import Plan, Step


@dataclass(frozen=True)
class Stub:
    """One break function at capture.

    ``run``     takes the values ``inputs`` and returns the stub's results as a flat list, or ``None``
    ``items``   positions in that list and ordinals of the values that they stand for
    """

    name: str
    run: Callable[..., list[Any] | None]
    inputs: tuple[int, ...]
    items: tuple[tuple[int, int], ...]


def write_stubs(
    graph: AnnotatedGraph, plan: Plan, name: str, texts: Texts | None = None
) -> tuple[dict[int, list[Stub]], Code | None]:
    """The stubs of each break by the index of its step, and the text they are in; no text where there is none."""
    if not any(map(_brings_stub, graph.facts)):
        return {}, None
    writer = Writer(graph, plan, of_break=BoundBreak.at_capture)
    found = [(step, node) for step in plan.breaks for n in step.nodes if _brings_stub(node := writer.nodes[n.ordinal])]
    ordinals = {node: ordinal for ordinal, node in writer.nodes.items()}
    for step, node in found:
        _write(writer, step, node, ordinals)
    code = writer.compile(name, "[" + ", ".join(f"stub_{ordinals[node]}" for _, node in found) + "]", texts)
    stubs: dict[int, list[Stub]] = {}
    for (step, node), run in zip(found, code.made, strict=True):
        taken = [user for user in node.users if user.target is operator.getitem]
        items = tuple((int(user.args[1]), ordinals[user]) for user in taken)  # type: ignore[arg-type]
        stubs.setdefault(step.index, []).append(
            Stub(node.target.spec.name, run, _inputs(node, ordinals), items)  # type: ignore[union-attr]
        )
    return stubs, code


def _brings_stub(node: Node) -> bool:
    spec = node.target.spec if isinstance(node.target, BoundBreak) else None
    return spec is not None and (spec.capture_stub is not None or spec.barrier is not None)


def _inputs(node: Node, ordinals: dict[Node, int]) -> tuple[int, ...]:
    return tuple(ordinals[n] for n in node.all_input_nodes if n.op != "get_attr")


def _write(writer: Writer, step: Step, node: Node, ordinals: dict[Node, int]) -> None:
    ordinal = ordinals[node]
    writer.line(f"    def stub_{ordinal}({', '.join(writer.names(_inputs(node, ordinals)))}):")
    plan_node = next(n for n in step.nodes if n.ordinal == ordinal)
    for text, _ in writer.emit.statements([node], [node], "        "):
        writer.line(text, step, plan_node)
    writer.line(f"        return {writer.emit.name(node) if node.users else None}")
    writer.line("")
