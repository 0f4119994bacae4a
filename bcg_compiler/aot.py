"""Ahead of time: one graph of a model as a plain callable, without Dynamo between the caller and the replay.

Dynamo checks its guards and collects a model's parameters at each call: for 12 layers some 250 µs on a busy host. A
server that calls one model with inputs of one kind needs neither. What stays is a check of the inputs.
"""

import builtins
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from bcg_compiler.errors import AotError
from bcg_compiler.plan import Plan, Value
from bcg_compiler.plan.padding import label, symbol_sources
from bcg_compiler.plan.sizes import evaluate, symbols_in
from bcg_compiler.runtime import Program, register_for


class _Given(NamedTuple):
    """Where an argument of the graph comes from: a leaf of the caller's arguments, a size of one, or what is held."""

    leaf: int | None = None
    dim: int | None = None
    held: Any = None


class AotProgram:
    """A compiled model without guards: call it with arguments of the form that it was compiled with.

    Sizes that were open when it was compiled (``torch._dynamo.mark_dynamic``) may differ from call to call; everything
    else is checked, and a call that differs raises ``AotError``. Parameters and buffers are bound: writing into them is
    seen, putting others in their place is not. ``program`` is what runs, with its plan, counters and captures; all
    functions of ``bcg_compiler`` that take a compiled callable take this one.
    """

    def __init__(self, program: Program, trace: "_Trace", given: Any, result: Any) -> None:
        self.program = program
        self._leaves, self._structure = pytree.tree_flatten(given)
        self._given = _sources(program.plan, trace.flat, self._leaves)
        self._checks = _checks(program.plan, self._given, self._leaves)
        self._sizes: set[tuple[int, ...]] = set()
        sizes = _open_sizes(program.plan, self._given)
        self._open = [(leaf, dim) for leaf, dim, _ in sizes]
        self._symbols = [symbol for *_, symbol in sizes]
        self._conditions = [c for c in program.plan.conditions if symbols_in(c)]
        unknown = {s for condition in self._conditions for s in symbols_in(condition)} - set(self._symbols)
        if unknown:
            raise AotError(f"The graph depends on {', '.join(sorted(unknown))}, which is no size of an argument.")
        self._grad = any(isinstance(value, Tensor) and value.requires_grad for value in trace.flat)
        self._autocast = _autocast()
        self._picks, self._result = _picks(result, trace.sentinels, trace.flat, self._leaves)
        register_for(program, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._structure:
            raise AotError(f"The arguments are {structure}, and the program was compiled for {self._structure}.")
        self._check(leaves)
        flat = [
            held if leaf is None else leaves[leaf] if dim is None else leaves[leaf].shape[dim]
            for leaf, dim, held in self._given
        ]
        results = self.program(*flat)
        made = [results[at] if kind == "result" else leaves[at] if kind == "leaf" else at for kind, at in self._picks]
        return pytree.tree_unflatten(made, self._result)

    def _check(self, leaves: Sequence[Any]) -> None:
        for check, leaf in zip(self._checks, leaves, strict=True):
            check(leaf)
        sizes = tuple([leaves[leaf].shape[dim] for leaf, dim in self._open])
        if sizes not in self._sizes:
            self._check_sizes(sizes)
        if self._grad and torch.is_grad_enabled():
            raise AotError("The program computes no gradients. Call it under torch.no_grad() or inference_mode().")
        if _autocast() != self._autocast:
            raise AotError(
                f"The program was compiled with autocast {self._autocast}, and is called with {_autocast()}."
            )

    def _check_sizes(self, sizes: tuple[int, ...]) -> None:
        symbols: dict[str, int] = {}
        for symbol, size in zip(self._symbols, sizes, strict=True):
            if symbols.setdefault(symbol, size) != size:
                raise AotError(
                    f"Two sizes that were equal when the program was compiled are {symbols[symbol]} and {size}."
                )
        for condition in self._conditions:
            if not evaluate(condition, symbols):
                raise AotError(f"The program was compiled for sizes with {condition}, which {symbols} does not fulfil.")
        self._sizes.add(sizes)


class _Trace:
    """What a backend sees of the one call that compiles: the program, and the arguments of the graph."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._options = options
        self.programs: list[Any] = []
        self.flat: tuple[Any, ...] = ()
        self.sentinels: list[Any] = []

    def backend(self, module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile, and return what gives values that are known again where Dynamo puts them into the result."""
        from bcg_compiler.backend import bcg_backend

        program = bcg_backend(module, example_inputs, options=self._options)
        self.programs = [program]  # Dynamo may ask twice, and drops the first answer
        (returned,) = module.graph.output_node().args
        self.sentinels = [_sentinel(at, node) for at, node in enumerate(returned)]  # type: ignore[arg-type]

        def probe(*flat: Any) -> list[Any]:
            self.flat = flat
            return self.sentinels

        return probe


def aot_compile(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> AotProgram:
    """Compile ``model`` for arguments of this form into a callable without guards.

    ``options`` are those of ``torch.compile(..., backend="bcg")``. The model is traced and not run. Raises what Dynamo
    raises where the model is not one graph (``fullgraph=True``), ``AotError`` where it cannot be called without Dynamo:
    under grad mode, or with a result of a type that ``torch.utils._pytree`` does not know.
    """
    trace, given = _Trace(options), (tuple(args), dict(kwargs or {}))
    # A code object of its own: Dynamo keeps its entries by code, and few for each.
    names = {"model": model, "__builtins__": builtins, "__name__": __name__}
    entry = types.FunctionType(_call.__code__.replace(co_name="aot_entry"), names)
    result = torch.compile(entry, backend=trace.backend, fullgraph=True)(*given[0], **given[1])
    (program,) = trace.programs
    if not isinstance(program, Program):
        raise AotError("The program would compute gradients. Compile it under torch.no_grad() or inference_mode().")
    return AotProgram(program, trace, given, result)


def _call(*args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (a global of the function made of this)


def _sentinel(at: int, node: Any) -> Any:
    example = node.meta.get("example_value") if hasattr(node, "meta") else None
    return Tensor() if isinstance(example, Tensor) or example is None else 10**15 + at


def _sources(plan: Plan, flat: Sequence[Any], leaves: Sequence[Any]) -> list[_Given]:
    """Where each argument of the graph comes from at a call."""
    by_identity = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    values = {value.ordinal: value for value in plan.values}
    tensors = {p: by_identity.get(id(value)) for p, value in enumerate(flat) if isinstance(value, Tensor)}
    sizes = {
        symbol: (tensors[p], dim)
        for symbol, (p, dim) in symbol_sources(plan, tensors_only=True).items()
        if tensors.get(p) is not None and dim is not None and dim < flat[p].dim()
    }
    found = []
    for position, value in enumerate(flat):
        described = values[plan.inputs[position]]
        if isinstance(value, Tensor):
            leaf = tensors[position]
            found.append(_Given(held=value) if leaf is None else _Given(leaf=leaf))
        elif described.size in sizes:
            leaf, dim = sizes[described.size]
            found.append(_Given(leaf=leaf, dim=dim))
        else:
            raise AotError(
                f"{label(described)} is a number that may differ from call to call, and no size of a tensor. Make it "
                f"a tensor, or the same at each call (torch.compile specialises numbers with dynamic=False)."
            )
    return found


def _checks(plan: Plan, given: Sequence[_Given], leaves: Sequence[Any]) -> list[Callable[[Any], None]]:
    """A check for each leaf of the caller's arguments."""
    values = {value.ordinal: value for value in plan.values}
    described = {
        source.leaf: values[ordinal]
        for ordinal, source in zip(plan.inputs, given, strict=True)
        if source.leaf is not None and source.dim is None
    }
    return [_check_of(leaf, described.get(at)) for at, leaf in enumerate(leaves)]


def _check_of(example: Any, value: Value | None) -> Callable[[Any], None]:
    if not isinstance(example, Tensor):

        def check_constant(leaf: Any) -> None:
            if type(leaf) is not type(example) or leaf != example:
                raise AotError(f"An argument is {leaf!r:.80}, and the program was compiled for {example!r:.80}.")

        return check_constant
    spec = value.specs[0] if value is not None and value.specs else None
    shape = [_fixed(s) for s in spec.shape] if spec is not None else list(example.shape)
    strides = [_fixed(s) for s in spec.strides] if spec is not None else list(example.stride())
    name = label(value) if value is not None else "an argument that the graph does not read"
    dtype, device, rank = example.dtype, example.device, example.dim()
    fixed = [(dim, size) for dim, size in enumerate(shape) if size is not None]
    # A stride over one element means nothing.
    fixed_strides = [(dim, stride) for dim, stride in enumerate(strides) if stride is not None and shape[dim] != 1]

    def check(leaf: Any) -> None:
        if (
            isinstance(leaf, Tensor)
            and leaf.dtype is dtype
            and leaf.device == device
            and leaf.dim() == rank
            and all([leaf.shape[dim] == size for dim, size in fixed])
            and all([leaf.stride(dim) == stride for dim, stride in fixed_strides])
        ):
            return
        seen = (
            f"{leaf.dtype}{list(leaf.shape)} of strides {leaf.stride()} on {leaf.device}"
            if isinstance(leaf, Tensor)
            else f"{leaf!r:.80}"
        )
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise AotError(
            f"{name} is {seen}, and the program was compiled for {dtype}[{wanted}] of strides "
            f"{tuple('any' if s is None else s for s in strides)} on {device}."
        )

    return check


def _fixed(size: str) -> int | None:
    return int(size) if size.lstrip("-").isdigit() else None


def _open_sizes(plan: Plan, given: Sequence[_Given]) -> list[tuple[int, int, str]]:
    """(leaf, dimension, symbol) of each open size of the caller's tensors that is a symbol."""
    values = {value.ordinal: value for value in plan.values}
    found = []
    for ordinal, source in zip(plan.inputs, given, strict=True):
        if source.leaf is None or source.dim is not None or not values[ordinal].specs:
            continue
        for dim, size in enumerate(values[ordinal].specs[0].shape):
            if size.isidentifier():
                found.append((source.leaf, dim, size))
    return found


def _picks(
    result: Any, sentinels: Sequence[Any], flat: Sequence[Any], leaves: Sequence[Any]
) -> tuple[list[tuple[str, Any]], Any]:
    """For each leaf of the result what it is: a result of the graph, an argument, or the same at each call."""
    of_graph = {id(s) if isinstance(s, Tensor) else s: at for at, s in enumerate(sentinels)}
    of_caller = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    held = {id(value) for value in flat if isinstance(value, Tensor)}
    found_leaves, structure = pytree.tree_flatten(result)
    picks: list[tuple[str, Any]] = []
    for leaf in found_leaves:
        key = id(leaf) if isinstance(leaf, Tensor) else leaf
        if isinstance(leaf, Tensor | int) and key in of_graph:
            picks.append(("result", of_graph[key]))
        elif id(leaf) in of_caller:
            picks.append(("leaf", of_caller[id(leaf)]))
        elif id(leaf) in held or isinstance(leaf, (int, float, bool, str, type(None), torch.dtype, torch.device)):
            picks.append(("same", leaf))
        else:
            raise AotError(
                f"The result holds a {type(leaf).__qualname__}, of which it is not known what is in it. Register it "
                f"with torch.utils._pytree.register_pytree_node, or return tensors in tuples, lists and dictionaries."
            )
    return picks, structure


def _autocast() -> tuple[Any, ...]:
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda"))
