"""Sizes of a plan as numbers: their texts are expressions in the symbols that the graph leaves open."""

import operator
import re
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType

#: What torch's printer of sizes calls by name; everything else it writes is Python's own arithmetic.
_FUNCTIONS = {
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Max": max,
    "Min": min,
    "Eq": operator.eq,
    "Ne": operator.ne,
    "__builtins__": {},
}
_NAME = re.compile(r"[A-Za-z_]\w*")


def evaluate(text: str, symbols: Mapping[str, int]) -> int:
    """The number that a size, or a condition on sizes, is for these values of the symbols.

    Raises ``KeyError`` with the name of a symbol or function that is not known.
    """
    code, names = _compiled(text)
    missing = [name for name in names if name not in symbols]
    if missing:
        raise KeyError(missing[0])
    return int(eval(code, _FUNCTIONS, {name: symbols[name] for name in names}))


def symbols_in(text: str) -> frozenset[str]:
    """The names in a size that are no function of torch's printer: the symbols it depends on."""
    return frozenset(_compiled(text)[1])


@lru_cache(maxsize=4096)
def _compiled(text: str) -> tuple[CodeType, tuple[str, ...]]:
    names = tuple(name for name in dict.fromkeys(_NAME.findall(text)) if name not in _FUNCTIONS)
    return compile(text, "<size>", "eval"), tuple(n for n in names if n not in ("and", "or", "not"))
