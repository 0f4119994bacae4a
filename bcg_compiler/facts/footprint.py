"""From the operations that a node dispatches to what they mean: kernels, syncs, effects, reasons against capture."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat.fake import is_plain, is_traceable_wrapper_subclass, tree_leaves
from bcg_compiler.compat.recorder import Recorded
from bcg_compiler.facts import known_ops
from bcg_compiler.facts.node import Reason
from bcg_compiler.facts.sizes import Symbols


def op_name(op: Any) -> str:
    """``aten::mm`` for an overload or a packet, the plain name for a higher-order operation."""
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return op.name() if callable(getattr(op, "name", None)) else str(getattr(op, "__name__", op))


def node_name(node: Node) -> str:
    """The stable name of what a node calls: never a local variable, never an address."""
    target = node.target
    if node.op == "call_method":
        return f".{target}"
    if node.op in ("call_module", "get_attr"):
        return node.op
    if isinstance(target, BoundBreak):
        return target.spec.name
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    if isinstance(target, (torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return op_name(target)
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__name__
    if module.partition(".")[0] in ("torch", "operator", "_operator", "builtins", "math", "") or "built-in" in name:
        return str(getattr(target, "__name__", name))
    return f"{module}.{name}"


def kernel_count(node: Node, calls: Sequence[Recorded]) -> int:
    """How many kernels a node launches on a device, the same number on every machine."""
    kernels = sum(_launches(call) for call in calls)
    if _last_name(node) in known_ops.CHOSEN_AT_RUN_TIME:
        return min(kernels, 1)
    return kernels


def is_random(call: Recorded) -> bool:
    """Whether the operation draws from a generator. Attention with dropout 0 draws nothing."""
    if not isinstance(call.op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in call.op.tags:
        return False
    for position, argument in enumerate(call.op._schema.arguments):
        if argument.name == "dropout_p":
            given = call.args[position] if position < len(call.args) else argument.default_value
            return given != 0
    return True


def is_inplace_view(call: Recorded) -> bool:
    """Whether the operation changes shape or strides of its argument and no data, like ``unsqueeze_``."""
    return isinstance(call.op, torch._ops.OpOverload) and torch.Tag.inplace_view in call.op.tags and writes_data(call)


def writes_data(call: Recorded) -> bool:
    """Whether a reader could see what it writes; the shape that ``unsqueeze_`` changes counts."""
    return op_name(call.op) != "aten::detach_"


def foreign_op(call: Recorded) -> str | None:
    """The name of a custom operation, whose body is not seen; ``None`` for one of torch's own."""
    if not isinstance(call.op, torch._ops.OpOverload):
        return None
    name = op_name(call.op)
    return None if name.partition("::")[0] in known_ops.CAPTURABLE_NAMESPACES else name


def opaque_function(node: Node) -> str | None:
    """The name of a Python function that Dynamo left in the graph unseen (``allow_in_graph``), or ``None``."""
    target = node.target
    if node.op != "call_function" or isinstance(
        target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
    ):
        return None
    package = (getattr(target, "__module__", None) or "builtins").partition(".")[0]
    return None if package in known_ops.PURE_PACKAGES else node_name(node)


def reasons_against_capture(
    node: Node,
    calls: Sequence[Recorded],
    given: Any,
    result: Any,
    symbols: Symbols,
    device: str,
    declared: frozenset[str],
) -> tuple[Reason, ...]:
    """Every reason why no graph may hold the node, by the codes of ``docs/reasons.md``, the most telling one first.

    ``given`` and ``result`` are its fake arguments and result; ``declared`` the names the user declared capturable.
    """
    found: list[Reason] = []

    def add(code: str, text: str) -> None:
        if not any(reason.code == code for reason in found):
            found.append(Reason(code, text))

    # Dynamo hands a Python number over in a tensor on the CPU, and reads it from there: nothing waits for that.
    if not (isinstance(result, torch.SymFloat) and symbols.numbers(result)):
        if node.op == "call_method" and node.target in known_ops.HOST_METHODS:
            add("host_sync", f".{node.target}() brings a value to the host")
        for call in calls:
            name = op_name(call.op)
            why = _synchronises(call, name)
            if why and name not in declared:
                add("host_sync", f"{name} {why}")
    if symbols.data(_only_tensors(given)):
        add("dynamic_output", "the size of an argument depends on data")
    elif symbols.data(_only_tensors(result)) - symbols.data(given):
        add("dynamic_output", "the size of its result depends on data")
    if symbols.data([leaf for leaf in tree_leaves(given) if not isinstance(leaf, torch.Tensor)]):
        add("host_number", "a number was read from data: a recording would freeze it")
    if symbols.numbers(given, result):
        add("host_number", "a Python number changes between calls: a recording would freeze it")
    scalars = _python_scalars(calls, result)
    for call in calls:
        name, namespace = op_name(call.op), op_name(call.op).partition("::")[0]
        # A mask's scalar is copied to the device; elsewhere a Python scalar is an argument of the kernel.
        exempt = frozenset() if name.startswith("aten::index_put") else scalars
        if device != "cpu" and any(_on_cpu(t) and id(t) not in exempt for t in (*call.reads, *call.results)):
            add("cpu_compute", f"{name} works on a CPU tensor")
        if name in declared:
            continue
        if isinstance(call.op, torch._ops.OpOverload) and torch.Tag.cudagraph_unsafe in call.op.tags:
            add("unsafe_tag", f"{name} carries the tag cudagraph_unsafe")
        if namespace in known_ops.COLLECTIVE_NAMESPACES:
            add("collective", f"{name} is a collective")
        elif foreign_op(call):
            add("unknown_op", _how_to_declare(f"{name} is a custom op", name))
        if any(is_traceable_wrapper_subclass(leaf) for leaf in _only_tensors((call.reads, call.results))):
            add("unknown_op", f"{name} works on a tensor subclass, whose operations are not seen")
        if name.startswith(known_ops.QUANTISED) or not all(map(is_plain, _only_tensors((call.reads, call.results)))):
            add("unknown_op", f"{name} works on a tensor that is not a plain one: sparse, quantized or the like")
    from_host = _last_name(node) in ("tensor", "as_tensor", "new_tensor")
    if device != "cpu" and from_host and not any(_on_cpu(t) for t in _only_tensors(result)):
        add("cpu_compute", "it copies a tensor made on the host to the device")
    if holds_break(given):
        add("eager_break", "a break function is called inside of it")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        name = op_name(node.target)
        if name not in known_ops.WRAPPERS | known_ops.CAPTURABLE_HIGHER_ORDER | declared:
            add("control_flow", f"{name} is a higher-order op: the host may have to choose what runs")
    function = opaque_function(node)
    if function and not isinstance(node.target, BoundBreak) and function not in declared:
        add("unknown_op", _how_to_declare(f"{function} is a Python function whose body is not seen", function))
    return tuple(found)


def holds_break(given: Any) -> bool:
    """Whether a graph among the arguments of a higher-order operation calls a break function."""
    graphs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, GraphModule)]
    inner = (m for graph in graphs for m in graph.modules() if isinstance(m, GraphModule))
    return any(isinstance(node.target, BoundBreak) for m in inner for node in m.graph.nodes)


def graph_operand(args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]] | None:
    """The graph that a wrapping higher-order operation runs, and the operands it runs it on."""
    graphs = [arg for arg in args if isinstance(arg, GraphModule)]
    if len(graphs) != 1:
        return None
    wanted = len(graphs[0].graph.find_nodes(op="placeholder"))
    operands = [arg for arg in args if arg is not graphs[0]]
    return graphs[0].forward, operands[len(operands) - wanted :]


def _python_scalars(calls: Sequence[Recorded], result: Any) -> frozenset[int]:
    """Ids of the 0-dim CPU tensors that torch makes of a Python constant on the way (``x[0] = 3``): kernel arguments,
    not CPU work. One that is the node's own result (``torch.tensor(3)``) is.
    """
    made = {id(t) for c in calls if op_name(c.op) == "aten::lift_fresh" for t in (*c.reads, *c.results) if t.dim() == 0}
    return frozenset(made - {id(t) for t in _only_tensors(result)})


def _launches(call: Recorded) -> bool:
    if not isinstance(call.op, torch._ops.OpOverload):
        return True  # a higher-order operation that was not taken apart runs something
    return not call.op.is_view and op_name(call.op) not in known_ops.NO_KERNEL


def _synchronises(call: Recorded, name: str) -> str | None:
    if name in known_ops.SYNCHRONISING:
        return known_ops.SYNCHRONISING[name]
    if not isinstance(call.op, torch._ops.OpOverload):
        return None
    if torch.Tag.data_dependent_output in call.op.tags:
        return "reads a value on the host"
    if name in ("aten::_to_copy", "aten::copy_"):
        # copy_(self, src): the destination is both an argument and the result.
        from_device = bool(call.reads) and call.reads[-1].device.type != "cpu"
        if from_device and any(_on_cpu(leaf) for leaf in call.results):
            return "copies from the device to the host"
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        indices = [i for i in call.args[1] if isinstance(i, torch.Tensor)]
        masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
        accumulate = len(call.args) > 3 and call.args[3]
        # One mask and one value is a masked fill; everything else finds the mask's indices first.
        if masks and (accumulate or call.args[2].numel() != 1 or len(indices) != len(masks)):
            return "counts the elements of a boolean mask on the host"
    return None


def _last_name(node: Node) -> str:
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op_name(node.target).partition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def _on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _only_tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _how_to_declare(what: str, name: str) -> str:
    return (
        f"{what}: if it neither synchronises nor reads sizes or state on the host, "
        f'declare it with options={{"capturable": ["{name}"]}}'
    )
