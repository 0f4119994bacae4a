"""Ahead of time: one graph of a model as a plain callable, without Dynamo between the caller and the replay.

Dynamo checks its guards and collects a model's parameters at each call: for 12 layers some 250 µs on a busy host. A
server that calls one model with inputs of one kind needs neither. What stays is a check of the inputs.
"""

import builtins
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from bcg_compiler.arguments import Given, OpenSizes, checks, first_of_each, is_plain_call, leaf_names, refuse_structure
from bcg_compiler.compat import dynamo
from bcg_compiler.compat.backends import autocast_now
from bcg_compiler.compat.equal_calls import EqualCalls, equal_calls
from bcg_compiler.errors import AotError, BcgError
from bcg_compiler.garbage import seldom_collected
from bcg_compiler.plan import Plan
from bcg_compiler.plan.padding import label, symbol_sources
from bcg_compiler.runtime import Program, register_for

_entries = itertools.count()


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
        self._plain = is_plain_call(given, leaves)
        sources = _sources(program.plan, trace.flat, leaves)
        self._held = [source.held for source in sources]  # parameters, of which there may be a thousand
        self._taken = [(at, s.leaf, s.dim) for at, s in enumerate(sources) if s.leaf is not None]
        self._checks = checks(program.plan, sources, leaves, leaf_names(given))
        self._same = first_of_each([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self._inside = trace.held_by_arguments(leaves)
        self._of_model = trace.held_by_model(leaves)
        self._sizes = OpenSizes(program, sources, leaves)
        self._grad = any(isinstance(value, Tensor) and value.requires_grad for value in trace.flat)
        self._autocast = autocast_now()
        self._picks, self._result = _picks(result, trace.sentinels, trace.flat, leaves)
        register_for(program, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain and len(args) + len(kwargs) == len(self._checks) and tuple(kwargs) == self._names:
            leaves, structure = [*args, *kwargs.values()], self._structure  # a container is no value that is expected
        else:
            leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._structure:
            if kwargs.keys() == set(self._names) and tuple(kwargs) != self._names:
                return self(*args, **{name: kwargs[name] for name in self._names})
            raise refuse_structure(structure, self._structure)
        self._check(leaves, args, kwargs)
        flat = self._held.copy()
        for at, leaf, dim in self._taken:
            flat[at] = leaves[leaf] if dim is None else leaves[leaf].shape[dim]
        results = self.program(*flat)
        made = [results[at] if kind == "result" else leaves[at] if kind == "leaf" else at for kind, at in self._picks]
        return pytree.tree_unflatten(made, self._result)

    def _check(self, leaves: Sequence[Any], args: Any, kwargs: Any) -> None:
        for check, leaf in zip(self._checks, leaves, strict=True):
            check(leaf)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if first_of_each(tensors) != self._same:
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
                f"The program was compiled with autocast {self._autocast}, and is called with {autocast_now()}. Call "
                f"it under the autocast that it was compiled under, or compile another program."
            )


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
                    f"graph does. Return what it keeps there, or write into a tensor in place."
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
    are traced once; with ``trace_each_layer`` each by itself. Raises ``OptionError`` and whatever else is wrong with
    the options, what Dynamo raises where the model is not one graph (``fullgraph=True``), ``AotError`` where it cannot
    be called without Dynamo: under grad mode, where it sets attributes, or with a result of a type that
    ``torch.utils._pytree`` does not know.
    """
    from bcg_compiler.backend import start_early

    if not callable(model):
        raise AotError(f"model is a {type(model).__qualname__}, which cannot be called. Pass a module, or a function.")
    if not isinstance(args, (tuple, list)):  # a tensor is a sequence of its rows
        raise AotError(
            f"args is a {type(args).__qualname__}, and must be a tuple of the positional arguments that the model is "
            f"compiled for. Write (x,) for one argument x."
        )
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise AotError("kwargs must be a mapping of names to the keyword arguments that the model is compiled for.")
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
        if isinstance(cause := getattr(error, "inner_exception", None), BcgError):
            raise cause from cause.__cause__  # Dynamo wraps it, with advice to report a bug
        if not trace.ran:
            raise
        raise AotError(
            f"The model computes its result in Python from what its last operation on tensors gives, as .item() does, "
            f"which cannot be done without Dynamo. Return the tensors, and compute that behind the call. (Tried with "
            f"empty tensors in their place, it raises {type(error).__name__}: {error})"
        ) from error
    finally:
        trace.forget()
        del names["model"]  # Dynamo keeps the names of a function for longer than the function


def _call(*args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (a global of the function made of this)


def _sentinel(at: int, node: Any) -> Any:
    example = node.meta.get("example_value") if hasattr(node, "meta") else None
    return Tensor() if isinstance(example, Tensor) or example is None else 10**15 + at


def _sources(plan: Plan, flat: Sequence[Any], leaves: Sequence[Any]) -> list[Given]:
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
            found.append(Given(held=value) if leaf is None else Given(leaf=leaf))
        elif described.size in sizes:
            leaf, dim = sizes[described.size]
            found.append(Given(leaf=leaf, dim=dim))
        else:
            raise AotError(
                f"{label(described)} is a number that may differ from call to call, and no size of a tensor. Make it "
                f"a tensor, or the same at each call (torch.compile specialises numbers with dynamic=False)."
            )
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
