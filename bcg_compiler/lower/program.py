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
    """

    run: Callable[..., Any]
    warm_up: Callable[..., Any]
    segments: dict[int, Callable[..., Any]]
    code: Code


def lower(graph: AnnotatedGraph, plan: Plan, filename: str) -> Lowered:
    """Compile the code of ``plan``. All that it refers to is bound in a closure: no look-up by name, no module call."""
    writer = Writer(graph, plan)
    for step in plan.segments:
        _write_segment(writer, step)
    _write_program(writer, "program", note="")
    _write_program(writer, "warm_up", note="note")
    segments = ", ".join(f"{step.index}: {segment_name(step)}" for step in plan.segments)
    code = writer.compile(filename, f"program, warm_up, {{{segments}}}")
    run, warm_up, by_index = code.made
    return Lowered(run, warm_up, by_index, code)


def segment_name(step: Step) -> str:
    """What the text calls a segment."""
    return f"segment_{step.index}"


def _write_segment(writer: Writer, step: Step) -> None:
    writer.line(f"    def {segment_name(step)}({', '.join(writer.names(step.inputs))}):")
    writer.statements(step, "        ")
    writer.line(f"        return {', '.join(writer.names(step.outputs))}")
    writer.line("")


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
                    writer.line(f"        {note}({ordinal}, v{ordinal})")
        if step.frees:
            writer.line(f"        del {', '.join(writer.names(step.frees))}")
    (returned,) = writer.graph.module.graph.output_node().args
    writer.line(f"        return {writer.emit.expression(returned)}")
    writer.line("")
