"""Writes the flat function over the replays and breaks of one capture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.writer import Code, Writer
from bcg_compiler.plan import Plan

__all__ = ["Captured", "Code", "write_replay"]


@dataclass(frozen=True)
class Captured:
    """What one capture left behind.

    ``replays``  for each segment's step index, what replays it
    ``values``   the tensors at fixed addresses by ordinal: slots and what segments made
    ``bridges``  buffers by ordinal for what breaks make
    ``fills``    for each slot's ordinal the statement that fills it, ``write_backs`` the one that copies it back
    ``results``  for each returned value that is not handed out as it is, the expression that makes it the caller's
    ``bound``    objects that those expressions and the text itself call by name
    """

    replays: Mapping[int, Callable[[], None]]
    values: Mapping[int, Any]
    bridges: Mapping[int, torch.Tensor]
    fills: Mapping[int, str]
    write_backs: Mapping[int, str]
    results: Mapping[int, str]
    bound: Mapping[str, Any]


def write_replay(graph: AnnotatedGraph, plan: Plan, captured: Captured, filename: str) -> Code:
    """Compile the replay function: it takes the graph's arguments in order and returns its results.

    Arguments are ``a<ordinal>``; ``v<ordinal>`` is the value that steps work with: a slot, a buffer of the pool, or
    what the last break made. No loop, no module call, no pytree.
    """
    writer = Writer(graph, plan, of_break=BoundBreak.direct)
    for name, value in captured.bound.items():
        writer.namespace.objects[name] = value
    for ordinal, value in captured.values.items():
        writer.namespace.objects[f"v{ordinal}"] = value
    for index, replay in captured.replays.items():
        writer.namespace.objects[f"replay_{index}"] = replay
    for ordinal, bridge in captured.bridges.items():
        writer.namespace.objects[f"bridge_{ordinal}"] = bridge
    writer.line(f"    def replay({', '.join(f'a{ordinal}' for ordinal in plan.inputs)}):")
    guarded = bool(captured.write_backs)
    indent = "            " if guarded else "        "
    if guarded:
        filled = " = ".join(f"filled_{ordinal}" for ordinal in captured.write_backs)
        writer.line(f"        {filled} = False")
        writer.line("        try:")
    _write_body(writer, plan, captured, indent)
    if guarded:
        # What was written before an exception stays written, as in eager code.
        writer.line("        except BaseException:")
        for ordinal, statement in captured.write_backs.items():
            writer.line(f"            if filled_{ordinal}: {statement}")
        writer.line("            raise")
    return writer.compile(filename, "replay")


def _write_body(writer: Writer, plan: Plan, captured: Captured, indent: str) -> None:
    _name_inputs(writer, plan, captured, indent)
    fills = dict(captured.fills)
    touched: set[int] = set()  # slots that hold what the caller's tensor does not yet
    live = set(plan.inputs) - set(captured.values)
    for step in plan.steps:
        # Not before: a break in front of it may wait for the stream that makes the input's values.
        for ordinal in [o for o in step.inputs if o in fills]:
            writer.line(f"{indent}{fills.pop(ordinal)}")
            if ordinal in captured.write_backs:
                writer.line(f"{indent}filled_{ordinal} = True")
        if step.kind == "segment":
            writer.line(f"{indent}replay_{step.index}()", step, step.nodes[0])
            touched |= writer.written_by(step) & captured.write_backs.keys() - fills.keys()
            continue
        if touched and any(writer.facts(node).opaque for node in step.nodes):
            # The body may know the caller's tensor by another way, through the forward context, say.
            for ordinal in sorted(touched):
                writer.line(f"{indent}{captured.write_backs[ordinal]}")
            touched = set()
        writer.statements(step, indent, {node.ordinal for node in step.nodes} - set(step.fixed))
        touched |= writer.written_by(step) & captured.write_backs.keys() - fills.keys()
        for ordinal in step.outputs:
            if ordinal in captured.bridges:
                writer.line(
                    f"{indent}fill_bridge(bridge_{ordinal}, v{ordinal}); v{ordinal} = bridge_{ordinal}",
                    step,
                    next(n for n in step.nodes if n.ordinal == ordinal),
                )
        live.update(set(step.outputs) - set(step.fixed))
        if dead := [f"v{ordinal}" for ordinal in step.frees if ordinal in live]:
            writer.line(f"{indent}del {', '.join(dead)}")
    for ordinal in sorted(touched):
        writer.line(f"{indent}{captured.write_backs[ordinal]}")
    writer.leave_modes(indent)
    writer.line(f"{indent}return {_returned(writer, captured)}")


def _name_inputs(writer: Writer, plan: Plan, captured: Captured, indent: str) -> None:
    """Name the arguments that break steps and results use as they are."""
    used = {ordinal for step in plan.breaks for ordinal in step.inputs} | set(plan.outputs)
    for ordinal in plan.inputs:
        if ordinal in used and ordinal not in captured.values:
            writer.line(f"{indent}v{ordinal} = a{ordinal}")


def _returned(writer: Writer, captured: Captured) -> str:
    (returned,) = writer.graph.module.graph.output_node().args
    ordinals = {node: ordinal for ordinal, node in writer.nodes.items()}

    def name_of(node: Any) -> str:
        return captured.results.get(ordinals[node]) or writer.emit.name(node)

    return writer.namespace.expression(returned, name_of)
