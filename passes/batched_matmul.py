"""A batched matmul in any spelling, as ``torch.bmm`` into a buffer."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from bcg_compiler.compat.fake import size_expression, tracing
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.facts.collect import specs_of

_MATMULS = frozenset({"bmm", "matmul", "__matmul__", "einsum"})


class BatchedMatmul(NamedTuple):
    """The operands of the matmul with the orders of dimensions that make them ``[batch, i, k]`` and ``[batch, k, j]``,
    and the order that makes the node's result of ``[batch, i, j]``.
    """

    left: Node
    left_order: tuple[int, ...]
    right: Node
    right_order: tuple[int, ...]
    result_order: tuple[int, ...]


_AS_IT_IS = (0, 1, 2)


def batched_matmul(graph: AnnotatedGraph, node: Node) -> BatchedMatmul | None:
    """How a node is a batched matmul of its two operands; ``None`` if it is none, or one of other strides."""
    name = str(getattr(node.target, "__name__", node.target))
    args = [a for a in node.args if isinstance(a, Node)]
    if (name not in _MATMULS and node.target is not operator.matmul) or len(args) != 2 or node.kwargs:
        return None
    if any(len(facts.specs[0].shape) != 3 for a in args if (facts := graph.producer_facts(a))):
        return None
    if name != "einsum":
        return BatchedMatmul(args[0], _AS_IT_IS, args[1], _AS_IT_IS, _AS_IT_IS)
    found = _of_equation(str(node.args[0]).replace(" ", ""), args)
    return found if found is not None and _has_the_strides(graph, node, found) else None


def write_into_buffer(graph: AnnotatedGraph, node: Node) -> Node:
    """Put ``torch.bmm`` into an empty buffer in place of ``node``, a ``batched_matmul``. Returns the new matmul.

    The new nodes have facts; ordinals are to be renumbered.
    """
    found = batched_matmul(graph, node)
    assert found is not None
    add = _Inserter(graph, node)
    left = add.permuted(found.left, found.left_order)
    right = add.permuted(found.right, found.right_order)
    like = graph.fakes[left]
    sizes = (add.size(left, 0), add.size(left, 1), add.size(right, 2))
    old = graph.facts[node]
    buffer = add(torch.empty, (sizes,), dict(dtype=like.dtype, device=like.device))
    graph.facts[buffer] = replace(
        graph.facts[buffer], results=old.results, fresh=old.fresh, allocates=old.allocates, aten=("aten::empty",)
    )
    # Not run on fakes: that the buffer has the size of the result would be checked, on torch 2.11 by a guard.
    product = add(torch.bmm, (left, right), dict(out=buffer), graph.fakes[buffer])
    graph.facts[product] = replace(
        graph.facts[product],
        aten=("aten::bmm.out",),
        kernels=1,
        reads=old.reads | old.results,
        writes=old.writes | old.results,
        results=old.results,
    )
    # Of the buffer, not of the product: views of it are then fixed, and made once at capture.
    node.replace_all_uses_with(add.permuted(buffer, found.result_order))
    graph.module.graph.erase_node(node)
    del graph.facts[node], graph.fakes[node]
    return product


def _of_equation(equation: str, args: list[Node]) -> BatchedMatmul | None:
    given, _, wanted = equation.partition("->")
    left, _, right = given.partition(",")
    if not all(len(set(part)) == len(part) == 3 and part.isalpha() for part in (left, right, wanted)):
        return None
    batch, summed = set(left) & set(right) & set(wanted), (set(left) & set(right)) - set(wanted)
    rows, columns = set(left) - set(right), set(right) - set(left)
    if not all(len(part) == 1 for part in (batch, summed, rows, columns)):
        return None
    (b,), (k,), (i,), (j,) = batch, summed, rows, columns
    return BatchedMatmul(
        args[0],
        tuple(map(left.index, (b, i, k))),
        args[1],
        tuple(map(right.index, (b, k, j))),
        tuple((b, i, j).index(letter) for letter in wanted),
    )


def _has_the_strides(graph: AnnotatedGraph, node: Node, found: BatchedMatmul) -> bool:
    """Whether the node gives the layout that the matmul would: what reads it may look at that."""
    with tracing(graph.fake_mode), torch.inference_mode():
        left = graph.fakes[found.left].permute(found.left_order)
        result = torch.bmm(left, graph.fakes[found.right].permute(found.right_order)).permute(found.result_order)
    return specs_of(result) == graph.facts[node].specs


class _Inserter:
    """Adds nodes in front of another one, with its place and mode, their value on fakes and plain facts."""

    def __init__(self, graph: AnnotatedGraph, before: Node) -> None:
        self._graph = graph
        self._before = before
        # Below all that there is, until the graph is renumbered.
        self._ordinal = min(facts.ordinal for facts in graph.facts.values()) - len(graph.facts) - 1

    def __call__(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None
    ) -> Node:
        """Add a call, which is run on fakes if its ``value`` is not given."""
        return self._add("call_function", target, args, kwargs, value)

    def permuted(self, node: Node, order: tuple[int, ...]) -> Node:
        return node if order == _AS_IT_IS else self._add("call_method", "permute", (node, order), {})

    def size(self, node: Node, dim: int) -> int | Node:
        size = self._graph.fakes[node].shape[dim]
        return size if isinstance(size, int) else self._add("call_method", "size", (node, dim), {})

    def _add(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None) -> Node:
        graph = self._graph
        with graph.module.graph.inserting_before(self._before):
            node = graph.module.graph.create_node(op, target, args, kwargs)
        node.meta = {k: v for k, v in self._before.meta.items() if k in ("nn_module_stack", "stack_trace")}
        if value is None:
            given, named = torch.fx.node.map_arg((args, kwargs), graph.fakes.__getitem__)
            with tracing(graph.fake_mode), torch.inference_mode():
                value = getattr(given[0], target)(*given[1:]) if op == "call_method" else target(*given, **named)
        graph.fakes[node] = value
        taken = self._roots(node.all_input_nodes)
        self._ordinal += 1
        while any(facts.ordinal == self._ordinal for facts in graph.facts.values()):
            self._ordinal += 1
        old = graph.facts[self._before]
        is_size = isinstance(value, torch.SymInt)
        graph.facts[node] = NodeFacts(
            ordinal=self._ordinal,
            op=f".{target}" if op == "call_method" else target.__name__,
            module=old.module,
            modules=old.modules,
            source=old.source,
            aten=("aten::sym_size.int",) if is_size else ("aten::permute.default",),
            reads=taken,
            results=frozenset() if is_size else taken,
            specs=specs_of(value),
            size=str(size_expression(value)) if is_size else "",
            mode=old.mode,
            group=self._ordinal,
        )
        return node

    def _roots(self, nodes: Sequence[Node]) -> frozenset[int]:
        known = (self._graph.producer_facts(n) for n in nodes)
        return frozenset().union(*(f.results for f in known if f is not None))
