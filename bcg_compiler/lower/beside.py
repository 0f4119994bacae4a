"""Products of one input side by side: small ones do not fill a GPU, and do not wait for each other.

The projections to queries, keys and values are three products of a few hundred rows, of which two are narrow. Captured
one behind the other each takes its own latency; on streams that are forked and joined they take that of the widest. A
compiler of segments knows of one stream, so it is given one operation for all of them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from bcg_compiler.compat.side_streams import fork_stream, join_stream, on_stream
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.plan import CompileUnit, Plan

#: Rows and columns of a result that one multiprocessor computes at a time, of those that cuBLAS chooses from.
TILE = 128

#: What the narrower products of a group take of the multiprocessors at most. For 256 rows and 256 columns beside 1024
#: (4 of 132) two of them are hidden; for 256 rows and 2048 columns (32 of 132) cuBLAS fills the device with one, and
#: nothing is gained (one H200).
SHARE = 1 / 8

#: Graphs that a process has for which CUDA leaves the least time between kernels; a fork ends that for all of them
#: (docs/bench.md), and costs 3 % then in place of saving 3 %.
FEW_GRAPHS = 3

#: Streams besides the current one; for each cuBLAS keeps a workspace, of 32 MiB on an H200.
STREAMS = 2


@torch.library.custom_op("bcg_compiler::linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """``F.linear(x, weight, bias)`` for each weight [N, K] and bias [N] or ``None``; x [..., K].

    On CUDA the narrower products are on streams of their own, if there is room for them beside the widest.
    """
    results = _results(x, weights)
    rows = x.flatten(0, -2)
    device = str(x.device)
    columns = [weight.shape[0] for weight in weights]
    widest = columns.index(max(columns))
    narrower = [at for at in range(len(weights)) if at != widest] if fit(len(rows), columns, x.device) else []
    # The user's side streams have positive numbers.
    streams = {at: -1 - turn % STREAMS for turn, at in enumerate(narrower)}
    # All forks come first: a side stream waits for what is on the current one when it is forked.
    for stream in set(streams.values()):
        fork_stream(stream, device)
    for at, (weight, bias, result) in enumerate(zip(weights, biases, results, strict=True)):
        out = result.flatten(0, -2)
        with on_stream(streams[at], device) if at in streams else nullcontext():
            if bias is None:
                torch.mm(rows, weight.t(), out=out)
            else:
                torch.addmm(bias, rows, weight.t(), out=out)
    for stream in set(streams.values()):
        join_stream(stream, device)
    return results


@linears.register_fake
def _results(x: Tensor, weights: list[Tensor], biases: Any = None) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def fit(rows: int | torch.SymInt, columns: Sequence[int], device: torch.device) -> bool:
    """Whether products of so many rows and columns leave room for each other on a device; yes, if rows are open."""
    if device.type != "cuda":
        return False
    if not isinstance(rows, int):
        return True
    tiles = sorted(-(-rows // TILE) * -(-wide // TILE) for wide in columns)
    return sum(tiles[:-1]) <= SHARE * torch.cuda.get_device_properties(device).multi_processor_count


def pays(plan: Plan) -> bool:
    """Whether the program has more than few graphs, in all its buckets."""
    buckets = 1 if plan.padding is None else len(plan.padding.buckets)
    return len(plan.segments) * buckets > FEW_GRAPHS


def products_of_one_input(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> list[list[int]]:
    """Products of a unit that may be side by side, as positions among its nodes: of one input, on CUDA, with nothing
    written between them. Sizes that are known must fit; of others it is seen when they are captured.
    """
    given = {nodes[ordinal] for ordinal in unit.inputs}
    found: list[list[int]] = []
    current: dict[Any, list[int]] = {}
    for at, ordinal in enumerate(unit.nodes):
        node = nodes[ordinal]
        if graph.facts[node].writes:
            current = {}
        if _is_product_of_weights(graph, node, given):
            if node.args[0] not in current:
                found.append(current.setdefault(node.args[0], []))
            current[node.args[0]].append(at)
    return [group for group in found if len(group) > 1 and _may_fit(graph, [nodes[unit.nodes[at]] for at in group])]


def _is_product_of_weights(graph: AnnotatedGraph, node: Node, given: set[Node]) -> bool:
    if node.target is not F.linear or node.kwargs:
        return False
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


def _may_fit(graph: AnnotatedGraph, products: Sequence[Node]) -> bool:
    results = [graph.fakes[node] for node in products]
    rows = math.prod(results[0].shape[:-1])  # numel() would make a constant of a size that is open
    return fit(rows, [result.shape[-1] for result in results], results[0].device)


def side_by_side(module: GraphModule, positions: Sequence[Sequence[int]]) -> GraphModule:
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
