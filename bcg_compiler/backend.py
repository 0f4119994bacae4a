"""The backend of ``torch.compile``: found through the entry point group ``torch_dynamo_backends``.

Compiling has no side effects: Dynamo may ask twice for one graph and drop the first answer.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch.fx import GraphModule

from bcg_compiler.breaks import BoundBreak, as_bound_break
from bcg_compiler.compat.fake import FakeTensor
from bcg_compiler.compat.held_numbers import keep_constant
from bcg_compiler.compat.inductor import on_cuda, start_workers
from bcg_compiler.compat.ops import op_exists, registered_ops
from bcg_compiler.compat.regions import inline_regions
from bcg_compiler.dump import GraphDump
from bcg_compiler.errors import OptionError, nearest
from bcg_compiler.facts import AnnotatedGraph, collect_facts
from bcg_compiler.garbage import seldom_collected
from bcg_compiler.lower import UnitCompiler, lower
from bcg_compiler.options import Options, check_mode
from bcg_compiler.passes import run_passes
from bcg_compiler.plan import build_plan
from bcg_compiler.runtime import Program, register
from bcg_compiler.runtime.compiled import Compiled
from bcg_compiler.runtime.unsplit import UnsplitProgram

log = logging.getLogger("bcg_compiler")


@seldom_collected()
def bcg_backend(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs into a program of segments and breaks.

    ``options`` are those of ``bcg_compiler.options.Options``; ``mode`` may be ``default`` or ``reduce-overhead``.
    Raises ``OptionError`` and ``RuleError``, which Dynamo shows as the cause of a ``BackendCompilerFailed``.
    """
    check_mode(mode)
    parsed = Options.parse(options)
    for name in parsed.capturable:
        if "::" in name and not op_exists(name):
            raise OptionError(
                f"Option 'capturable' names {name!r}, which is no operator. {nearest(name, registered_ops())}"
            )
    needs_grad = _needs_grad(module, example_inputs)
    if not needs_grad:
        keep_constant(module)  # before anything is kept of a graph that may be traced again
    dump = GraphDump(parsed)
    asked = parsed.capture
    if any(isinstance(value, FakeTensor) for value in example_inputs):
        parsed = replace(parsed, capture="off")  # a model of fakes, to look at its plan
    _bind_breaks(module)
    program: Program | UnsplitProgram
    if needs_grad:
        dump.unsplit("it was called under grad mode with tensors that require grad", module.code)
        program = _with_grad(module, example_inputs)
    else:
        chosen = segment_compiler(parsed, on_cuda=on_cuda(example_inputs))
        compiler = None if chosen == "eager" else UnitCompiler(chosen, dump.texts)  # its processes start meanwhile
        inline_regions(module)
        graph = collect_facts(module, example_inputs, parsed.capturable)
        dump.traced(graph)
        passes = run_passes(graph, parsed, dump.passed if dump.wanted else None)

        def make(marked: AnnotatedGraph, options: Options) -> Compiled:
            plan = build_plan(marked, passes, replace(options, capture=asked))
            if plan.unpadded is not None:
                log.warning("bcg: a graph is captured in exact shapes and not padded: %s", plan.unpadded.text)
            dump.planned(marked, plan)
            units = {} if compiler is None or plan.uncaptured else compiler.units(marked, plan)
            lowered = lower(marked, plan, units, texts=dump.texts)
            return Compiled(marked, plan, lowered, compiler, dump.texts)

        if parsed.capture == "cuda" and not graph.device.startswith("cuda"):
            raise OptionError(
                f"Option 'capture' is \"cuda\", but the graph computes on {graph.device}. Put the model and its inputs "
                f'on a CUDA device, or leave the option out ("auto" captures by the device).'
            )
        program = Program(make(graph, parsed), parsed, make)
    register(program)
    return program


def segment_compiler(options: Options, *, on_cuda: bool) -> Any:
    """What compiles the segments of a graph: ``"eager"`` (nobody), ``"inductor"`` or the user's own function.

    ``"auto"`` is Inductor on CUDA, where its code was 1.1 to 1.7 times faster for all that was measured
    (docs/bench.md), and eager elsewhere, where captures are emulated and bits are what is looked at.
    """
    if options.capture == "off":
        return "eager"
    if options.segment_compiler != "auto":
        return options.segment_compiler
    return "inductor" if on_cuda and options.capture != "emulated" and find_spec("triton") else "eager"


def start_early(options: Mapping[str, Any] | None, example_inputs: Iterable[Any]) -> None:
    """Start the processes that Inductor compiles in, if it will be asked.

    They take seconds to be there, in which Dynamo traces; kernels that are wanted before are compiled one by one, here.
    Options that are wrong are reported by who compiles.
    """
    with suppress(OptionError):
        if segment_compiler(Options.parse(options), on_cuda=on_cuda(example_inputs)) == "inductor":
            start_workers()


def _bind_breaks(module: GraphModule) -> None:
    """Put the break with its instance in place of the function that stood for it while Dynamo traced.

    Also in the graphs that higher-order operations hold.
    """
    for graph_module in module.modules():
        if not isinstance(graph_module, GraphModule):
            continue
        bound_any = False
        for node in graph_module.graph.nodes:
            bound = as_bound_break(node.target, node.args) if node.op == "call_function" else None
            if bound is not None:
                node.target, node.args = bound
                bound_any = True
        if bound_any:
            graph_module.recompile()


def _needs_grad(module: GraphModule, example_inputs: list[Any]) -> bool:
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs):
        return False
    switched_on = (
        node.target is torch._C._set_grad_enabled and node.args == (True,)
        for node in module.graph.nodes
        if node.op == "call_function"
    )
    return torch.is_grad_enabled() or any(switched_on)


def _with_grad(module: GraphModule, example_inputs: list[Any]) -> UnsplitProgram:
    """Gradients are wanted: the graph runs unsplit, through AOTAutograd.

    One that holds a break runs as it is: AOTAutograd would trace the break's fake and drop its body.
    """
    warnings.warn(
        "bcg: the model was called under grad mode with tensors that require grad, so its graphs run unsplit and "
        "nothing is captured. Call it under torch.no_grad() or torch.inference_mode().",
        RuntimeWarning,
        stacklevel=2,
    )
    if any(isinstance(node.target, BoundBreak) for node in module.graph.nodes):
        collect_facts(module, example_inputs)  # shows each break its fakes, against which it checks its results
        return UnsplitProgram(module.forward, "grad")

    def compiler(inner: GraphModule, _: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(inner.forward)

    try:
        return UnsplitProgram(aot_module_simplified(module, example_inputs, fw_compiler=compiler), "grad")
    except Exception:
        # It may ask for a gradient formula that the caller never needs; autograd asks when backward is run.
        return UnsplitProgram(module.forward, "grad")
