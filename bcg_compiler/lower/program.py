"""Writes the eager form of a plan: one function for each segment, and the flat function over all steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.writer import Code, Writer
from bcg_compiler.plan import Plan, Step


@dataclass(frozen=True)
class Lowered:
    """A plan as code.

    ``run``       the flat function: takes the graph's arguments in order, returns its results
    ``warm_up``   the same with one more argument before them: it is called with the ordinal and the value of each
                  bridge, whose form a capture needs
    ``segments``  by the index of their step
    ``fixed``     for each break with nodes that a capture does once: the function that does them on ``inputs``
    """

    run: Callable[..., Any]
    warm_up: Callable[..., Any]
    segments: dict[int, Callable[..., Any]]
    fixed: dict[int, "Fixed"]
    code: Code


@dataclass(frozen=True)
class Fixed:
    """What a capture does once of a break: ``run`` takes the values ``inputs`` and returns those of ``outputs``."""

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def lower(graph: AnnotatedGraph, plan: Plan, filename: str) -> Lowered:
    """Compile the code of ``plan``. All that it refers to is bound in a closure: no look-up by name, no module call."""
    writer = Writer(graph, plan)
    for step in plan.segments:
        _write_segment(writer, step)
    _write_program(writer, "program", note="")
    _write_program(writer, "warm_up", note="note")
    fixed_inputs = {step.index: _write_fixed(writer, step) for step in plan.breaks if step.fixed}
    segments = ", ".join(f"{step.index}: {segment_name(step)}" for step in plan.segments)
    fixed = ", ".join(f"{index}: fixed_{index}" for index in fixed_inputs)
    code = writer.compile(filename, f"program, warm_up, {{{segments}}}, {{{fixed}}}")
    run, warm_up, by_index, fixed_by_index = code.made
    outputs = {step.index: step.fixed for step in plan.breaks}
    made = {i: Fixed(fixed_by_index[i], inputs, outputs[i]) for i, inputs in fixed_inputs.items()}
    return Lowered(run, warm_up, by_index, made, code)


def segment_name(step: Step) -> str:
    """What the text calls a segment."""
    return f"segment_{step.index}"


def _write_segment(writer: Writer, step: Step) -> None:
    writer.line(f"    def {segment_name(step)}({', '.join(writer.names(step.inputs))}):")
    writer.statements(step, "        ")
    writer.line(f"        return {', '.join(writer.names(step.outputs))}")
    writer.line("")


def _write_fixed(writer: Writer, step: Step) -> tuple[int, ...]:
    """The nodes of a break that a capture does once, as a function; returns the ordinals of what it reads."""
    ordinals = {node: ordinal for ordinal, node in writer.nodes.items()}
    read = {ordinals[n] for o in step.fixed for n in writer.nodes[o].all_input_nodes if n.op != "get_attr"}
    inputs = tuple(sorted(read - set(step.fixed)))
    writer.line(f"    def fixed_{step.index}({', '.join(writer.names(inputs))}):")
    writer.statements(step, "        ", step.fixed)
    writer.line(f"        return ({', '.join(writer.names(step.fixed))},)")
    writer.line("")
    return inputs


def _write_program(writer: Writer, name: str, note: str) -> None:
    plan = writer.plan
    arguments = ([note] if note else []) + writer.names(plan.inputs)
    writer.line(f"    def {name}({', '.join(arguments)}):")
    for step in plan.steps:
        if step.kind == "segment":
            results = ", ".join(writer.names(step.outputs))
            call = f"{segment_name(step)}({', '.join(writer.names(step.inputs))})"
            writer.line(f"        {results} = {call}" if results else f"        {call}", step, step.nodes[0])
        else:
            writer.statements(step, "        ")
            for ordinal in step.outputs if note else ():
                if ordinal in plan.bridges:
                    given = "".join(f"{name}, " for name in writer.names(step.inputs))
                    writer.line(f"        {note}({ordinal}, v{ordinal}, ({given}))")
        if step.frees:
            writer.line(f"        del {', '.join(writer.names(step.frees))}")
    writer.leave_modes("        ")
    (returned,) = writer.graph.module.graph.output_node().args
    writer.line(f"        return {writer.emit.expression(returned)}")
    writer.line("")
