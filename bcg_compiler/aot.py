"""Ahead of time: one graph of a model as a plain callable, without Dynamo between the caller and the replay.

Dynamo checks its guards and collects a model's parameters at each call: for 12 layers some 250 µs on a busy host. A
server that calls one model with inputs of one kind needs neither. What stays is a check of the inputs.
"""

import builtins
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from bcg_compiler.compat import dynamo
from bcg_compiler.compat.backends import autocast_now
from bcg_compiler.compat.equal_calls import EqualCalls, equal_calls
from bcg_compiler.errors import AotError
from bcg_compiler.garbage import seldom_collected
from bcg_compiler.plan import Plan, Value
from bcg_compiler.plan.padding import label, symbol_sources
from bcg_compiler.plan.sizes import evaluate, symbols_in
from bcg_compiler.runtime import Program, register_for

_entries = itertools.count()
_PLAIN = (Tensor, torch.nn.Parameter)


class _Given(NamedTuple):
    """Where an argument of the graph comes from: a leaf of the caller's arguments, a size of one, or what is held."""

    leaf: int | None = None
    dim: int | None = None
    held: Any = None


class AotProgram:
    """A compiled model without guards: call it with arguments of the form that it was compiled with.

    Sizes that were open when it was compiled (``torch._dynamo.mark_dynamic``) may differ from call to call; everything
    else about the arguments is checked, and a call that differs raises ``AotError``. Parameters and buffers are bound:
    writing into them is seen, putting others in their place is not. Nor is anything else that Python code could see
    and that is no argument: attributes of modules, globals. ``program`` is what runs, with its plan, counters and
    captures; all functions of ``bcg_compiler`` that take a compiled callable take this one. ``equal_calls`` says how
    often the trace of a layer was that of an equal one.
    """

    def __init__(self, program: Program, trace: "_Trace", given: Any, result: Any, equal_calls: EqualCalls) -> None:
        self.program = program
        self.equal_calls = equal_calls
        leaves, self._structure = pytree.tree_flatten(given)
        self._names = tuple(given[1])
        self._given = _sources(program.plan, trace.flat, leaves)
        self._checks = _checks(program.plan, self._given, leaves)
        self._same = _first_of_each([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._inside = trace.held_by_arguments(leaves)
        self._of_model = trace.held_by_model(leaves)
        self._sizes = _OpenSizes(program, self._given)
        self._grad = any(isinstance(value, Tensor) and value.requires_grad for value in trace.flat)
        self._autocast = autocast_now()
        self._picks, self._result = _picks(result, trace.sentinels, trace.flat, leaves)
        register_for(program, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._structure:
            if kwargs.keys() == set(self._names) and tuple(kwargs) != self._names:
                return self(*args, **{name: kwargs[name] for name in self._names})
            raise AotError(f"The arguments are {structure}, and the program was compiled for {self._structure}.")
        self._check(leaves, args, kwargs)
        flat = [
            held if leaf is None else leaves[leaf] if dim is None else leaves[leaf].shape[dim]
            for leaf, dim, held in self._given
        ]
        results = self.program(*flat)
        made = [results[at] if kind == "result" else leaves[at] if kind == "leaf" else at for kind, at in self._picks]
        return pytree.tree_unflatten(made, self._result)

    def _check(self, leaves: Sequence[Any], args: Any, kwargs: Any) -> None:
        for check, leaf in zip(self._checks, leaves, strict=True):
            check(leaf)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _first_of_each(tensors) != self._same:
            raise AotError(
                "Which arguments are one and the same tensor is not as it was when the program was compiled. Pass "
                "tensors that are as different from each other as those were."
            )
        for name, code, value in self._inside:
            if eval(code, {"L": {"args": args, "kwargs": kwargs}}) is not value:
                raise AotError(
                    f"{name} is another tensor than when the program was compiled. Write into that one, or pass it as "
                    f"an argument of its own."
                )
        for at, value in self._of_model:
            if leaves[at] is not value:
                raise AotError("An argument was a tensor of the model's own when the program was compiled, and is not.")
        self._sizes.check(leaves)
        if torch.is_grad_enabled() and (self._grad or any([tensor.requires_grad for tensor in tensors])):
            raise AotError("The program computes no gradients. Call it under torch.no_grad() or inference_mode().")
        if autocast_now() != self._autocast:
            raise AotError(
                f"The program was compiled with autocast {self._autocast}, and is called with {autocast_now()}."
            )


def _first_of_each(tensors: Sequence[Tensor]) -> list[int] | None:
    """For each tensor the first one that is the same object; ``None`` if all differ."""
    ids = [id(tensor) for tensor in tensors]
    return None if len(set(ids)) == len(ids) else [ids.index(own) for own in ids]


class _OpenSizes:
    """What must hold of the sizes and strides that were open when a program was compiled."""

    def __init__(self, program: Program, given: Sequence[_Given]) -> None:
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

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise ``AotError`` for sizes that the program was not compiled for."""
        seen = tuple([(leaves[leaf].shape, leaves[leaf].stride()) for leaf in self._leaves])
        if seen in self._fulfilled:
            return
        symbols: dict[str, int] = {}
        for shape_first in (True, False):  # a stride is often a size of its tensor, and seldom one of its own
            for (_, parts, _), (shape, strides) in zip(self._specs, seen, strict=True):
                rank = len(shape)
                named, sizes = (parts[:rank], shape) if shape_first else (parts[rank:], strides)
                for part, size in zip(named, sizes, strict=True):
                    if part.isidentifier() and symbols.setdefault(part, size) != size and shape_first:
                        raise AotError(
                            f"Two sizes that were equal when the program was compiled are {symbols[part]} and {size}."
                        )
        for (_, parts, name), (shape, strides) in zip(self._specs, seen, strict=True):
            wanted = [evaluate(part, symbols) for part in parts]
            lengths, steps = wanted[: len(shape)], wanted[len(shape) :]
            # A stride over one element means nothing.
            same = [w == s for w, s, size in zip(steps, strides, shape, strict=True) if size > 1 and 0 not in shape]
            if lengths != list(shape) or not all(same):
                raise AotError(
                    f"{name} is {list(shape)} of strides {strides}, and the program was compiled for "
                    f"[{', '.join(parts[: len(shape)])}] of strides ({', '.join(parts[len(shape) :])}) with {symbols}."
                )
        for condition in self._conditions:
            if not evaluate(condition, symbols):
                raise AotError(f"The program was compiled for sizes with {condition}, which {symbols} does not fulfil.")
        self._fulfilled.add(seen)


class _Trace:
    """What a backend sees of the one call that compiles: the program, and the arguments of the graph."""

    def __init__(self, options: Mapping[str, Any] | None, given: Any) -> None:
        self._options = options
        self._given = {"L": {"args": given[0], "kwargs": given[1]}}
        self.programs: list[Any] = []
        self.flat: tuple[Any, ...] = ()
        self.sentinels: list[Any] = []
        self.ran = False
        self._lasting: list[str] = []
        self._sources: list[str] = []

    def backend(self, module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile, and return what gives values that are known again where Dynamo puts them into the result."""
        from bcg_compiler.backend import bcg_backend

        self._lasting = dynamo.lasting_effects()
        self._sources = [dynamo.source_name(node) for node in module.graph.find_nodes(op="placeholder")]
        program = bcg_backend(module, example_inputs, options=self._options)
        self.programs = [program]  # Dynamo may ask twice, and drops the first answer
        dynamo.drop_guards()
        (returned,) = module.graph.output_node().args
        self.sentinels = [_sentinel(at, node) for at, node in enumerate(returned)]  # type: ignore[arg-type]

        def probe(*flat: Any) -> list[Any]:
            if self._lasting:  # now, before Dynamo does them
                raise AotError(
                    f"The model changes Python objects that outlast the call ({', '.join(self._lasting)}), which no "
                    f"graph does. Leave the result where it is, or write into a tensor in place."
                )
            self.flat, self.ran = flat, True
            return self.sentinels

        return probe

    def held_by_arguments(self, leaves: Sequence[Any]) -> list[tuple[str, CodeType, Tensor]]:
        """Tensors inside of objects that are arguments, each with what finds it in the arguments of a call."""
        ids = {id(leaf) for leaf in leaves}
        tensors = [(s, v) for s, v in zip(self._sources, self.flat, strict=True) if isinstance(v, Tensor)]
        inside = [s for s, value in tensors if s.startswith("L[") and id(value) not in ids]
        codes = {source: compile(source, "<argument>", "eval") for source in inside}
        found = [(source, code, eval(code, dict(self._given))) for source, code in codes.items()]
        return [(dynamo.argument_name(source), code, value) for source, code, value in found]

    def held_by_model(self, leaves: Sequence[Any]) -> list[tuple[int, Tensor]]:
        """The leaves that are tensors of the model's own."""
        own = {id(v) for s, v in zip(self._sources, self.flat, strict=True) if not s.startswith("L[")}
        # Dynamo of torch 2.11 has one input for an argument and a parameter that are one, and names the argument only.
        own |= {id(leaf) for leaf in leaves if isinstance(leaf, torch.nn.Parameter)}
        return [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and id(leaf) in own]

    def forget(self) -> None:
        """Let go of everything: Dynamo may keep the backend that it asked."""
        self._given, self.programs, self.flat, self.sentinels = {}, [], (), []


def aot_compile(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    trace_each_layer: bool = False,
) -> AotProgram:
    """Compile ``model`` for arguments of this form into a callable without guards.

    ``options`` are those of ``torch.compile(..., backend="bcg")``. The model is traced and not run, and equal layers
    are traced once; with ``trace_each_layer`` each by itself. Raises what Dynamo raises where the model is not one
    graph (``fullgraph=True``), ``AotError`` where it cannot be called without Dynamo: under grad mode, where it sets
    attributes, or with a result of a type that ``torch.utils._pytree`` does not know.
    """
    from bcg_compiler.backend import start_early

    given = (tuple(args), dict(kwargs or {}))
    start_early(options, pytree.tree_leaves(given))
    trace = _Trace(options, given)
    # A code object of its own, of a name of its own: Dynamo keeps its entries by code, and few for each; and by the
    # name what it has seen: sizes and numbers of another length or model would be open ones in this program.
    names = {"model": model, "__builtins__": builtins, "__name__": __name__}
    entry = types.FunctionType(_call.__code__.replace(co_name=f"aot_entry_{next(_entries)}"), names)
    entry.__qualname__ = getattr(model, "__qualname__", type(model).__qualname__)
    try:
        with seldom_collected(), equal_calls(None if trace_each_layer else model) as calls:
            result = torch.compile(entry, backend=trace.backend, fullgraph=True)(*given[0], **given[1])
        if not trace.programs:
            raise AotError(
                "Dynamo found no operation on tensors in the model, or it is switched off (torch.compiler.set_stance, "
                "TORCH_COMPILE_DISABLE): there is nothing to compile."
            )
        (program,) = trace.programs
        if not isinstance(program, Program):
            raise AotError("The program would compute gradients. Compile it under torch.no_grad() or inference_mode().")
        return AotProgram(program, trace, given, result, calls)
    except AotError:
        raise
    except Exception as error:
        if not trace.ran:
            raise
        raise AotError(
            f"The model computes with its results in Python, after its last operation on tensors, which cannot be done "
            f"without Dynamo: {type(error).__name__}: {error}"
        ) from error
    finally:
        trace.forget()
        del names["model"]  # Dynamo keeps the names of a function for longer than the function


def _call(*args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (a global of the function made of this)


def _sentinel(at: int, node: Any) -> Any:
    example = node.meta.get("example_value") if hasattr(node, "meta") else None
    return Tensor() if isinstance(example, Tensor) or example is None else 10**15 + at


def _sources(plan: Plan, flat: Sequence[Any], leaves: Sequence[Any]) -> list[_Given]:
    """Where each argument of the graph comes from at a call."""
    by_identity = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    values = plan.by_ordinal
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
    values = plan.by_ordinal
    described = {
        source.leaf: values[ordinal]
        for ordinal, source in zip(plan.inputs, given, strict=True)
        if source.leaf is not None and source.dim is None
    }
    return [_check_of(leaf, described.get(at)) for at, leaf in enumerate(leaves)]


def _check_of(example: Any, value: Value | None) -> Callable[[Any], None]:
    if not isinstance(example, Tensor):

        def check_constant(leaf: Any) -> None:
            if leaf is not example and not _equal(leaf, example):
                raise AotError(f"An argument is {leaf!r:.80}, and the program was compiled for {example!r:.80}.")

        return check_constant
    spec = value.specs[0] if value is not None and value.specs else None
    shape = [_fixed(s) for s in spec.shape] if spec is not None else list(example.shape)
    strides = [_fixed(s) for s in spec.strides] if spec is not None else list(example.stride())
    name = label(value) if value is not None else "an argument that the graph does not read"
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
            f"{tuple('any' if s is None else s for s in strides)} on {device}."
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
