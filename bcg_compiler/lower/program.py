"""Writes the source text of a plan: one function for each segment, and the flat function over all steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.emit import Emitter, Namespace
from bcg_compiler.plan import Plan, PlanNode, Step


@dataclass(frozen=True)
class Lowered:
    """A plan as code.

    ``run``    the flat function: takes the graph's arguments in order, returns its results
    ``source`` its text, which is what ``run`` was compiled from under the name ``filename``
    ``lines``  line number (from 1) → the step and the node that the line is for
    """

    run: Callable[..., Any]
    source: str
    filename: str
    lines: dict[int, tuple[Step, PlanNode]]


def lower(graph: AnnotatedGraph, plan: Plan, filename: str) -> Lowered:
    """Compile the code of ``plan``. All that it refers to is bound in a closure: no look-up by name, no module call."""
    return _Writer(graph, plan).write(filename)


class _Writer:
    def __init__(self, graph: AnnotatedGraph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        facts = {**graph.input_facts, **graph.facts}
        self.nodes = {f.ordinal: node for node, f in facts.items()}
        constants = {n: _attribute(graph.module, str(n.target)) for n in graph.input_facts if n.op == "get_attr"}
        self.namespace = Namespace()
        self.emit = Emitter(
            self.namespace,
            {node: f.ordinal for node, f in facts.items()},
            constants,
            {node: f.mode for node, f in graph.facts.items()},
            graph.mode_nodes,
        )
        self.text: list[str] = []
        self.lines: dict[int, tuple[Step, PlanNode]] = {}

    def write(self, filename: str) -> Lowered:
        for step in self.plan.segments:
            self._segment(step)
        self._program()
        # The header comes last: only now is it known what the text refers to.
        header = f"def make({', '.join(self.namespace.objects)}):"
        self.lines = {line + 1: what for line, what in self.lines.items()}
        source = "\n".join([header, *self.text, "    return program", ""])
        scope: dict[str, Any] = {}
        exec(compile(source, filename, "exec"), scope)
        return Lowered(scope["make"](**self.namespace.objects), source, filename, self.lines)

    def _segment(self, step: Step) -> None:
        self._line(f"    def {_name(step)}({', '.join(self._names(step.inputs))}):")
        self._statements(step, "        ")
        self._line(f"        return {', '.join(self._names(step.outputs))}")
        self._line("")

    def _program(self) -> None:
        self._line(f"    def program({', '.join(self._names(self.plan.inputs))}):")
        for step in self.plan.steps:
            if step.kind == "segment":
                results = ", ".join(self._names(step.outputs))
                call = f"{_name(step)}({', '.join(self._names(step.inputs))})"
                self._line(f"        {results} = {call}" if results else f"        {call}", step, step.nodes[0])
            else:
                self._statements(step, "        ")
            if step.frees:
                self._line(f"        del {', '.join(self._names(step.frees))}")
        (returned,) = self.graph.module.graph.output_node().args
        self._line(f"        return {self.emit.expression(returned)}")

    def _statements(self, step: Step, indent: str) -> None:
        nodes = [self.nodes[n.ordinal] for n in step.nodes]
        kept = [self.nodes[ordinal] for ordinal in step.outputs]
        by_node: dict[Node, PlanNode] = dict(zip(nodes, step.nodes, strict=True))
        where = None
        for text, node in self.emit.statements(nodes, kept, indent):
            plan_node = by_node[node] if node is not None else None
            if plan_node is not None and (plan_node.module, plan_node.source) != where:
                where = (plan_node.module, plan_node.source)
                self._line(f"{text}  # {plan_node.module or '.'} {plan_node.source or ''}".rstrip(), step, plan_node)
            else:
                self._line(text, step, plan_node)

    def _line(self, text: str, step: Step | None = None, node: PlanNode | None = None) -> None:
        self.text.append(text)
        if step is not None and node is not None:
            self.lines[len(self.text)] = (step, node)

    def _names(self, ordinals: tuple[int, ...]) -> list[str]:
        """Variables of values; constants of the graph are no arguments, their names are bound for the whole text."""
        nodes = [self.nodes[ordinal] for ordinal in ordinals]
        return [self.emit.name(node) for node in nodes if node.op != "get_attr"]


def _name(step: Step) -> str:
    return f"segment_{step.index}"


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner
