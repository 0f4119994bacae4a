"""Writes the flat function over the replays and breaks of one capture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.texts import Texts
from bcg_compiler.lower.writer import Code, Part, Writer
from bcg_compiler.plan import Plan, PlanNode

__all__ = ["Captured", "Code", "write_replay"]


class Fill(NamedTuple):
    """The ordinals of slots, and the statements that fill them."""

    slots: tuple[int, ...]
    statements: tuple[str, ...]


@dataclass(frozen=True)
class Captured:
    """What one capture left behind.

    ``replays``  for each segment's step index, what replays it
    ``values``   the tensors at fixed addresses by ordinal: slots and what segments made
    ``bridges``  buffers by ordinal for what breaks make
    ``rows``     the expression for the live rows of a call, "" where nothing is padded
    ``sizes``    numbers among the arguments that are others in the bucket, by ordinal
    ``fills``    what fills slots, by the index of the step that reads them first
    ``write_backs``  for a slot's ordinal the statement that copies it back
    ``tails``    statements to put behind a node of a break, by its ordinal
    ``results``  for each returned value that is not handed out as it is, the expression that makes it the caller's
    ``bound``    objects that those expressions and the text itself call by name
    """

    replays: Mapping[int, Callable[[], None]]
    values: Mapping[int, Any]
    bridges: Mapping[int, torch.Tensor]
    rows: str
    sizes: Mapping[int, int]
    fills: Mapping[int, Fill]
    write_backs: Mapping[int, str]
    tails: Mapping[int, list[str]]
    results: Mapping[int, str]
    bound: Mapping[str, Any]


def write_replay(
    graph: AnnotatedGraph,
    plan: Plan,
    captured: Captured,
    name: str,
    texts: Texts | None = None,
    around: Callable[[Node, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Code:
    """Compile the replay function: it takes the graph's arguments in order and returns its results.

    Arguments are ``a<ordinal>``; ``v<ordinal>`` is the value that steps work with: a slot, a buffer of the pool, or
    what the last break made. No loop, no module call, no pytree. ``texts`` keeps the text under ``name``.

    For checks, ``around`` gives what is called for a node of a break, and ``note`` (of ``captured.bound``) is then told
    what each break gives.
    """
    writer = Writer(graph, plan, of_break=BoundBreak.direct, around=around)
    writer.namespace.objects.update(captured.bound)
    for ordinal, value in captured.values.items():
        writer.namespace.objects[f"v{ordinal}"] = value
    for index, replay in captured.replays.items():
        writer.namespace.objects[f"replay_{index}"] = replay
    for ordinal, bridge in captured.bridges.items():
        writer.namespace.objects[f"bridge_{ordinal}"] = bridge
    writer.line(f"    def replay({', '.join(f'a{ordinal}' for ordinal in plan.inputs)}):")
    if captured.rows:
        writer.line(f"        rows = {captured.rows}")
    writer.hoisted_plans("        ")
    guarded = bool(captured.write_backs)
    indent = "            " if guarded else "        "
    if guarded:
        filled = " = ".join(f"filled_{ordinal}" for ordinal in captured.write_backs)
        writer.line(f"        {filled} = False")
        writer.line("        try:")
    _write_body(writer, plan, captured, indent, told=around is not None)
    if guarded:
        # What was written before an exception stays written, as in eager code.
        writer.line("        except BaseException:")
        for ordinal, statement in captured.write_backs.items():
            writer.line(f"            if filled_{ordinal}: {statement}")
        writer.line("            raise")
    return writer.compile(name, "replay", texts)


class _WriteBacks:
    """Keeps track of the slots that hold what the caller's tensor does not yet, as the text goes on."""

    def __init__(self, writer: Writer, captured: Captured) -> None:
        self._writer = writer
        self._statements = captured.write_backs
        self._filled: set[int] = set()
        self._pending: set[int] = set()

    def filled(self, ordinal: int) -> list[str]:
        """A slot has been filled; lines that say so to whoever handles an exception."""
        self._filled.add(ordinal)
        return [f"filled_{ordinal} = True"] if ordinal in self._statements else []

    def ran(self, *nodes: PlanNode) -> None:
        """Operations have run, which may have written into slots."""
        self._pending |= self._writer.written_by(*nodes) & self._statements.keys() & self._filled

    def before(self, node: PlanNode) -> list[str]:
        """Lines to put before an operation of a break: its body may know the caller's tensor by another way, too."""
        lines = self.all() if self._writer.facts(node).opaque else []
        self.ran(node)
        return lines

    def all(self) -> list[str]:
        """Lines that bring the caller's tensors up to date."""
        lines = [self._statements[ordinal] for ordinal in sorted(self._pending)]
        self._pending.clear()
        return lines


def _write_body(writer: Writer, plan: Plan, captured: Captured, indent: str, told: bool) -> None:
    _name_inputs(writer, plan, captured, indent)
    backs = _WriteBacks(writer, captured)
    live = set(plan.inputs) - set(captured.values)
    for step in plan.steps:
        # Not before: a break in front of it may wait for the stream that makes the input's values.
        fill = captured.fills.get(step.index, Fill((), ()))
        if fill.statements:
            writer.begin(Part("fill", step.index, _names(plan, fill.slots)))
        for line in (*fill.statements, *(line for ordinal in fill.slots for line in backs.filled(ordinal))):
            writer.line(f"{indent}{line}")
        writer.begin(Part(step.kind, step.index))
        if step.kind == "segment":
            writer.line(f"{indent}replay_{step.index}()", step, step.nodes[0])
            backs.ran(*step.nodes)
            continue
        which = {node.ordinal for node in step.nodes} - set(step.fixed)
        writer.statements(
            step, indent, which, before=backs.before, after=lambda node: captured.tails.get(node.ordinal, [])
        )
        for ordinal in step.outputs:
            if ordinal in captured.bridges:
                writer.begin(Part("fill", step.index, f"bridge %{ordinal}"))
                writer.line(
                    f"{indent}fill_bridge(bridge_{ordinal}, v{ordinal}); v{ordinal} = bridge_{ordinal}",
                    step,
                    next(n for n in step.nodes if n.ordinal == ordinal),
                )
        for ordinal in step.outputs if told else ():
            if ordinal not in step.fixed:
                writer.line(f"{indent}note({ordinal}, v{ordinal})")
        live.update(set(step.outputs) - set(step.fixed))
        if dead := [f"v{ordinal}" for ordinal in step.frees if ordinal in live]:
            writer.line(f"{indent}del {', '.join(dead)}")
    last = plan.steps[-1].index
    if copies := backs.all():
        writer.begin(Part("copy_back", last, "slots"))
        for line in copies:
            writer.line(f"{indent}{line}")
    writer.begin(Part("copy_back", last, "results"))
    writer.leave_modes(indent)
    writer.line(f"{indent}return {_returned(writer, captured)}")


def _names(plan: Plan, ordinals: tuple[int, ...]) -> str:
    """What the caller calls some inputs."""
    values = (plan.by_ordinal[ordinal] for ordinal in ordinals)
    return ", ".join(value.argument or value.name for value in values)


def _name_inputs(writer: Writer, plan: Plan, captured: Captured, indent: str) -> None:
    """Name the arguments that break steps and results use as they are."""
    used = {ordinal for step in plan.breaks for ordinal in step.inputs} | set(plan.outputs)
    for ordinal in plan.inputs:
        if ordinal in used and ordinal not in captured.values:
            writer.line(f"{indent}v{ordinal} = {captured.sizes.get(ordinal, f'a{ordinal}')}")


def _returned(writer: Writer, captured: Captured) -> str:
    (returned,) = writer.graph.module.graph.output_node().args
    ordinals = {node: ordinal for ordinal, node in writer.nodes.items()}

    def name_of(node: Any) -> str:
        return captured.results.get(ordinals[node]) or writer.emit.name(node)

    return writer.namespace.expression(returned, name_of)
