"""Products of one input as one launch: small ones do not fill a GPU, and each takes its latency, whatever it computes.

The projections to queries, keys and values are three products of a few hundred rows, of which two are narrow. cuBLAS
launches them one behind the other. Where all of their tiles are computed at once, one kernel takes as long as the
longest of them. A compiler of segments is given one operation for all of them.
"""

import math
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower.linears import compile_for, launches, linears
from bcg_compiler.plan import CompileUnit


def products_of_one_input(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> list[list[int]]:
    """Products of a unit that may be launched together, as positions among its nodes: of one input, with nothing
    that one of them reads written between. If sizes are open, which ones are is seen when they are captured.
    """
    given = {nodes[ordinal] for ordinal in unit.inputs}
    found: list[_Group] = []
    current: dict[int, _Group] = {}
    for at, ordinal in enumerate(unit.nodes):
        node = nodes[ordinal]
        facts = graph.facts[node]
        if _is_product_of_weights(graph, node, given):
            # By its fake: an operation that gives its argument, as ``x.to(x.dtype)``, gives that one, too.
            x = id(graph.fakes[node.all_input_nodes[0]])
            if x not in current or facts.reads & current[x].written:
                current[x] = _Group([], set())
                found.append(current[x])
            current[x].positions.append(at)
        for group in current.values():
            group.written.update(facts.writes)
    return [small for group in found for small in _small_ones(graph, unit, nodes, group.positions)]


def compile_kernels(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> None:
    """Compile what a unit's products are launched by, where no size is open: else its first call does it."""
    for group in products_of_one_input(graph, unit, nodes):
        args = [nodes[unit.nodes[at]].args for at in group]
        x, *weights = (graph.fakes[node] for node in (args[0][0], *(of[1] for of in args)) if isinstance(node, Node))
        if all(isinstance(size, int) for size in x.shape):
            compile_for(x, weights, any(len(of) > 2 and of[2] is not None for of in args))


class _Group(NamedTuple):
    """Products of one input, as positions, and the roots that have been written since the first of them."""

    positions: list[int]
    written: set[int]


def _is_product_of_weights(graph: AnnotatedGraph, node: Node, given: set[Node]) -> bool:
    if node.target is not F.linear or node.kwargs or graph.facts[node].group != graph.facts[node].ordinal:
        return False  # functorch, whose region is a group, knows no rule for ``linears``
    x, *weights = node.args
    if weights[-1] is None:
        weights.pop()
    if not all(isinstance(weight, Node) and weight in given for weight in weights):
        return False
    fakes: list[Any] = [graph.fakes.get(n) for n in (x, *weights) if isinstance(n, Node)]
    return (
        len(fakes) == 1 + len(weights)
        and all(isinstance(fake, Tensor) and not fake.requires_grad for fake in fakes)
        # In the caller's autocast the result has another dtype, by a cast of ``F.linear`` that ``linears`` does not do.
        and len({fake.dtype for fake in (*fakes, graph.fakes[node])}) == 1
        and fakes[0].dim() > 1
        and [fake.dim() for fake in fakes[1:]] == [2, 1][: len(weights)]
    )


def _small_ones(
    graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node], positions: Sequence[int]
) -> list[list[int]]:
    """Those of one input that are launched together; if rows are open, those that are if there is one row."""
    results = [graph.fakes[nodes[unit.nodes[at]]] for at in positions]
    columns = [result.shape[-1] for result in results]
    if not all(isinstance(wide, int) for wide in columns):
        return []
    rows = math.prod(results[0].shape[:-1])  # numel() would make a constant of a size that is open
    found = launches(rows if isinstance(rows, int) else 1, columns, results[0].dtype, results[0].device)
    return [sorted(positions[at] for at in launch.products) for launch in found]


def in_one_launch(module: GraphModule, positions: Sequence[Sequence[int]]) -> GraphModule:
    """A copy of a unit's graph with one operation for each group of products, where the first of them is."""
    graph, copies = Graph(), dict[Node, Any]()
    graph.output(graph.graph_copy(module.graph, copies))
    computing = [copies[n] for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    for group in positions:
        products = [computing[at] for at in group]
        x = products[0].args[0]
        weights = [node.args[1] for node in products]
        biases = [node.args[2] if len(node.args) > 2 else None for node in products]
        with graph.inserting_before(products[0]):
            made = graph.call_function(linears._opoverload, (x, weights, biases))
            items = [graph.call_function(getitem, (made, at)) for at in range(len(products))]
        for node, item in zip(products, items, strict=True):
            item.meta = node.meta
            node.replace_all_uses_with(item)
            graph.erase_node(node)
    return GraphModule(module, graph)
