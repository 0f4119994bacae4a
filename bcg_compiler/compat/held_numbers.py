"""Numbers of a model that Dynamo has made variable, because it saw another value in an earlier compile.

Two models of one class with other head sizes have other scales. At the second one Dynamo takes the scale for a number
that differs from call to call: it becomes an input, read on the host where it is used, and each use would be a break.
For ``mode="reduce-overhead"`` Dynamo keeps such numbers constant, as graphs freeze them. It does so for one graph, too,
if its backend asks for it. Run on torch 2.11.0, 2.13.0 and 2.14.1.
"""

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import CompileContext
from torch.fx import GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from bcg_compiler.compat.dynamo import is_of_model

#: What was asked for in the compile that is going on: there is one at a time.
_asked: set[str] = set()


def keep_constant(module: GraphModule) -> None:
    """Have Dynamo trace again with the numbers that modules hold as constants, with guards on their values.

    Numbers that the caller gives stay variable, and so do those that have changed often. Raises what Dynamo waits for,
    if there is anything to trace again.
    """
    held = [node for node in module.graph.find_nodes(op="placeholder") if _symbol(node) and is_of_model(node)]
    may_stay_open = _is_often_compiled()
    names = {_symbol(node) for node in held if not (may_stay_open and _is_open(node))}
    if all(map(TensorifyState.should_specialize, names)):
        # Dynamo remembers them, by names that other compiles have too, until one of its own passes asks for more.
        TensorifyState.force_specializations -= _asked
        _asked.clear()
        return
    for name in names:
        TensorifyState.specialize(name)
    _asked.update(names)
    raise TensorifyScalarRestartAnalysis


def _is_often_compiled() -> bool:
    """Whether the function that is traced has used up half of the compiles that Dynamo allows: with numbers that go on
    changing it would then be given up, and run uncompiled for all of its modules.
    """
    compiled = CompileContext.current_compile_id()
    times = getattr(compiled, "frame_compile_id", None) or 0
    return bool(2 * times >= torch._dynamo.config.recompile_limit)


def _is_open(node: Node) -> bool:
    """Whether no operation has asked for the value, such as attention for its scale: there is no guard on it yet."""
    return not getattr(node.meta["example_value"].item_memo.node.expr, "is_number", True)


def _symbol(node: Node) -> str:
    """Dynamo's name for the number that a placeholder is, if it was a Python float; else ""."""
    number = getattr(node.meta.get("example_value"), "item_memo", None)
    expression = getattr(getattr(number, "node", None), "_expr", None)  # what it was before it was found to be fixed
    is_number = getattr(expression, "is_Symbol", False) and symbol_is_type(expression, SymT.FLOAT)
    return str(expression) if is_number else ""
