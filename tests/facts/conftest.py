"""``facts_of(fn, *args)``: the facts that the graph of a function has. Each test starts from one state."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from bcg_compiler.breaks import as_bound_break
from bcg_compiler.facts import AnnotatedGraph, NodeFacts, collect_facts


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.compiler.reset()


class Collected:
    """Facts by the name of an operation, or of an argument."""

    def __init__(self, graph: AnnotatedGraph) -> None:
        self.graph = graph

    def all(self, op: str) -> list[NodeFacts]:
        """The facts of the nodes of that name, in order."""
        return [facts for facts in self.graph.facts.values() if facts.op == op]

    def __getitem__(self, op: str) -> NodeFacts:
        """The facts of the only node of that name."""
        found = self.all(op)
        assert len(found) == 1, f"{op!r}: {len(found)} of {[facts.op for facts in self.graph.facts.values()]}"
        return found[0]

    def given(self, name: str) -> NodeFacts:
        """The facts of the argument of that name."""
        found = [f for node, f in self.graph.input_facts.items() if node.name in (f"l_{name}_", name)]
        assert len(found) == 1, f"{name!r}: {[node.name for node in self.graph.input_facts]}"
        return found[0]

    @property
    def ops(self) -> list[str]:
        return [facts.op for facts in self.graph.facts.values()]

    @property
    def kernels(self) -> int:
        return sum(facts.kernels for facts in self.graph.facts.values())

    @property
    def aliases(self) -> list[bool]:
        """For each result of the graph: does it live in the storage of the only argument?"""
        (given,) = (facts.results for facts in self.graph.input_facts.values() if facts.op == "input")
        output = self.graph.module.graph.output_node()
        return [bool(self.graph.facts[node].results & given) for node in output.all_input_nodes]

    def codes(self, op: str) -> list[str]:
        """The codes of the reasons that speak against capturing the only node of that name."""
        return [reason.code for reason in self[op].uncapturable]


@pytest.fixture
def facts_of() -> Callable[..., Collected]:
    """``facts_of(fn, *args, again=(), capturable=())``: of the graph of the first call, or of that for ``again``."""

    def collect(
        fn: Callable[..., Any], *args: Any, again: tuple[Any, ...] = (), capturable: tuple[str, ...] = ()
    ) -> Collected:
        graphs: list[AnnotatedGraph] = []

        def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            for node in module.graph.nodes:
                bound = as_bound_break(node.target, node.args) if node.op == "call_function" else None
                if bound is not None:
                    node.target, node.args = bound
            graphs.append(collect_facts(module, example_inputs, capturable))
            module.recompile()
            return module.forward

        compiled = torch.compile(fn, backend=backend, fullgraph=True)
        compiled(*args)
        if again:
            compiled(*again)
        return Collected(graphs[-1])

    return collect
