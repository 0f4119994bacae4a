"""What a break does at a replay, beside what it declares: which arguments it writes, and what it gives."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.checks.fault import Fault, Kind
from bcg_compiler.checks.numbers import tensor_difference
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.plan import Step


def checked_break(
    graph: AnnotatedGraph, step: Step, node: Node, target: Callable[..., Any], report: Callable[[Fault], None]
) -> Callable[..., Any]:
    """``target``, the body of a break, with a look at its arguments before and after it, and at its results."""
    facts = graph.facts[node]
    given = tree_leaves((node.args, node.kwargs), is_leaf=lambda leaf: isinstance(leaf, Node))

    def undeclared(leaves: Sequence[Any]) -> list[tuple[Tensor, Tensor, str]]:
        """Tensors among the arguments that it says it does not write, with a copy and a name."""
        found = []
        for leaf, value in zip(given, leaves, strict=True):
            known = graph.producer_facts(leaf)
            if isinstance(value, Tensor) and known is not None and not known.results & facts.writes:
                found.append((value, value.clone(), _parameter(node, leaf)))
        return found

    def fault(kind: Kind, what: str, largest: float = math.inf) -> None:
        place = (facts.ordinal, facts.op, facts.module, facts.source)
        taken = {
            graph.known[leaf].ordinal: value for leaf, value in zip(given, values, strict=False) if leaf in graph.known
        }
        report(Fault(kind, step.index, "break", *place, what, largest, graph=graph, given=taken))

    values: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = values[:] = tree_leaves((args, kwargs))
        before = undeclared(leaves) if len(leaves) == len(given) else []
        result = target(*args, **kwargs)
        for value, copy, name in before:
            if (difference := tensor_difference(value, copy)) is not None:
                fault("write", f"It writes its argument {name!r}: {difference.what}", difference.largest)
        for text in _odd_results(facts, result):
            fault("result", text)
        return result

    return call


def _parameter(node: Node, leaf: Any) -> str:
    """What the body calls an argument."""
    target, names = node.target, list[str]()
    if isinstance(target, BoundBreak):
        names = list(target.spec.parameters)
    elif isinstance(overload := getattr(target, "default", target), torch._ops.OpOverload):
        names = [argument.name for argument in overload._schema.arguments]
    found = dict(zip(node.args, names, strict=False)) if all(isinstance(arg, Hashable) for arg in node.args) else {}
    return found.get(leaf) or next((name for name, arg in node.kwargs.items() if arg is leaf), str(leaf))


def _odd_results(facts: NodeFacts, result: Any) -> list[str]:
    """How the tensors of a result differ from what is known of it, in sizes that are numbers."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if len(tensors) != len(facts.specs):
        return [f"It gives {len(tensors)} tensors, and {len(facts.specs)} by its fake."] if facts.specs else []
    found = []
    for tensor, spec in zip(tensors, facts.specs, strict=True):
        fixed = all(
            int(wanted) == size for size, wanted in zip(tensor.shape, spec.shape, strict=False) if wanted.isdigit()
        )
        if tensor.dtype != getattr(torch, spec.dtype) or tensor.dim() != len(spec.shape) or not fixed:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append(f"It gives {dtype}{list(tensor.shape)}, and {spec} by its fake.")
    return found
