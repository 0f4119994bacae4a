"""Hoists the plans of breaks before the graph, so that what is left of them can be captured."""

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from bcg_compiler.breaks import BoundBreak, Break
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.hoisting import PlanFunction
from bcg_compiler.passes.result import PassResult


def hoist_plans(graph: AnnotatedGraph, *, padded: bool) -> PassResult:
    """Hoist the plan of every ``@eager_break(plan=...)``; such a call is no break any more, where it may be captured.

    ``padded``: inputs may be padded to a ladder. What is not hoisted, or stays a break, is marked with the reason.
    """
    changes, notes = 0, []
    for node, facts in list(graph.facts.items()):
        if not isinstance(node.target, BoundBreak) or node.target.spec.plan is None:
            continue
        spec, plan = node.target.spec, node.target.spec.plan
        taken = _of_the_graph(plan, node)
        if taken:
            text = f"its plan {plan.name} takes {taken!r}, which is a tensor or a number of the graph"
            graph.mark(node, "plan_argument", text)
            notes.append(f"{facts}: {text}")
            continue
        call = node.target.plan_call(node.args, dict(node.kwargs))
        assert call is not None
        graph.hoist(node, call)
        changes += 1
        if padded and _leaves_rows(graph, spec, node):
            text = f"{spec.name} may leave padded rows as they are; if it writes every row, declare writes_every_row"
            graph.mark(node, "plan_padded_rows", text)
            notes.append(f"{facts}: {text}")
    return PassResult("hoist_plans", changes, tuple(notes))


def _of_the_graph(plan: PlanFunction, node: Node) -> str:
    """The first argument of a plan that is known at run time only; "" if there is none."""
    for name, value in plan.arguments(node.args, node.kwargs).items():
        if _nodes(value):
            return name
    return ""


def _leaves_rows(graph: AnnotatedGraph, spec: Break, node: Node) -> bool:
    """Whether the body writes something of open size, and may write its live rows only.

    Behind a break the runner clears the rest; inside of a segment nobody does.
    """
    if spec.writes_every_row:
        return False
    named = spec.named(node.args, dict(node.kwargs))
    written = [n for name, value in named if name in spec.mutates_args for n in _nodes(value)]
    made = (facts for facts in map(graph.producer_facts, (node, *written)) if facts is not None)
    sizes = (size for facts in made for tensor in facts.specs for size in tensor.shape)
    return any(not size.isdigit() for size in sizes)


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found
