"""Products of one input as one launch: small ones do not fill a GPU, and each takes its latency, whatever it computes.

The projections to queries, keys and values are three products of a few hundred rows, of which two are narrow. cuBLAS
launches them one behind the other. Where all of their tiles are computed at once, one kernel takes as long as the
longest of them. A compiler of segments is given one operation for all of them.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.plan import CompileUnit

#: The kernel takes so many products.
MOST = 4

#: What it multiplies, adding up in float32 as cuBLAS does. (How float32 itself is multiplied is the user's choice.)
DTYPES = (torch.bfloat16, torch.float16)

#: A row of so many elements, or of a multiple, is read 16 bytes at a time.
ALIGNED = 16


class Tile(NamedTuple):
    """What one program of the kernel computes of a result, ``depth`` elements of the sums at a time, of which so many
    ``stages`` are under way.
    """

    rows: int
    columns: int
    depth: int
    stages: int

    def programs(self, rows: int, columns: Sequence[int]) -> int:
        """How many make results of ``rows`` and these ``columns``."""
        return -(-rows // self.rows) * sum(-(-wide // self.columns) for wide in columns)

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a program needs."""
        return 2 * (self.rows + self.columns) * self.depth * self.stages


#: From the smallest on: the first whose tiles are all computed at once was the fastest of ten, or nearly, in 49 groups
#: of 2 to 4 products, 16 to 2048 rows and 1024 to 4096 deep; where no tile is, cuBLAS was (one H200).
TILES = (Tile(16, 32, 128, 4), Tile(64, 32, 128, 4), Tile(64, 64, 128, 4), Tile(64, 128, 64, 4), Tile(128, 128, 64, 4))


class _Limits(NamedTuple):
    """How many programs a GPU runs at once, and the shared memory that one may have, in bytes."""

    programs: int
    shared_bytes: int


@cache
def _limits(device: torch.device) -> _Limits | None:
    """Those of a device; ``None`` for a CPU, for a GPU that does not multiply bfloat16 (before 8.0), without Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    seen: Any = torch.cuda.get_device_properties(device)
    return _Limits(seen.multi_processor_count, seen.shared_memory_per_block_optin) if seen.major >= 8 else None


class Launch(NamedTuple):
    """Products that are one launch, by position."""

    products: tuple[int, ...]
    tile: Tile


def launches(rows: int, columns: Sequence[int], device: torch.device) -> list[Launch]:
    """Which products of so many rows and columns are launched together: the narrowest, and those that are not in any
    launch are too wide to gain by it.
    """
    limits = _limits(device)
    found: list[Launch] = []
    left = sorted(range(len(columns)), key=columns.__getitem__)
    while limits is not None and len(left) > 1:
        fitting = (
            Launch(tuple(left[:count]), tile)
            for count in range(min(MOST, len(left)), 1, -1)
            for tile in TILES
            if tile.programs(rows, [columns[at] for at in left[:count]]) <= limits.programs
            and tile.shared_bytes <= limits.shared_bytes
        )
        launch = next(fitting, None)
        if launch is None:
            break
        found.append(launch)
        del left[: len(launch.products)]
    return found


@torch.library.custom_op("bcg_compiler::linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """``F.linear(x, weight, bias)`` for each weight [N, K] and bias [N] or ``None``; x [..., K].

    On CUDA, small ones are launched together.
    """
    results = _results(x, weights)
    rows = x.flatten(0, -2)
    outs = [result.flatten(0, -2) for result in results]
    alone = set(range(len(weights)))
    if _are_read_fast(rows, weights):
        for launch in launches(len(rows), [len(weight) for weight in weights], rows.device):
            _launch(launch, rows, weights, biases, outs)
            alone -= set(launch.products)
    for at in sorted(alone):
        if (bias := biases[at]) is None:
            torch.mm(rows, weights[at].t(), out=outs[at])
        else:
            torch.addmm(bias, rows, weights[at].t(), out=outs[at])
    return results


@linears.register_fake
def _results(x: Tensor, weights: list[Tensor], biases: Any = None) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _are_read_fast(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel is any good for these: there are elements, and their rows are aligned."""
    aligned = (of.stride(1) == 1 and of.stride(0) % ALIGNED == of.shape[1] % ALIGNED == 0 for of in (rows, *weights))
    return rows.dtype in DTYPES and rows.numel() > 0 and all(aligned)


def _launch(
    launch: Launch,
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
) -> None:
    from bcg_compiler.lower.products_kernel import products

    tile = launch.tile
    biased = any(biases[at] is not None for at in launch.products)
    columns = [len(weights[at]) for at in launch.products]
    given = []
    for at in launch.products:
        weight, bias = weights[at], biases[at]
        added = weight.new_zeros(len(weight)) if biased and bias is None else bias
        given.append((weight, weight if added is None else added, outs[at], len(weight), weight.stride(0)))
    given += given[-1:] * (MOST - len(given))
    with torch.cuda.device(rows.device):
        products[(tile.programs(len(rows), columns),)](
            rows,
            *chain(*zip(*given, strict=True)),
            *rows.shape,
            rows.stride(0),
            COUNT=len(columns),
            BIASED=biased,
            WHOLE=rows.shape[1] % tile.depth == 0,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=4,
            num_stages=tile.stages,
        )


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
            group.written.update(facts.writes, facts.reshapes)
    return [small for group in found for small in _small_ones(graph, unit, nodes, group.positions)]


class _Group(NamedTuple):
    """Products of one input, as positions, and the roots that have been written since the first of them."""

    positions: list[int]
    written: set[int]


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


def _small_ones(
    graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node], positions: Sequence[int]
) -> list[list[int]]:
    """Those of one input that are launched together; if rows are open, those that are if there is one row."""
    results = [graph.fakes[nodes[unit.nodes[at]]] for at in positions]
    columns = [result.shape[-1] for result in results]
    if results[0].dtype not in DTYPES or not all(isinstance(wide, int) for wide in columns):
        return []
    rows = math.prod(results[0].shape[:-1])  # numel() would make a constant of a size that is open
    found = launches(rows if isinstance(rows, int) else 1, columns, results[0].device)
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
