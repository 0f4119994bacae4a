"""What a call of a program without guards may be given, and what is said of a call that is refused."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_compiler.compat.dynamo import argument_name
from bcg_compiler.errors import AotError
from bcg_compiler.plan import Plan, Value
from bcg_compiler.plan.padding import label
from bcg_compiler.plan.sizes import evaluate, symbols_in
from bcg_compiler.runtime import Program

_PLAIN = (Tensor, torch.nn.Parameter)


class Given(NamedTuple):
    """Where an argument of the graph comes from: a leaf of the caller's arguments, a size of one, or what is held."""

    leaf: int | None = None
    dim: int | None = None
    held: Any = None


def leaf_names(given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """What the user calls each leaf of (args, kwargs): ``args.1.0``, ``scale``."""
    try:
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(given)[0]]
    except ValueError:  # a class that was registered without the names of its parts
        return ["An argument"] * len(pytree.tree_leaves(given))
    roots = {"[0]": "L['args']", "[1]": "L['kwargs']"}
    return [argument_name(roots[path[:3]] + path[3:]) for path in paths]


def is_plain_call(given: tuple[tuple[Any, ...], dict[str, Any]], leaves: Sequence[Any]) -> bool:
    """Whether no argument is a container, so that ``leaves`` are the arguments themselves."""
    arguments = [*given[0], *given[1].values()]
    return len(arguments) == len(leaves) and all(map(operator.is_, arguments, leaves))


class _Leaf:
    def __repr__(self) -> str:
        return "·"


def refuse_structure(now: pytree.TreeSpec, compiled: pytree.TreeSpec) -> AotError:
    """The error for arguments of another structure, with both written as calls: ``(·, [·, ·], scale=·)``."""
    texts = [_as_call(now), _as_call(compiled)]
    if texts[0] == texts[1] or " object at 0x" in "".join(texts):  # a class of its own does not show what is in it
        texts = [str(now), str(compiled)]
    return AotError(
        f"The program is called with {texts[0]}, and was compiled for {texts[1]}. Call it in that form, or compile "
        f"another program for this one."
    )


def _as_call(structure: pytree.TreeSpec) -> str:
    try:
        args, kwargs = pytree.tree_unflatten([_Leaf() for _ in range(structure.num_leaves)], structure)
        return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
    except Exception:  # a class that is not made, or shown, without tensors
        return str(structure)


def first_of_each(tensors: Sequence[Tensor]) -> list[int] | None:
    """For each tensor the first one that is the same object; ``None`` if all differ."""
    ids = [id(tensor) for tensor in tensors]
    return None if len(set(ids)) == len(ids) else [ids.index(own) for own in ids]


class OpenSizes:
    """What must hold of the sizes and strides that were open when a program was compiled."""

    def __init__(self, program: Program, given: Sequence[Given], leaves: Sequence[Any]) -> None:
        values = program.plan.by_ordinal
        self._specs = [
            (source.leaf, (*values[ordinal].specs[0].shape, *values[ordinal].specs[0].strides), label(values[ordinal]))
            for ordinal, source in zip(program.plan.inputs, given, strict=True)
            if source.leaf is not None and source.dim is None and values[ordinal].specs
        ]
        self._specs = [spec for spec in self._specs if any(_fixed(part) is None for part in spec[1])]
        self._leaves = [leaf for leaf, *_ in self._specs]
        known = {part for _, parts, _ in self._specs for part in parts if part.isidentifier()}
        self._conditions = [c for c in program.size_conditions() if symbols_in(c)]
        unknown = {s for condition in self._conditions for s in symbols_in(condition)} - known
        if unknown:
            raise AotError(f"The graph depends on {', '.join(sorted(unknown))}, which is no size of an argument.")
        self._fulfilled: set[Any] = set()
        self._where: dict[str, str] = {}
        for leaf, parts, name in self._specs:
            for dim, part in enumerate(parts[: leaves[leaf].dim()]):
                if part.isidentifier():
                    self._where.setdefault(part, f"dimension {dim} of {name}")

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise ``AotError`` for sizes that the program was not compiled for."""
        seen = tuple([(leaves[leaf].shape, leaves[leaf].stride()) for leaf in self._leaves])
        if seen in self._fulfilled:
            return
        symbols: dict[str, int] = {}
        for shape_first in (True, False):  # a stride is often a size of its tensor, and seldom one of its own
            for (_, parts, name), (shape, strides) in zip(self._specs, seen, strict=True):
                rank = len(shape)
                named, sizes = (parts[:rank], shape) if shape_first else (parts[rank:], strides)
                for dim, (part, size) in enumerate(zip(named, sizes, strict=True)):
                    if part.isidentifier() and symbols.setdefault(part, size) != size and shape_first:
                        raise AotError(
                            f"Two sizes that were equal when the program was compiled are not: {self._where[part]} is "
                            f"{symbols[part]}, and dimension {dim} of {name} is {size}."
                        )
        for (_, parts, name), (shape, strides) in zip(self._specs, seen, strict=True):
            wanted = [evaluate(part, symbols) for part in parts]
            lengths, steps = wanted[: len(shape)], wanted[len(shape) :]
            # A stride over one element means nothing.
            same = [w == s for w, s, size in zip(steps, strides, shape, strict=True) if size > 1 and 0 not in shape]
            if lengths != list(shape) or not all(same):
                raise AotError(
                    f"{name} is {list(shape)} of strides {strides}, and the program was compiled for "
                    f"[{', '.join(parts[: len(shape)])}] of strides ({', '.join(parts[len(shape) :])}), where "
                    f"{self._said(symbols)}."
                )
        for condition in self._conditions:
            if not evaluate(condition, symbols):
                own = {symbol: symbols[symbol] for symbol in symbols_in(condition)}
                raise AotError(
                    f"The program was compiled for sizes that fulfil {condition}, where {self._said(own)}. Compile "
                    f"another program for sizes that do not."
                )
        self._fulfilled.add(seen)

    def _said(self, symbols: Mapping[str, int]) -> str:
        """``s0, dimension 0 of in0 (args.0), is 3``, for people who have never seen a symbol."""
        return " and ".join(
            f"{symbol}, {self._where[symbol]}, is {size}" if symbol in self._where else f"{symbol} is {size}"
            for symbol, size in symbols.items()
        )


def checks(
    plan: Plan, given: Sequence[Given], leaves: Sequence[Any], names: Sequence[str]
) -> list[Callable[[Any], None]]:
    """A check for each leaf of the caller's arguments, ``names`` by ``leaf_names``. It raises ``AotError``."""
    values = plan.by_ordinal
    described = {
        source.leaf: values[ordinal]
        for ordinal, source in zip(plan.inputs, given, strict=True)
        if source.leaf is not None and source.dim is None
    }
    return [
        _check_of(leaf, label(described[at]) if at in described else names[at], described.get(at))
        for at, leaf in enumerate(leaves)
    ]


def _check_of(example: Any, name: str, value: Value | None) -> Callable[[Any], None]:
    if not isinstance(example, Tensor):

        def check_constant(leaf: Any) -> None:
            if leaf is not example and not _equal(leaf, example):
                raise AotError(
                    f"{name} is {leaf!r:.80}, and the program was compiled for {example!r:.80}, which is part of it. "
                    f"Compile another program for this one."
                )

        return check_constant
    spec = value.specs[0] if value is not None and value.specs else None
    shape = [_fixed(s) for s in spec.shape] if spec is not None else list(example.shape)
    strides = [_fixed(s) for s in spec.strides] if spec is not None else list(example.stride())
    dtype, device, rank, kind = example.dtype, example.device, example.dim(), type(example)
    lazy = example.is_conj(), example.is_neg()
    fixed = [(dim, size) for dim, size in enumerate(shape) if size is not None]
    # A stride over one element means nothing.
    fixed_strides = [(dim, stride) for dim, stride in enumerate(strides) if stride is not None and shape[dim] != 1]

    def check(leaf: Any) -> None:
        if (
            (type(leaf) is kind or (type(leaf) in _PLAIN and kind in _PLAIN))
            and leaf.dtype is dtype
            and leaf.device == device
            and leaf.dim() == rank
            and all([leaf.shape[dim] == size for dim, size in fixed])
            and all([leaf.stride(dim) == stride for dim, stride in fixed_strides])
            and (leaf.is_conj(), leaf.is_neg()) == lazy
        ):
            return
        seen = (
            f"{leaf.dtype}{list(leaf.shape)} of strides {leaf.stride()} on {leaf.device}"
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
            else f"{leaf!r:.80}"
        )
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise AotError(
            f"{name} is {seen}, and the program was compiled for {dtype}[{wanted}] of strides "
            f"{tuple('any' if s is None else s for s in strides)} on {device}. Pass it so, or compile another program."
        )

    return check


def _equal(value: Any, example: Any) -> bool:
    if type(value) is not type(example):
        return False
    if isinstance(value, (float, complex)):
        return repr(value) == repr(example)  # -0.0 is not 0.0, and a NaN is one
    return bool(value == example)


def _fixed(size: str) -> int | None:
    return int(size) if size.lstrip("-").isdigit() else None
