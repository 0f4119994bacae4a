"""``graph_of(fn, *args)``: the annotated graph of a function, for passes to work on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from bcg_compiler.breaks import as_bound_break
from bcg_compiler.facts import AnnotatedGraph, collect_facts


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.fixture
def graph_of() -> Callable[..., AnnotatedGraph]:
    """``graph_of(fn, *args)``."""

    def make(fn: Callable[..., Any], *args: Any) -> AnnotatedGraph:
        graphs: list[AnnotatedGraph] = []

        def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            for node in module.graph.nodes:
                bound = as_bound_break(node.target, node.args) if node.op == "call_function" else None
                if bound is not None:
                    node.target, node.args = bound
            graphs.append(collect_facts(module, example_inputs))
            module.recompile()
            return module.forward

        torch.compile(fn, backend=backend, fullgraph=True)(*args)
        (graph,) = graphs
        return graph

    return make
