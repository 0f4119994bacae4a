"""Numbers of a model that Dynamo has made variable, because it saw another value in an earlier compile.

Two models of one class with other head sizes have other scales. At the second one Dynamo takes the scale for a number
that differs from call to call: it becomes an input, read on the host where it is used, and each use would be a break.
For ``mode="reduce-overhead"`` Dynamo keeps such numbers constant, as graphs freeze them. It does so for one graph, too,
if its backend asks for it. Run on torch 2.11.0, 2.13.0 and 2.14.1.
"""

from torch import nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.fx import GraphModule, Node
from torch.utils._sympy.symbol import SymT, symbol_is_type

from bcg_compiler.compat.dynamo import is_held, owner_of


def keep_constant(module: GraphModule) -> None:
    """Have Dynamo trace again with the numbers that modules hold as constants, with guards on their values.

    Numbers that the caller gives stay variable. Raises what Dynamo waits for, if there is anything to trace again.
    """
    held = [node for node in module.graph.find_nodes(op="placeholder") if _symbol(node) and _is_of_model(node)]
    names = {_symbol(node) for node in held}
    if all(map(TensorifyState.should_specialize, names)):
        return
    for name in names:
        TensorifyState.specialize(name)
    raise TensorifyScalarRestartAnalysis


def _is_of_model(node: Node) -> bool:
    return issubclass(owner_of(node) or object, nn.Module) or is_held(node)


def _symbol(node: Node) -> str:
    """Dynamo's name for the number that a placeholder is, if it was a Python float; else ""."""
    number = getattr(node.meta.get("example_value"), "item_memo", None)
    expression = getattr(getattr(number, "node", None), "_expr", None)  # what it was before it was found to be fixed
    is_number = getattr(expression, "is_Symbol", False) and symbol_is_type(expression, SymT.FLOAT)
    return str(expression) if is_number else ""
