"""What is known of a value about rows: which of its entries padding can reach.

Note [What is proven about rows]
    A graph is compiled for any number of rows (``S``, a symbol in the shapes of its inputs). To run ``n`` rows in a
    bucket of ``B`` rows is to run it with ``S = B`` on inputs whose first ``n`` rows are live. An axis *grows* if its
    size depends on ``S``; its *live part* is its first ``live(n)`` entries.

    A value is *right* if its entries in the live parts of all its growing axes are those of a run with ``S = n``,
    whatever the padded rows hold. Each operation has a rule that keeps this up, or names the reason why it cannot
    (``rules.py``): an operation that works row by row keeps it; one that adds up over rows does not, unless the padded
    entries are known to add nothing. For that a value may also be known to hold one constant beyond the live part of an
    axis (``beyond``): a mask made by comparing positions is False there, attention scores under it are -inf, their
    softmax is 0. That 0 times a padded row is 0 only for finite rows, hence ``causal`` where it is used.

    What no rule is known for counts as mixing.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import sympy

#: A size: a number, or an expression in the symbols of the graph.
Size = Any


@dataclass(frozen=True)
class Axis:
    """``size`` entries, of which the first ``live`` are right; ``None`` if all are, as the axis does not grow."""

    size: Size
    live: Size | None = None


#: One dimension: the axes that it runs through, outermost first. None for a dimension of size 1, several for one that a
#: reshape has merged.
Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class Rows:
    """What is known of a right value.

    ``dims``      its dimensions
    ``beyond``    dimension → the constant that it holds beyond the live part, as long as all other axes are live
    ``constant``  what every entry is, if known
    ``iota``      (dimension, offset): each entry is its index in that dimension plus the offset
    ``window``    it is a view that ends before the memory behind it does, at a number of rows: a write through it ends
                  elsewhere in a bucket
    ``causal``    that it is right was shown with padded rows that are finite
    """

    dims: tuple[Dim, ...]
    beyond: dict[int, float] = field(default_factory=dict)
    constant: float | None = None
    iota: tuple[int, Size] | None = None
    window: bool = False
    causal: bool = False

    def plain(self) -> "Rows":
        """The same with nothing known but that it is right."""
        return Rows(self.dims, causal=self.causal)

    def with_dims(self, dims: tuple[Dim, ...]) -> "Rows":
        """A right value of other dimensions."""
        return Rows(dims, constant=self.constant, window=self.window, causal=self.causal)


@dataclass(frozen=True)
class Mixed:
    """A value whose live entries padding may reach: since which node, and why."""

    ordinal: int
    text: str


class MixesError(Exception):
    """Raised by a rule: the operation lets padding reach live entries, or nothing is known of it."""


class Sizes:
    """Arithmetic on sizes, with one symbol that stands for the number of rows."""

    def __init__(self, symbol: str) -> None:
        self.symbol = symbol
        self.least = 1
        self.bounds: list[str] = []

    def at_most(self, size: Size, bound: Size) -> None:
        """A number of padded rows above the bound is an error: note it, as a condition on buckets."""
        if self.grows(size):
            self.bounds.append(f"{sympy.sympify(size)} <= {bound}")

    def need(self, live: Size, count: int) -> None:
        """What follows holds only if at least ``count`` entries are live: note how many rows that takes."""
        (symbol,) = (s for s in live.free_symbols if str(s) == self.symbol)
        slope, rest = live.coeff(symbol, 1), live.coeff(symbol, 0)
        if not (slope.is_Integer and rest.is_Integer):
            raise MixesError(f"it needs at least {count} of {live} entries")
        self.least = max(self.least, -((int(rest) - count) // int(slope)))

    def grows(self, size: Size) -> bool:
        """Whether the size depends on the number of rows."""
        return isinstance(size, sympy.Basic) and any(str(s) == self.symbol for s in size.free_symbols)

    def axis(self, size: Size) -> Dim:
        """A dimension of that size whose entries are all right. Raises ``MixesError`` for one that grows oddly."""
        if size == 1:
            return ()
        if not self.grows(size):
            return (Axis(size),)
        (symbol,) = (s for s in size.free_symbols if str(s) == self.symbol)
        if not size.is_polynomial(symbol) or sympy.degree(size, symbol) != 1 or not size.diff(symbol).is_positive:
            raise MixesError(f"a size, {size}, does not grow row by row")
        return (Axis(size, size),)


def difference(one: Size, other: Size) -> int | None:
    """``one - other``, if that is the same for every number of rows."""
    found = sympy.expand(sympy.sympify(one) - sympy.sympify(other))
    return int(found) if found.is_number else None


def same(one: Size, other: Size) -> bool:
    """Whether two sizes are equal for every number of rows."""
    return one is other or difference(one, other) == 0


def smaller(one: Size | None, other: Size | None) -> Size | None:
    """The smaller of two live parts. Raises ``MixesError`` where that depends on the number of rows."""
    if one is None or other is None:
        return one if other is None else other
    gap = difference(one, other)
    if gap is None:
        raise MixesError(f"its arguments have {one} and {other} rows")
    return one if gap <= 0 else other


def size_of(dim: Dim) -> Size:
    """The number of entries of a dimension."""
    size: Size = 1
    for axis in dim:
        size = size * axis.size
    return size


def grows(dim: Dim) -> bool:
    """Whether the dimension has an axis that grows."""
    return any(axis.live is not None for axis in dim)


def is_settled(value: Rows) -> bool:
    """Whether all entries along each growing axis are live: then the first rows are what a caller gets."""
    return all(axis.live is None or same(axis.live, axis.size) for dim in value.dims for axis in dim)


def leads(value: Rows) -> bool:
    """Whether what is live comes first in each dimension: not so where rows are repeated within a merged one."""
    return not any(axis.live is not None for dim in value.dims for axis in dim[1:])


def reshape(value: Rows, sizes: list[Size]) -> Rows:
    """The dimensions that a reshape gives: axes are merged, and axes that do not grow may be split.

    Raises ``MixesError`` where it would cut through rows.
    """
    axes = [(axis, place if len(dim) == 1 else None) for place, dim in enumerate(value.dims) for axis in dim]
    found: list[Dim] = []
    moved: dict[int, int] = {}  # dimensions that are made of one axis, before and after
    for size in sizes:
        dim: list[Axis] = []
        have: Size = 1
        while not same(have, size):
            if not axes:
                raise MixesError("a reshape cuts through rows")
            axis, place = axes.pop(0)
            if axis.live is None and isinstance(axis.size, (int, sympy.Integer)):
                rest = sympy.simplify(sympy.sympify(size) / have)
                if rest.is_Integer and int(rest) < int(axis.size) and int(axis.size) % int(rest) == 0:
                    axes.insert(0, (Axis(int(axis.size) // int(rest)), None))
                    axis, place = Axis(int(rest)), None
            if place is not None:
                moved[place] = len(found)
            dim.append(axis)
            have = have * axis.size
        if len(dim) > 1:
            moved = {old: new for old, new in moved.items() if new != len(found)}
        found.append(tuple(dim))
    if axes:
        raise MixesError("a reshape cuts through rows")
    beyond = {moved[i]: constant for i, constant in value.beyond.items() if i in moved}
    iota = (moved[value.iota[0]], value.iota[1]) if value.iota and value.iota[0] in moved else None
    return replace(value, dims=tuple(found), beyond=beyond, iota=iota)


def permute(value: Rows, order: list[int]) -> Rows:
    """The dimensions in another order: ``order[i]`` is the old place of dimension ``i``."""
    place = {old: new for new, old in enumerate(order)}
    return replace(
        value,
        dims=tuple(value.dims[i] for i in order),
        beyond={place[i]: constant for i, constant in value.beyond.items() if i in place},
        iota=(place[value.iota[0]], value.iota[1]) if value.iota and value.iota[0] in place else None,
    )
