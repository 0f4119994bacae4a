"""Sizes of a plan as numbers: their texts are expressions in the symbols that the graph leaves open."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

#: What torch's printer of sizes calls by name; everything else it writes is Python's own arithmetic.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "ToFloat": float,
    "PowByNatural": pow,
    "Max": max,
    "Min": min,
    "Eq": operator.eq,
    "Ne": operator.ne,
}
_NAME = re.compile(r"[A-Za-z_]\w*")
_CONSTANTS = frozenset({"True", "False", "and", "or", "not"})


def evaluate(text: str, symbols: Mapping[str, int]) -> int:
    """The number that a size is for these values of the symbols; of a condition on sizes 1 or 0.

    Raises ``KeyError`` with the name of a symbol or function that is not known.
    """
    code, names = _compiled(text)
    for name in names:
        if name not in symbols:
            raise KeyError(name)
    return int(eval(code, {**FUNCTIONS, "__builtins__": {}}, {name: symbols[name] for name in names}))


def symbols_in(text: str) -> frozenset[str]:
    """The symbols that a size depends on: the names in it that are no function of torch's printer."""
    return frozenset(_compiled(text)[1])


def substitute(text: str, symbols: Mapping[str, object]) -> str:
    """The size with numbers, or other expressions, in place of symbols."""
    return _NAME.sub(lambda name: f"{symbols.get(name[0], name[0])}", text)


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[CodeType, tuple[str, ...]]:
    found = dict.fromkeys(_NAME.findall(text))
    return compile(text, "<size>", "eval"), tuple(n for n in found if n not in FUNCTIONS and n not in _CONSTANTS)
