"""Marks what the facts prove uncapturable."""

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.result import PassResult


def mark_uncapturable(graph: AnnotatedGraph) -> PassResult:
    """Mark every node that has a reason against capture, with the most telling one; the others are named after it."""
    changes = 0
    for node, facts in graph.facts.items():
        if not facts.uncapturable:
            continue
        first, *others = facts.uncapturable
        also = f" (also {', '.join(dict.fromkeys(r.code for r in others))})" if others else ""
        changes += graph.mark(node, first.code, first.text + also)
    return PassResult("mark_uncapturable", changes)
