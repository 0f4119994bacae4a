"""Source text whose lines know which step and node they are for."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import GraphModule, Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.lower.emit import Emitter, Namespace
from bcg_compiler.lower.side_streams import let_go_behind
from bcg_compiler.lower.texts import GENERATED, Texts, file_name
from bcg_compiler.plan import Plan, PlanNode, Step


class Part(NamedTuple):
    """Some lines of a replay that do one thing.

    ``kind``  as in a plan, or ``fill`` of slots and bridges, or ``copy_back`` of what belongs to the caller
    ``step``  index of the step that it is, or is for
    ``what``  is filled, copied back or called; "" for a step itself
    """

    kind: Literal["segment", "break", "fill", "copy_back"]
    step: int
    what: str = ""


@dataclass(frozen=True)
class Code:
    """Compiled text.

    ``made``      what its ``make`` function returned
    ``source``    the text, ``filename`` the name that it was compiled under
    ``lines``     line number (from 1) → the step and the node that the line is for
    ``parts``     line number → the part of a replay that begins there
    """

    made: Any
    source: str
    filename: str
    lines: dict[int, tuple[Step, PlanNode]]
    parts: dict[int, Part]


def _itself(target: BoundBreak) -> BoundBreak:
    return target


class Writer:
    """Collects the body of one ``make`` function; everything that the text refers to is bound in its closure.

    ``of_break`` gives what the text calls for a break: by default the break itself, with its checks; ``around`` what is
    called in place of the function of any node.
    """

    def __init__(
        self,
        graph: AnnotatedGraph,
        plan: Plan,
        of_break: Callable[[BoundBreak], Callable[..., Any]] = _itself,
        around: Callable[[Node, Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        facts = graph.known
        self.graph = graph
        self.plan = plan
        self.nodes = {f.ordinal: node for node, f in facts.items()}
        self.namespace = Namespace()
        self.emit = Emitter(
            self.namespace,
            {node: f.ordinal for node, f in facts.items()},
            graph.constants,
            {node: f.mode for node, f in graph.facts.items()},
            graph.mode_nodes,
            of_break,
            graph.device,
            around,
        )
        self._text: list[str] = []
        self._lines: dict[int, tuple[Step, PlanNode]] = {}
        self._parts: dict[int, Part] = {}

    def begin(self, part: Part) -> None:
        """Say what the lines from the next one on do, up to the next part."""
        self._parts[len(self._text) + 1] = part

    def line(self, text: str, step: Step | None = None, node: PlanNode | None = None) -> None:
        """Add one line; ``step`` and ``node`` are what an exception on it is about."""
        self._text.append(text)
        if step is not None and node is not None:
            self._lines[len(self._text)] = (step, node)

    def statements(
        self,
        step: Step,
        indent: str,
        which: Container[int] | None = None,
        noted: Container[int] = (),
        before: Callable[[PlanNode], list[str]] = lambda node: [],
        after: Callable[[PlanNode], list[str]] = lambda node: [],
        kept: Container[int] = (),
    ) -> None:
        """Add the operations of a step, each with a comment where the user's line changes; only ``which`` if given.

        The values of ``noted`` are handed to ``note`` as soon as they are made. ``before`` gives lines that bring the
        caller's tensors up to date for an operation, ``after`` lines to put behind it; the values of ``kept``, and what
        the step gives, are not deleted.
        """
        plan_nodes = [n for n in step.nodes if which is None or n.ordinal in which]
        nodes = [self.nodes[n.ordinal] for n in plan_nodes]
        also = (node.ordinal for node in plan_nodes if node.ordinal in kept)
        alive = [self.nodes[ordinal] for ordinal in (*step.outputs, *step.fixed, *also)]
        by_node: dict[Node, PlanNode] = dict(zip(nodes, plan_nodes, strict=True))
        where = last = None
        for text, node in self.emit.statements(nodes, alive, indent, let_go_behind(nodes, self.graph.facts)):
            plan_node = by_node[node] if node is not None else None
            if plan_node is not None and (plan_node.module, plan_node.source) != where:
                where = (plan_node.module, plan_node.source)
                text = f"{text}  # {plan_node.module or '.'} {plan_node.source or ''}".rstrip()
            deeper = text[: len(text) - len(text.lstrip())]
            if plan_node is not None and plan_node is not last:
                last = plan_node
                if copies := before(plan_node):
                    self.begin(Part("copy_back", step.index, "slots"))
                    for line in copies:
                        self.line(f"{deeper}{line}")
                    self.begin(Part(step.kind, step.index))
            self.line(text, step, plan_node)
            if plan_node is not None and plan_node.ordinal in noted and not text.lstrip().startswith("del "):
                self.line(f"{deeper}note({plan_node.ordinal}, v{plan_node.ordinal})")
            if plan_node is not None and not text.lstrip().startswith("del "):
                for line in after(plan_node):
                    self.line(f"{deeper}{line}", step, plan_node)

    def hoisted_plans(self, indent: str) -> None:
        """Add the calls of the plans that run before the first step."""
        steps = {node.ordinal: step for step in self.plan.steps for node in step.nodes}
        for hoisted in self.plan.hoisted:
            first = hoisted.nodes[0]
            call = self.graph.hoisted[self.nodes[first.ordinal]]
            name = self.namespace.bind(call, call.function.fn.__name__)
            self.begin(Part("break", steps[first.ordinal].index, f"plan {call.function.fn.__name__}"))
            where = f"  # for {len(hoisted.nodes)} from {first.module or '.'} {first.source or ''}".rstrip()
            self.line(f"{indent}{name}(){where}", steps[first.ordinal], first)

    def facts(self, node: PlanNode) -> NodeFacts:
        """The facts of a node of the plan."""
        return self.graph.facts[self.nodes[node.ordinal]]

    def written_by(self, *nodes: PlanNode) -> set[int]:
        """Ordinals of the graph's inputs whose memory some nodes write."""
        roots = frozenset().union(*(self.facts(node).writes for node in nodes))
        return {facts.ordinal for facts in self.graph.input_facts.values() if facts.results & roots}

    def leave_modes(self, indent: str) -> None:
        """Leave the grad mode that the graph itself leaves behind."""
        if self.graph.exit_grad is not None:
            setter = self.namespace.bind(torch._C._set_grad_enabled, "set_grad_mode")
            self.line(f"{indent}{setter}({self.graph.exit_grad})")

    def names(self, ordinals: tuple[int, ...], constants: bool = False) -> list[str]:
        """Variables of values; constants of the graph are no arguments, their names are bound for the whole text.

        With ``constants`` also the names of those that are tensors.
        """

        def has_name(node: Node) -> bool:
            is_graph = isinstance(self.graph.constants.get(node), GraphModule)
            return node.op != "get_attr" or (constants and not is_graph)

        return [self.emit.name(node) for node in map(self.nodes.__getitem__, ordinals) if has_name(node)]

    def compile(self, name: str, returned: str, texts: Texts | None = None) -> Code:
        """Compile the text, which ``texts`` keeps, and call its ``make``, which returns ``returned``."""
        # The header comes last: only now is it known what the text refers to.
        header = f"def make({', '.join(self.namespace.objects)}):"
        source = "\n".join([header, *self._text, f"    return {returned}", ""])
        scope: dict[str, Any] = {"__name__": GENERATED}
        filename = file_name(name, source, texts)
        exec(compile(source, filename, "exec"), scope)
        lines = {number + 1: what for number, what in self._lines.items()}
        parts = {number + 1: part for number, part in self._parts.items()}
        return Code(scope["make"](**self.namespace.objects), source, filename, lines, parts)
