"""An annotated graph as text: a line for each node, which is the same in every process."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.facts.node import FENCE, RANDOM_STATE, STREAMS, WORLD
from bcg_compiler.plan.structure import constant_text

#: What is read and written, and is no storage.
_STATE = {RANDOM_STATE: "the random state", WORLD: "memory outside", FENCE: "everything", STREAMS: "streams"}


def graph_text(graph: AnnotatedGraph, *, with_facts: bool = False) -> str:
    """The graph in the order it runs: what each node is given and gives, in which module, from which line of it.

    Under a node that is a break stands why. ``with_facts``: before a node stands its ordinal, which is the one of the
    plan, and under it what it dispatches and touches. Without them a pass that adds nodes changes no other line.
    """
    objects = dict(graph.objects)  # the numbers of what has no name: those that a plan gives are the plan's

    def text(value: Any) -> str:
        return constant_text(value, lambda node: node.name, torch.device(graph.device), objects)

    return "\n".join(_lines(graph, text, with_facts)) + "\n"


def _lines(graph: AnnotatedGraph, text: Callable[[Any], str], with_facts: bool) -> Iterator[str]:
    modes = {node: ordinal for ordinal, node in graph.mode_nodes.items()}
    known = graph.known
    for node in graph.module.graph.nodes:
        facts = known.get(node)
        if node.op == "output":
            yield f"return {text(node.args[0])}"
            continue
        ordinal = facts.ordinal if facts is not None else modes.get(node)
        yield f"%{ordinal}".ljust(7) * (with_facts and ordinal is not None) + _line(node, facts, text)
        if (reason := graph.marks.get(node)) is not None:
            yield f"       break: {reason.code}: {reason.text}"
        if node in graph.hoisted:
            yield "       its plan runs before the graph"
        if with_facts and node in graph.facts:
            yield f"       {_effects(graph.facts[node])}"


def _line(node: Node, facts: NodeFacts | None, text: Callable[[Any], str]) -> str:
    if node.op == "placeholder":
        line = f"given {node.name}"
    elif node.op == "get_attr":
        line = f"{node.name} = held {node.target}"
    else:
        called = facts.op if facts is not None else text(node.target)
        given = [text(arg) for arg in node.args] + [f"{key}={text(value)}" for key, value in node.kwargs.items()]
        line = f"{node.name} = {called}({', '.join(given)})"
    if facts is None:
        return line
    gives = ", ".join(map(str, facts.specs)) or facts.size
    line += f" -> {gives}" * bool(gives)
    line += f"  in {facts.module}" * bool(facts.module)
    return line + (f"  # {facts.source}" if facts.source else "")


def _effects(facts: NodeFacts) -> str:
    parts = [" ".join(facts.aten) or "dispatches nothing", f"{facts.kernels} kernel{'s' * (facts.kernels != 1)}"]
    parts += [
        f"{word} {', '.join(_STATE.get(root, f'storage {root}') for root in sorted(roots))}"
        for word, roots in (("reads", facts.reads), ("writes", facts.writes), ("lies in", facts.results))
        if roots
    ]
    parts += [f"{reason.code}: {reason.text}" for reason in facts.uncapturable]
    return "; ".join(parts)
