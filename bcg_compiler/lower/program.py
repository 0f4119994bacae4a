"""Writes the eager form of a plan: one function for each segment, and the flat function over all steps."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.stubs import Stub, write_stubs
from bcg_compiler.lower.texts import Texts
from bcg_compiler.lower.writer import Code, Writer
from bcg_compiler.plan import Plan, PlanNode, Step


@dataclass(frozen=True)
class Lowered:
    """A plan as code.

    ``run``       the flat function: takes the graph's arguments in order, returns its results
    ``warm_up``   the same with one more argument before them: it is called with the ordinal and the value of all that
                  a capture needs the form of: bridges, and what stubs are given of other breaks
    ``segments``  by the index of their step
    ``fixed``     for each break with nodes that a capture does once: the function that does them on ``inputs``
    ``stubs``     for each break that brings some: what a capture does in place of its functions
    """

    run: Callable[..., Any]
    warm_up: Callable[..., Any]
    segments: dict[int, Callable[..., Any]]
    fixed: dict[int, "Fixed"]
    stubs: dict[int, list[Stub]]
    codes: tuple[Code, ...]


@dataclass(frozen=True)
class Fixed:
    """What a capture does once of a break: ``run`` takes the values ``inputs`` and returns those of ``outputs``."""

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def lower(
    graph: AnnotatedGraph,
    plan: Plan,
    units: Mapping[str, Callable[..., Any]] | None = None,
    name: str = "program",
    texts: Texts | None = None,
) -> Lowered:
    """Write the code of ``plan``. All that it refers to is bound in a closure: no look-up by name, no module call.

    ``units`` are called in place of the units of segments, by their keys; other units are written out. ``texts`` keeps
    the text under ``name``.
    """
    writer = Writer(graph, plan)
    stubs, stub_code = write_stubs(graph, plan, name.replace("program", "stubs"), texts)
    known = {*plan.inputs, *plan.bridges, *(o for step in plan.steps for o in step.fixed)}
    known |= {o for step in plan.segments for o in step.outputs}
    noted = {o for of_step in stubs.values() for stub in of_step for o in stub.inputs} - known
    for step in plan.segments:
        _write_segment(writer, step, units or {})
    _write_program(writer, "program")
    _write_program(writer, "warm_up", noted)
    fixed_values = {step.index: _write_fixed(writer, step) for step in plan.breaks if step.fixed}
    segments = ", ".join(f"{step.index}: {segment_name(step)}" for step in plan.segments)
    fixed = ", ".join(f"{index}: fixed_{index}" for index in fixed_values)
    code = writer.compile(name, f"program, warm_up, {{{segments}}}, {{{fixed}}}", texts)
    run, warm_up, by_index, fixed_by_index = code.made
    made = {i: Fixed(fixed_by_index[i], *values) for i, values in fixed_values.items()}
    return Lowered(run, warm_up, by_index, made, stubs, (code,) if stub_code is None else (code, stub_code))


def lower_prefix(graph: AnnotatedGraph, plan: Plan, step: Step, count: int) -> Callable[..., None]:
    """The first ``count`` nodes of a segment as a function of the segment's arguments: to find the one that fails."""
    writer = Writer(graph, plan)
    part = replace(step, nodes=step.nodes[:count], outputs=())
    _write_segment(writer, replace(part, units=()), {})
    run: Callable[..., None] = writer.compile(f"prefix of segment {step.index}", segment_name(part)).made
    return run


def lower_noted(graph: AnnotatedGraph, plan: Plan, step: Step) -> Code:
    """A segment, uncompiled: ``made`` is a function of ``note`` and of the segment's arguments, and gives its results.

    ``note`` is called with the ordinal and the value of each node as soon as it is made, and with those of each value
    that a node has written.
    """
    writer = Writer(graph, plan)
    made = {n.ordinal for n in step.nodes if writer.nodes[n.ordinal].users}

    def written(node: PlanNode) -> list[str]:
        writes = writer.facts(node).writes
        given = [f for n in writer.nodes[node.ordinal].all_input_nodes if (f := graph.producer_facts(n)) is not None]
        return [f"note({f.ordinal}, v{f.ordinal})" for f in given if f.specs and f.results & writes]

    writer.line(f"    def {segment_name(step)}({', '.join(['note', *writer.names(step.inputs)])}):")
    writer.statements(step, "        ", noted=made, after=written)
    writer.line(f"        return {', '.join(writer.names(step.outputs))}")
    return writer.compile(f"notes of segment {step.index}", segment_name(step))


def segment_name(step: Step) -> str:
    """What the text calls a segment."""
    return f"segment_{step.index}"


def _write_segment(writer: Writer, step: Step, compiled: Mapping[str, Callable[..., Any]]) -> None:
    writer.line(f"    def {segment_name(step)}({', '.join(writer.names(step.inputs))}):")
    if any(unit.key in compiled for unit in step.units):
        _write_units(writer, step, compiled)
    else:
        writer.statements(step, "        ")
    writer.line(f"        return {', '.join(writer.names(step.outputs))}")
    writer.line("")


def _write_units(writer: Writer, step: Step, compiled: Mapping[str, Callable[..., Any]]) -> None:
    """The units of a segment in order: calls of what is compiled, and the operations of the others."""
    nodes = {node.ordinal: node for node in step.nodes}
    in_units = {ordinal for unit in step.units for ordinal in unit.nodes}
    sizes = [ordinal for ordinal in nodes if ordinal not in in_units]
    kept = {*step.outputs, *(o for unit in step.units for o in (*unit.inputs, *unit.outputs))}
    if sizes:
        writer.statements(step, "        ", set(sizes), kept=kept)
    last: dict[int, int] = {}
    for index, unit in enumerate(step.units):
        last.update(dict.fromkeys((*unit.outputs, *unit.inputs), index))
    dying = {o: index for o, index in last.items() if o in nodes and o not in step.outputs}
    for index, unit in enumerate(step.units):
        first = nodes[unit.nodes[0]]
        if unit.key in compiled:
            name = writer.namespace.bind(compiled[unit.key], f"unit_{unit.key}")
            results = "".join(f"{name}, " for name in writer.names(unit.outputs))
            call = f"{name}({', '.join(writer.names(unit.inputs, constants=True))})"
            where = f"  # {first.module or '.'} {first.source or ''}".rstrip()
            writer.line(f"        ({results}) = {call}{where}" if results else f"        {call}{where}", step, first)
        else:
            writer.statements(step, "        ", set(unit.nodes), kept=kept)
        # What a unit gives that nobody takes, as equal ones do, has a name only where code has given it.
        named = [o for o in sorted(dying) if unit.key in compiled or writer.nodes[o].users]
        if dead := [f"v{o}" for o in named if dying[o] == index]:
            writer.line(f"        del {', '.join(dead)}")


def _write_fixed(writer: Writer, step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The nodes of a break that a capture does once, as a function; returns the ordinals of what it takes and makes."""
    ordinals = {node: ordinal for ordinal, node in writer.nodes.items()}
    read = {ordinals[n] for o in step.fixed for n in writer.nodes[o].all_input_nodes if n.op != "get_attr"}
    inputs = tuple(sorted(read - set(step.fixed)))
    outputs = tuple(o for o in step.fixed if writer.nodes[o].users)  # a view that nobody reads has no name
    writer.line(f"    def fixed_{step.index}({', '.join(writer.names(inputs))}):")
    writer.statements(step, "        ", step.fixed)
    writer.line(f"        return ({''.join(f'{name}, ' for name in writer.names(outputs))})")
    writer.line("")
    return inputs, outputs


def _write_program(writer: Writer, name: str, noted: Container[int] | None = None) -> None:
    plan = writer.plan
    arguments = (["note"] if noted is not None else []) + writer.names(plan.inputs)
    writer.line(f"    def {name}({', '.join(arguments)}):")
    writer.hoisted_plans("        ")
    for step in plan.steps:
        if step.kind == "segment":
            results = ", ".join(writer.names(step.outputs))
            call = f"{segment_name(step)}({', '.join(writer.names(step.inputs))})"
            writer.line(f"        {results} = {call}" if results else f"        {call}", step, step.nodes[0])
        else:
            writer.statements(step, "        ", noted=noted or ())
            for ordinal in step.outputs if noted is not None else ():
                if ordinal in plan.bridges:
                    given = "".join(f", {name}" for name in writer.names(step.inputs))
                    writer.line(f"        note({ordinal}, v{ordinal}{given})")
        if step.frees:
            writer.line(f"        del {', '.join(writer.names(step.frees))}")
    writer.leave_modes("        ")
    (returned,) = writer.graph.module.graph.output_node().args
    writer.line(f"        return {writer.emit.expression(returned)}")
    writer.line("")
