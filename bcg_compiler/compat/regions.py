"""Nested compile regions (``torch.compiler.nested_compile_region``), which Dynamo gives as graphs within the graph.

A region is traced once for all modules alike, which is what its user wants of it. To cut a graph at its breaks, and to
prove anything of its rows, one has to see the operations: each call is replaced by those of the region. What equal
layers have in common is found again from the graph (plan/units.py). Run on torch 2.11.0, 2.13.0 and 2.14.1.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

_Stack = Mapping[str, tuple[str, Any]]


def inline_regions(module: GraphModule) -> None:
    """Put the operations of each region where it is called, regions within regions included.

    They keep the user's lines, and get the path of the module that is called: a region was traced for the first one.
    """
    traced_for: dict[GraphModule, _Stack] = {}
    while calls := module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        for call in calls:
            region = getattr(module, call.args[0].target)
            first = traced_for.setdefault(region, call.meta.get("nn_module_stack") or {})
            _inline(module, call, region, first)
        for held in module.graph.find_nodes(op="get_attr"):
            if not held.users:
                module.graph.erase_node(held)
        module.delete_all_unused_submodules()
        module.recompile()


def _inline(module: GraphModule, call: Node, region: GraphModule, first: _Stack) -> None:
    _, _, *operands = call.args  # the region, its name, and what it takes
    copies: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with module.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                copies[node] = module.graph.get_attr(_held(module, region, node.target))
            elif _is_number(node, copies):
                copies[node] = copies[node.args[0]]
                continue
            else:
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = _meta(node, first, call.meta.get("nn_module_stack") or {})
    (results,) = region.graph.output_node().args
    given: Any = map_arg(results, copies.__getitem__)
    for item in list(call.users):
        item.replace_all_uses_with(given[item.args[1]])
        module.graph.erase_node(item)
    module.graph.erase_node(call)


def _is_number(node: Node, copies: Mapping[Node, Any]) -> bool:
    """Whether a node reads a number that Dynamo has found to be a constant since it traced the region."""
    taken = node.args[0] if node.op == "call_method" and node.target == "item" else None
    return isinstance(taken, Node) and not isinstance(copies[taken], Node)


def _held(module: GraphModule, region: GraphModule, name: str) -> str:
    """The name under which the outer module holds what the region holds as ``name``."""
    value = getattr(region, name)
    for known, child in module.named_children():
        if child is value:
            return known
    number = 0
    while hasattr(module, new := f"{name}_of_region_{number}"):
        number += 1
    setattr(module, new, value)
    return new


def _meta(node: Node, first: _Stack, here: _Stack) -> dict[str, Any]:
    """What is known of a node of a region, for the call in ``here``: the region was traced in ``first``."""
    inner: _Stack = node.meta.get("nn_module_stack") or {}
    if not (first and here and inner):
        return dict(node.meta)
    was, now = list(first.values())[-1][0], list(here.values())[-1][0]
    within = {key: (now + path.removeprefix(was), cls) for key, (path, cls) in inner.items() if path.startswith(was)}
    around = {key: value for key, value in here.items() if not value[0].startswith(now)}
    return {**node.meta, "nn_module_stack": {**around, **within}}
