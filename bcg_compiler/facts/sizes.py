"""Symbols of a graph, by what they stand for: sizes of inputs, Python numbers, values read from data."""

from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.compat.fake import is_data_symbol, symbols_of, tree_leaves


@dataclass(frozen=True)
class Symbols:
    """The size symbols of the graph's tensor inputs; every other backed symbol is a Python number of the caller's.

    A size is fixed for one captured shape. A number may change from call to call while all shapes stay, and a value
    read from data may be anything: what depends on either of them cannot be recorded.
    """

    sizes: frozenset[str]

    @classmethod
    def of_inputs(cls, inputs: list[Any]) -> "Symbols":
        """Symbols in the shapes of the tensors among ``inputs``."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        return cls(frozenset().union(*(symbols_of(t) for t in tensors)))

    def data(self, *values: Any) -> frozenset[str]:
        """Symbols in ``values`` (numbers, tensors' shapes, containers of them) that are read from data."""
        return frozenset(s for s in _symbols(values) if is_data_symbol(s))

    def numbers(self, *values: Any) -> frozenset[str]:
        """Symbols in ``values`` that stand for Python numbers of the caller's."""
        return frozenset(s for s in _symbols(values) if s not in self.sizes and not is_data_symbol(s))


def _symbols(values: Any) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for leaf in tree_leaves(values):
        if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            found |= symbols_of(leaf)
    return found
