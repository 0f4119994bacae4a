"""Sizes that follow from a symbol which no input of a graph is (run with torch 2.11, 2.13 and 2.14).

A unit behind a break may take a tensor of 2 * s0 rows, and nothing of s0 rows. Inductor's code begins by giving each
symbol its value, and finds it only where it is a size itself, as Dynamo hands over a number for each. So the graph gets
one more input for it, and a call works its value out: half the rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import GraphModule


class Solved(NamedTuple):
    """A symbol is (``args[at].shape[dim]`` - ``plus``) // ``times``."""

    at: int
    dim: int
    times: int
    plus: int

    def of(self, args: Sequence[Any]) -> Any:
        """The value for these arguments."""
        return (args[self.at].shape[self.dim] - self.plus) // self.times


def unbound_sizes(fakes: Sequence[Any]) -> list[Solved]:
    """The symbols that sizes of ``fakes`` depend on, and that are none of them; only those that can be worked out."""
    parts = [part for fake in fakes for part in _sizes(fake)]
    bound = {_expression(part) for part in parts}
    found: dict[sympy.Symbol, Solved] = {}
    for at, fake in enumerate(fakes):
        for dim, size in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
            expression = _expression(size)
            symbols = expression.free_symbols - bound - found.keys()
            if len(symbols) != 1 or len(expression.free_symbols) != 1:
                continue
            (symbol,) = symbols
            times, plus = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
            if expression == times * symbol + plus and times.is_Integer and plus.is_Integer:
                found[symbol] = Solved(at, dim, int(times), int(plus))
    return list(found.values())


def with_inputs_for(module: GraphModule, numbers: Sequence[Any]) -> GraphModule:
    """The same graph, which takes one more input like each of ``numbers`` before its own."""
    made = GraphModule(module, torch.fx.Graph())
    for i, number in enumerate(numbers):
        made.graph.placeholder(f"size{i}").meta["example_value"] = number
    made.graph.output(made.graph.graph_copy(module.graph, {}))
    made.recompile()
    return made


def giving_them(run: Callable[..., Any], sizes: Sequence[Solved]) -> Callable[..., Any]:
    """What takes the inputs of the graph, and hands the sizes to ``run`` as well."""
    return lambda *args: run(*[size.of(args) for size in sizes], *args)


def _sizes(fake: Any) -> Sequence[Any]:
    return (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,)


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else sympy.Integer(0)
