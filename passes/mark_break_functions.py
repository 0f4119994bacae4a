"""Marks the calls of break functions: breaks by the user's own word."""

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.result import PassResult


def mark_break_functions(graph: AnnotatedGraph) -> PassResult:
    """Mark every call of an ``@eager_break`` function or of ``call_with_break``, as the kind that it declares.

    But for those whose plan is hoisted: what is left of them may be captured.
    """
    changes = 0
    for node in graph.nodes:
        if isinstance(node.target, BoundBreak) and node not in graph.hoisted:
            changes += graph.mark(node, node.target.spec.reason, f"{node.target.spec.name} is declared a break")
    return PassResult("mark_break_functions", changes)
