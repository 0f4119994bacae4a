"""For each ATen operation: what it makes of values whose live rows are right. See Note [What is proven about rows]."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bcg_compiler.compat.fake import size_expression, tree_leaves
from bcg_compiler.facts.rows import (
    Axis,
    Dim,
    MixesError,
    Rows,
    Size,
    Sizes,
    difference,
    grows,
    permute,
    reshape,
    same,
    size_of,
    smaller,
)

Known = Callable[[torch.Tensor], Rows]
Rule = Callable[["Operation"], "Rows | tuple[Rows, ...]"]


@dataclass(frozen=True)
class Operation:
    """One recorded operation: its arguments by the names of its schema, its results, what is known of any tensor."""

    name: str
    given: dict[str, Any]
    results: Sequence[torch.Tensor]
    known: Known
    sizes: Sizes
    not_finite: Callable[[torch.Tensor], str] = lambda tensor: ""

    def rows(self, name: str) -> Rows:
        """What is known of a tensor argument."""
        return self.known(self.given[name])

    def all_rows(self) -> list[Rows]:
        """What is known of all tensor arguments."""
        return [self.known(t) for t in tree_leaves(list(self.given.values())) if isinstance(t, torch.Tensor)]

    def must_be_finite(self, *names: str) -> None:
        """Padded rows of these arguments are multiplied by 0. Raises ``MixesError`` if they may not be finite."""
        for value in (self.given[name] for name in names):
            if why := self.not_finite(value):
                raise MixesError(f"padded rows that may not be finite ({why}) are multiplied by 0")

    def dim(self, name: str, of: Rows, default: int | None = None) -> int:
        """A dimension, counted from the front."""
        found = self.given.get(name)
        found = default if found is None else found
        return int(found or 0) % max(len(of.dims), 1)

    def dims_of_result(self, position: int = 0) -> tuple[Dim, ...]:
        """The dimensions of a result by its shape alone, all of whose entries are right."""
        return tuple(self.sizes.axis(size) for size in self.shape(position))

    def shape(self, position: int = 0) -> list[Size]:
        """The sizes of a result."""
        return [size_expression(size) for size in self.results[position].shape]

    def size(self, name: str, default: Size = 0) -> Size:
        """An argument that is a size or a place."""
        found = self.given.get(name)
        return default if found is None else size_expression(found)

    def no_size_is_a_number(self) -> None:
        """A number of rows among the numbers that are computed with is another one in a bucket."""
        for name, value in self.given.items():
            if name in _SIZES | _PLACES.get(self.name, frozenset()):
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, (torch.SymInt, torch.SymFloat)) and self.sizes.grows(leaf.node.expr):
                    raise MixesError(f"{self.name} computes with the number of rows")


#: Arguments that are sizes, of whatever operation; and those that say where in a dimension, which rules look at.
_SIZES = frozenset({"size", "shape", "stride"})
_PLACES = {
    "slice": frozenset({"start", "end"}),
    "select": frozenset({"index"}),
    "arange": frozenset({"end"}),
    "constant_pad_nd": frozenset({"pad"}),
}


def rule_for(name: str) -> Rule | None:
    """The rule of an operation by its name without namespace and overload."""
    return RULES.get(name)


RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# -- entry by entry ----------------------------------------------------------------------------------------------------

#: One string, as a list would take a hundred lines.
_POINTWISE = (
    "__lshift__ __rshift__ "
    "_to_copy abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift "
    "bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone copy cos "
    "cosh div elu eq erf erfc exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac ge gelu gt hardsigmoid "
    "hardswish hardtanh isinf isnan le leaky_relu lerp log log10 log1p log2 log_sigmoid_forward logaddexp "
    "logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul nan_to_num ne neg pow "
    "reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit silu sin sinh softplus sqrt sub tan tanh "
    "threshold trunc where "
)


def pointwise(op: Operation) -> Rows:
    """Each entry of the result depends on one entry of each argument."""
    values = op.all_rows()
    dims = _broadcast(values, len(op.results[0].shape))
    causal = any(value.causal for value in values)
    beyond = {}
    for place, dim in enumerate(dims):
        if grows(dim):
            constant = _fold(op, lambda value, place=place: _beyond(value, dims, place))  # type: ignore[misc]
            if constant is not None:
                beyond[place] = constant
    beyond |= _compared(op, dims)
    constant = _fold(op, lambda value: value.constant)
    return Rows(dims, beyond, constant, _moved_iota(op, values, len(dims)), causal=causal)


RULES.update(dict.fromkeys(_POINTWISE.split(), pointwise))


def _broadcast(values: list[Rows], rank: int) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for place in range(-rank, 0):
        here = [value.dims[place] for value in values if len(value.dims) >= -place and value.dims[place]]
        if not here:
            dims.append(())
            continue
        first = here[0]
        for other in here[1:]:
            if grows(first) or grows(other):
                first = _narrower(first, other)
        dims.append(first)
    return tuple(dims)


def _narrower(one: Dim, other: Dim) -> Dim:
    if len(one) != len(other) or not all(same(a.size, b.size) for a, b in zip(one, other, strict=True)):
        raise MixesError("its arguments have their rows in different places")
    return tuple(Axis(a.size, smaller(a.live, b.live)) for a, b in zip(one, other, strict=True))


def _beyond(value: Rows, dims: tuple[Dim, ...], place: int) -> float | None:
    """The constant that an argument holds beyond the live part of dimension ``place`` of the result."""
    if value.constant is not None:
        return value.constant
    own = place - len(dims) + len(value.dims)
    if own < 0 or len(value.dims[own]) != 1:
        return None  # the same all along and unknown, or merged
    # Where another argument has fewer live entries, this one's own begin to be constant too late.
    return value.beyond.get(own) if same(_live(value.dims[own]), _live(dims[place])) else None


def _fold(op: Operation, constant_of: Callable[[Rows], float | None]) -> float | None:
    """What the operation gives where its arguments are these constants; ``None`` where that is not known."""

    def constant(name: str) -> float | None:
        value = op.given.get(name)
        if isinstance(value, torch.Tensor):
            return constant_of(op.known(value))
        return float(value) if isinstance(value, (int, float)) else None

    one, other = constant("self"), constant("other")
    match op.name:
        case "bitwise_and" | "logical_and":
            return 0.0 if 0.0 in (one, other) else None
        case "bitwise_or" | "logical_or":
            return 1.0 if op.results[0].dtype is torch.bool and 1.0 in (one, other) else None
        case "bitwise_not":
            return None if one is None or op.results[0].dtype is not torch.bool else 1.0 - one
        case "logical_not":
            return None if one is None else float(one == 0.0)
        case "mul":
            return 0.0 if 0.0 in (one, other) else None
        case "add" | "sub":
            # What is not known is taken to be finite.
            finite = other is None or abs(other) != math.inf
            if op.name == "add" and other == -math.inf and (one is None or abs(one) != math.inf):
                return -math.inf if op.given.get("alpha", 1) == 1 else None
            return -math.inf if one == -math.inf and finite else None
        case "where":
            chosen = constant("condition")
            return None if chosen is None else one if chosen else other
        case "masked_fill":
            chosen = constant("mask")
            return None if chosen is None else constant("value") if chosen else one
        case "exp":
            return 0.0 if one == -math.inf else None
        case "_to_copy":
            return one if one in (0.0, 1.0) or op.results[0].dtype.is_floating_point else None
        case "clone":
            return one
        case _:
            return None


_LATER = {"le": 0, "lt": 1, "ge": 0, "gt": 1}


def _compared(op: Operation, dims: tuple[Dim, ...]) -> dict[int, float]:
    """A mask of positions: ``k <= q`` is false for every ``k`` beyond the live part as long as ``q`` is live."""
    one, other = op.given.get("self"), op.given.get("other")
    if op.name not in _LATER or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return {}
    keys, queries = (op.known(one), op.known(other)) if op.name[0] == "l" else (op.known(other), op.known(one))
    found = {}
    for later, earlier, answer in ((keys, queries, 0.0), (queries, keys, 1.0)):
        if later.iota is None or earlier.iota is None:
            continue
        place = len(dims) - len(later.dims) + later.iota[0]
        if place == len(dims) - len(earlier.dims) + earlier.iota[0]:
            continue
        # The first dead position of one against the last live position of the other.
        gap = difference(
            _live(later.dims[later.iota[0]]) + later.iota[1], _live(earlier.dims[earlier.iota[0]]) - 1 + earlier.iota[1]
        )
        strict = _LATER[op.name] if answer == 0.0 else 1 - _LATER[op.name]
        if gap is not None and gap >= 1 - strict:
            found[place] = answer
    return found


def _live(dim: Dim) -> Size:
    if not grows(dim):
        return size_of(dim)
    if len(dim) > 1:
        raise MixesError("it looks along rows that a reshape has merged")
    return dim[0].live


#: Types that hold every position.
_EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}


def _moved_iota(op: Operation, values: list[Rows], rank: int) -> tuple[int, Size] | None:
    if len(values) != 1 or values[0].iota is None:
        return None
    place, offset = values[0].iota
    other = op.given.get("other", 0)
    step = op.given.get("alpha", 1)
    if op.name in ("_to_copy", "clone"):
        exact = op.results[0].dtype in _EXACT
        return (place + rank - len(values[0].dims), offset) if exact else None
    if op.name in ("add", "sub") and type(other) is int and step == 1:
        return place + rank - len(values[0].dims), offset + (other if op.name == "add" else -other)
    return None


# -- views -------------------------------------------------------------------------------------------------------------


@_rule("view", "_unsafe_view", "_reshape_alias", "squeeze")
def _reshaped(op: Operation) -> Rows:
    if "dtype" in op.given:
        return _of_other_bits(op)
    return reshape(op.rows("self"), op.shape())


def _of_other_bits(op: Operation) -> Rows:
    """The same memory as numbers of another type: of another size, the last dimension has more or fewer of them."""
    value = op.rows("self")
    if not value.dims:
        return value.with_dims(())
    if grows(value.dims[-1]) and op.given["self"].element_size() != op.results[0].element_size():
        raise MixesError("a view as another type cuts through rows")
    last = value.dims[-1] if grows(value.dims[-1]) else op.sizes.axis(op.shape()[-1])
    return Rows((*value.dims[:-1], last), window=value.window, causal=value.causal)


@_rule("unsqueeze")
def _unsqueezed(op: Operation) -> Rows:
    value = op.rows("self")
    place = int(op.given["dim"]) % (len(value.dims) + 1)

    def moved(dim: int) -> int:
        return dim + (dim >= place)

    return replace(
        value,
        dims=(*value.dims[:place], (), *value.dims[place:]),
        beyond={moved(i): constant for i, constant in value.beyond.items()},
        iota=(moved(value.iota[0]), value.iota[1]) if value.iota else None,
    )


@_rule("detach", "alias", "lift_fresh")
def _same(op: Operation) -> Rows:
    return op.rows("self")


@_rule("t")
def _transposed_matrix(op: Operation) -> Rows:
    value = op.rows("self")
    return permute(value, list(reversed(range(len(value.dims)))))


@_rule("transpose")
def _transposed(op: Operation) -> Rows:
    value = op.rows("self")
    order = list(range(len(value.dims)))
    one, other = op.dim("dim0", value), op.dim("dim1", value)
    order[one], order[other] = order[other], order[one]
    return permute(value, order)


@_rule("permute")
def _permuted(op: Operation) -> Rows:
    value = op.rows("self")
    return permute(value, [int(d) % len(value.dims) for d in op.given["dims"]])


@_rule("expand", "repeat")
def _expanded(op: Operation) -> Rows:
    value, made = op.rows("self"), op.dims_of_result()
    lead = len(made) - len(value.dims)
    dims = []
    for place, dim in enumerate(made):
        old = value.dims[place - lead] if place >= lead else ()
        if old and not same(size_of(old), size_of(dim)):
            raise MixesError("rows are repeated one after the other")
        dims.append(old or dim)
    beyond = {i + lead: constant for i, constant in value.beyond.items()}
    iota = (value.iota[0] + lead, value.iota[1]) if value.iota and value.dims[value.iota[0]] else None
    return replace(value, dims=tuple(dims), beyond=beyond, iota=iota)


@_rule("slice")
def _sliced(op: Operation) -> Rows:
    value = op.rows("self")
    place = op.dim("dim", value, 0)
    dim, made = value.dims[place], op.dims_of_result()[place]
    if op.given.get("step") not in (None, 1):
        if grows(dim) or grows(made):
            raise MixesError("it takes every few rows")
        return value.with_dims(_replaced(value.dims, place, made))
    start = op.size("start")
    if isinstance(start, int) and start < 0:
        if grows(dim):
            raise MixesError("it counts rows from the end")
        start = 0
    if op.sizes.grows(start):
        raise MixesError("it counts rows from the end")
    if not grows(dim):
        # A window of the first rows into something that does not grow, as into a table of positions or a cache.
        window = value.window or grows(made)
        moved = (
            value if not value.iota or value.iota[0] != place else replace(value, iota=(place, value.iota[1] + start))
        )
        return replace(moved, dims=_replaced(value.dims, place, made), window=window)
    if len(dim) != 1:
        raise MixesError("it cuts rows that a reshape has merged")
    end = op.shape()[place] + start
    live = smaller(dim[0].live, end) if op.sizes.grows(end) else None
    if live is None:
        op.sizes.need(_live(dim), int(end))
    kept = (Axis(op.shape()[place], None if live is None else live - start),) if op.shape()[place] != 1 else ()
    beyond = {i: constant for i, constant in value.beyond.items() if i != place or (kept and grows(kept))}
    iota = value.iota
    if iota is not None and iota[0] == place:
        iota = (place, iota[1] + start)
    window = value.window or (live is not None and not same(end, dim[0].size))
    return replace(value, dims=_replaced(value.dims, place, kept), beyond=beyond, iota=iota, window=window)


@_rule("select")
def _selected(op: Operation) -> Rows:
    value = op.rows("self")
    place = op.dim("dim", value)
    index = op.size("index")
    if op.sizes.grows(index) or (grows(value.dims[place]) and index < 0):
        raise MixesError("it counts rows from the end")
    if grows(value.dims[place]):
        op.sizes.need(_live(value.dims[place]), int(index) + 1)
    dims = (*value.dims[:place], *value.dims[place + 1 :])
    return Rows(dims, constant=value.constant, causal=value.causal, window=value.window)


@_rule("split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes")
def _split(op: Operation) -> tuple[Rows, ...]:
    value = op.rows("self")
    place = op.dim("dim", value, 0)
    if grows(value.dims[place]):
        raise MixesError("it takes rows apart")
    if op.name == "unbind":
        return (value.with_dims((*value.dims[:place], *value.dims[place + 1 :])),) * len(op.results)
    made = [op.dims_of_result(i)[place] for i in range(len(op.results))]
    return tuple(replace(value, dims=_replaced(value.dims, place, dim)) for dim in made)


def _replaced(dims: tuple[Dim, ...], place: int, dim: Dim) -> tuple[Dim, ...]:
    return (*dims[:place], dim, *dims[place + 1 :])


@_rule("cat")
def _joined(op: Operation) -> Rows:
    given = [t for t in op.given["tensors"] if t.dim() > 1 or t.shape[0] != 0]
    values = [op.known(t) for t in given]
    place = op.dim("dim", values[0], 0)
    causal = any(value.causal for value in values)
    others = [_replaced(value.dims, place, ()) for value in values]
    dims = others[0]
    for other in others[1:]:
        dims = _broadcast([Rows(dims), Rows(other)], len(dims))
    if not any(grows(value.dims[place]) for value in values):
        beyond = {}
        for i in (i for i, dim in enumerate(dims) if grows(dim)):
            constants = {_beyond(value, dims, i) for value in values}
            if len(constants) == 1 and (constant := constants.pop()) is not None:
                beyond[i] = constant
        return Rows(_replaced(dims, place, op.dims_of_result()[place]), beyond, causal=causal)
    live: Size = 0  # all up to the end of the first part that grows; what comes behind it stands elsewhere in a bucket
    for value in values:
        live = live + _live(value.dims[place])
        if grows(value.dims[place]):
            break
    return Rows(_replaced(dims, place, (Axis(op.shape()[place], live),)), causal=causal)


@_rule("stack")
def _stacked(op: Operation) -> Rows:
    values = op.all_rows()
    dims = _broadcast(values, len(values[0].dims))
    place = int(op.given.get("dim") or 0) % (len(dims) + 1)
    causal = any(value.causal for value in values)
    return Rows((*dims[:place], (Axis(len(values)),), *dims[place:]), causal=causal)


@_rule("constant_pad_nd")
def _padded(op: Operation) -> Rows:
    value, pads = op.rows("self"), [size_expression(p) for p in op.given["pad"]]
    dims = list(value.dims)
    for count in range(len(pads) // 2):
        before, after = pads[2 * count], pads[2 * count + 1]
        place = len(dims) - 1 - count
        if op.sizes.grows(before) or op.sizes.grows(after):
            raise MixesError("it pads by a number of rows")
        if before == 0 == after:
            continue
        if not grows(dims[place]):
            dims[place] = op.dims_of_result()[place]
        elif len(dims[place]) == 1:
            dims[place] = (Axis(op.shape()[place], _live(dims[place]) + before),)
        else:
            raise MixesError("it pads rows that a reshape has merged")
    return value.with_dims(tuple(dims)).plain()


# -- tensors made of nothing -------------------------------------------------------------------------------------------


@_rule("arange")
def _counted(op: Operation) -> Rows:
    start, step = op.size("start"), op.given.get("step") or 1
    dims = op.dims_of_result()
    if step != 1 or not isinstance(start, int):
        if any(map(grows, dims)):
            raise MixesError("it counts in steps, or from a number of rows")
        return Rows(dims)
    return Rows(dims, iota=(0, start) if op.results[0].dtype in _EXACT else None)


@_rule("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full")
def _filled(op: Operation) -> Rows:
    value = op.given.get("fill_value", 1.0 if "ones" in op.name else 0.0)
    return Rows(op.dims_of_result(), constant=float(value) if isinstance(value, (int, float)) else None)


@_rule("zero")
def _zeroed(op: Operation) -> Rows:
    return Rows(op.rows("self").dims, constant=0.0)


@_rule("scalar_tensor")
def _scalar(op: Operation) -> Rows:
    return Rows((), constant=float(op.given["s"]) if isinstance(op.given["s"], (int, float)) else None)


@_rule("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
def _allocated(op: Operation) -> Rows:
    return Rows(op.dims_of_result())


@_rule("tril", "triu")
def _triangle(op: Operation) -> Rows:
    """The lower triangle is 0 for columns behind the row, the upper one for rows behind the column."""
    value = op.rows("self")
    diagonal = op.given.get("diagonal") or 0
    if not isinstance(diagonal, int):
        raise MixesError("its diagonal is a number of rows")
    row, column = len(value.dims) - 2, len(value.dims) - 1
    dead, live = (column, row) if op.name == "tril" else (row, column)
    beyond = {}
    if grows(value.dims[dead]) and grows(value.dims[live]):
        gap = difference(_live(value.dims[dead]), _live(value.dims[live]) - 1)
        if gap is not None and gap > (diagonal if op.name == "tril" else -diagonal):
            beyond = {dead: 0.0}
    return Rows(value.dims, beyond, causal=value.causal)


# -- along a dimension -------------------------------------------------------------------------------------------------

#: What padding may hold and add nothing.
_NEUTRAL = {"sum": 0.0, "amax": -math.inf, "any": 0.0, "logsumexp": -math.inf, "all": 1.0, "prod": 1.0}


@_rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "argmax", "argmin", "var", "std", "var_mean")
@_rule("logsumexp", "norm", "linalg_vector_norm", "median", "std_mean", "nansum", "count_nonzero")
def _reduced(op: Operation) -> Rows | tuple[Rows, ...]:
    value = op.rows("self")
    named = op.given.get("dim")
    over = (
        range(len(value.dims))
        if named is None or named == []
        else named
        if isinstance(named, (list, tuple))
        else [named]
    )
    places = {int(d) % max(len(value.dims), 1) for d in over}
    causal = value.causal
    for place in places & {i for i, dim in enumerate(value.dims) if grows(dim)}:
        if op.name not in _NEUTRAL or value.beyond.get(place) != _NEUTRAL[op.name] or len(places) > 1:
            raise MixesError(f"{op.name} runs over all rows")
        causal = True
    keep = bool(op.given.get("keepdim"))
    dims = tuple(() if i in places else dim for i, dim in enumerate(value.dims) if keep or i not in places)
    made = Rows(dims, causal=causal)
    return made if len(op.results) == 1 else (made,) * len(op.results)


@_rule("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
def _scanned(op: Operation) -> Rows | tuple[Rows, ...]:
    """What comes later does not matter to what came before."""
    value = op.rows("self")
    if len(value.dims[op.dim("dim", value)] if value.dims else ()) > 1:
        raise MixesError("it runs along rows that a reshape has merged")
    made = value.plain()
    return made if len(op.results) == 1 else (made,) * len(op.results)


@_rule("_softmax", "_safe_softmax", "_log_softmax")
def _normalised(op: Operation) -> Rows:
    value = op.rows("self")
    place = op.dim("dim", value)
    if not grows(value.dims[place]):
        return value.plain()
    if value.beyond.get(place) != -math.inf or op.name == "_log_softmax":
        raise MixesError("a softmax runs over all rows")
    return Rows(value.dims, {place: 0.0}, causal=True)


@_rule("topk", "sort", "kthvalue", "mode")
def _chosen(op: Operation) -> Rows | tuple[Rows, ...]:
    value = op.rows("self")
    place = op.dim("dim", value, -1)
    if value.dims and grows(value.dims[place]):
        raise MixesError(f"{op.name} compares rows")
    made = Rows(_replaced(value.dims, place, op.dims_of_result()[place]) if value.dims else (), causal=value.causal)
    return made if len(op.results) == 1 else (made,) * len(op.results)


@_rule("flip", "roll")
def _turned(op: Operation) -> Rows:
    value = op.rows("self")
    places = op.given.get("dims") or list(range(len(value.dims)))
    if any(grows(value.dims[int(place)]) for place in places):
        raise MixesError(f"{op.name} moves rows")
    return value.plain()


@_rule("native_layer_norm", "_fused_rms_norm")
def _normed(op: Operation) -> tuple[Rows, ...]:
    value = op.rows("input")
    count = len(op.given["normalized_shape"])
    if any(map(grows, value.dims[len(value.dims) - count :])):
        raise MixesError("a norm runs over all rows")
    statistics = Rows((*value.dims[: len(value.dims) - count], *((),) * count))
    made = Rows(value.dims, causal=value.causal), statistics, statistics  # an RMS norm has no mean
    return made[: len(op.results)]


# -- products ----------------------------------------------------------------------------------------------------------


_FACTORS = {
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
}


@_rule("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
def _multiplied(op: Operation) -> Rows:
    one, other = _FACTORS.get(op.name, ("self", "mat2"))
    left, right = op.rows(one), op.rows(other)
    causal = left.causal or right.causal
    inner, outer = len(left.dims) - 1, max(len(right.dims) - 2, 0)
    if grows(left.dims[inner]) or grows(right.dims[outer]):
        # Padded rows are added to live ones, unless what they are multiplied by is 0.
        if _hides(left, inner, right, outer):
            op.must_be_finite(other)
        elif _hides(right, outer, left, inner):
            op.must_be_finite(one)
        else:
            raise MixesError("a matrix product adds up over rows")
        causal = True
    batch = _broadcast([Rows(left.dims[:-2]), Rows(right.dims[:-2])], max(len(left.dims) - 2, 0))
    dims = (*batch, *left.dims[len(batch) : -1], *(right.dims[-1:] if len(right.dims) > 1 else ()))
    if op.name in ("addmm", "baddbmm"):
        bias = op.rows("self")
        dims = _broadcast([Rows(dims), bias], len(dims))
        causal = causal or bias.causal
    return Rows(dims, causal=causal)


def _hides(mask: Rows, at: int, value: Rows, place: int) -> bool:
    """Whether a factor is 0 wherever the other one is not right."""
    one, other = mask.dims[at], value.dims[place]
    if mask.beyond.get(at) != 0.0 or len(one) != 1 or len(other) != 1 or not same(one[0].size, other[0].size):
        return False
    return _at_least(_live(other), _live(one))


@_rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
@_rule("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
def _attended(op: Operation) -> Rows | tuple[Rows, ...]:
    query, key, value = op.rows("query"), op.rows("key"), op.rows("value")
    dropout = op.given.get("dropout_p")
    if dropout not in (None, 0.0):
        raise MixesError("it draws random numbers")
    causal = query.causal or key.causal or value.causal
    mask = op.given.get("attn_mask", op.given.get("attn_bias"))
    if grows(key.dims[-2]):
        if not (_mask_hides(op, mask, key, value) or _order_hides(op, query, key, value)):
            raise MixesError("attention reads all rows: no mask that is known to hide the later ones")
        op.must_be_finite("key", "value")
        causal = True
    if isinstance(mask, torch.Tensor):
        causal = causal or op.known(mask).causal
    parts = [query, key, value, *([op.known(mask)] if isinstance(mask, torch.Tensor) else [])]
    if grows(query.dims[-1]) or grows(key.dims[-1]):
        raise MixesError("attention adds up over rows")
    batch = _broadcast([Rows(part.dims[:-2]) for part in parts], len(query.dims) - 2)
    masked = parts[-1].dims[-2] if len(parts) > 3 and len(parts[-1].dims) > 1 else ()
    queries = _narrower(query.dims[-2], masked) if grows(masked) and grows(query.dims[-2]) else query.dims[-2]
    made = Rows((*batch, queries, value.dims[-1]), causal=causal)
    if len(op.results) == 1:
        return made
    return (made, *(Rows(op.dims_of_result(i)) for i in range(1, len(op.results))))


def _mask_hides(op: Operation, mask: Any, *read: Rows) -> bool:
    """Whether a mask hides every key that is not right."""
    if not isinstance(mask, torch.Tensor):
        return False
    known = op.known(mask)
    hidden = known.beyond.get(len(known.dims) - 1) == (0.0 if mask.dtype is torch.bool else -math.inf)
    return hidden and all(_at_least(_live(rows.dims[-2]), _live(known.dims[-1])) for rows in read)


def _order_hides(op: Operation, query: Rows, *read: Rows) -> bool:
    """Whether keys that are not right stand behind every live query, and ``is_causal`` is set."""
    in_line = all(same(size_of(rows.dims[-2]), size_of(query.dims[-2])) for rows in read)
    return (
        bool(op.given.get("is_causal"))
        and in_line
        and all(_at_least(_live(rows.dims[-2]), _live(query.dims[-2])) for rows in read)
    )


def _at_least(one: Size, other: Size) -> bool:
    gap = difference(one, other)
    return gap is not None and gap >= 0


@_rule("convolution")
def _convolved(op: Operation) -> Rows:
    """Along rows: an entry depends on the rows around it; those that look ahead of the live part are not right."""
    image, weight = op.rows("input"), op.given["weight"]
    spatial = len(image.dims) - 2
    made = list(op.dims_of_result())
    if grows(image.dims[1]) or any(map(grows, op.rows("weight").dims)):
        raise MixesError("a convolution adds up over rows")
    made[0] = image.dims[0]
    for i in range(spatial):
        dim = image.dims[2 + i]
        if not grows(dim):
            continue
        stride, dilation = op.given["stride"][i], op.given["dilation"][i]
        if stride != 1 or op.given.get("transposed") or len(dim) != 1:
            raise MixesError("a convolution takes every few rows")
        reach = (int(weight.shape[2 + i]) - 1) * dilation
        made[2 + i] = (Axis(op.shape()[2 + i], _live(dim) - reach + op.given["padding"][i]),)
    return Rows(tuple(made), causal=image.causal)


# -- places ------------------------------------------------------------------------------------------------------------


@_rule("embedding")
def _looked_up(op: Operation) -> Rows:
    table, index = op.rows("weight"), op.rows("indices")
    if grows(table.dims[0]):
        raise MixesError("it looks up rows by number")
    _stays_inside(op, table.dims[0], index)
    return Rows((*index.dims, *table.dims[1:]), causal=index.causal or table.causal)


@_rule("index", "_unsafe_index")
def _indexed(op: Operation) -> Rows:
    value, indices = op.rows("self"), op.given["indices"]
    at = [i for i, index in enumerate(indices) if index is not None]
    given = [op.known(indices[i]) for i in at]
    if any(indices[i].dtype in (torch.bool, torch.uint8) for i in at):
        raise MixesError("it chooses rows by a mask")
    rank = max(len(index.dims) for index in given)
    made = _broadcast(given, rank)
    for i, index in zip(at, given, strict=True):
        if grows(value.dims[i]):
            _stays_live(value.dims[i], index)
        else:
            _stays_inside(op, value.dims[i], index)
    adjacent = at == list(range(at[0], at[-1] + 1))
    rest = [dim for i, dim in enumerate(value.dims) if i not in at]
    lead = at[0] if adjacent else 0
    iota = None
    if value.iota is not None and value.iota[0] in at:
        inner = given[at.index(value.iota[0])]
        if inner.iota is not None:
            iota = (lead + rank - len(inner.dims) + inner.iota[0], inner.iota[1] + value.iota[1])
    causal = value.causal or any(index.causal for index in given)
    return Rows((*rest[:lead], *made, *rest[lead:]), iota=iota, causal=causal)


def _stays_live(dim: Dim, index: Rows) -> None:
    """Rows are taken by number: right if the numbers are known positions, live ones for live entries."""
    if index.iota is not None and len(dim) == 1:
        place, first = index.iota
        if _at_least(first, 0) and _at_least(_live(dim), _live(index.dims[place]) + first):
            return
    raise MixesError("it takes rows by number")


def _stays_inside(op: Operation, table: Dim, index: Rows) -> None:
    """Positions are looked up in a table, which may end before a bucket does."""
    if index.iota is not None:
        place, first = index.iota
        op.sizes.at_most(size_of(index.dims[place]) + first, size_of(table))


@_rule("index_select")
def _picked(op: Operation) -> Rows:
    value, index = op.rows("self"), op.rows("index")
    place = op.dim("dim", value)
    if grows(value.dims[place]):
        _stays_live(value.dims[place], index)
    else:
        _stays_inside(op, value.dims[place], index)
    return Rows(_replaced(value.dims, place, index.dims[0] if index.dims else ()), causal=value.causal or index.causal)


@_rule("gather")
def _gathered(op: Operation) -> Rows:
    value, index = op.rows("self"), op.rows("index")
    place = op.dim("dim", value)
    if grows(value.dims[place]):
        raise MixesError("it takes rows by number")
    others = _broadcast([Rows(_replaced(v.dims, place, ())) for v in (value, index)], len(index.dims))
    return Rows(_replaced(others, place, index.dims[place]), causal=value.causal or index.causal)


@_rule("scatter", "scatter_add", "scatter_reduce")
def _scattered(op: Operation) -> Rows:
    """Row by row where it scatters along a dimension that does not grow."""
    value, index = op.rows("self"), op.rows("index")
    place = op.dim("dim", value)
    if grows(value.dims[place]) or grows(index.dims[place]):
        raise MixesError("it puts rows by number")
    parts = [value, index] + ([op.rows("src")] if isinstance(op.given.get("src"), torch.Tensor) else [])
    others = _broadcast([Rows(_replaced(v.dims, place, ())) for v in parts], len(value.dims))
    return Rows(_replaced(others, place, value.dims[place]), causal=any(v.causal for v in parts))
