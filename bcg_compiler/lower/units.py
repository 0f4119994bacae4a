"""Compiles the units of a plan: each different one once, and the result is called with the values of each."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from bcg_compiler.compat.fake import fresh_fake
from bcg_compiler.compat.inductor import compile_graph, missing_tool, start_workers, tracing_context, written_code
from bcg_compiler.compat.kernels_later import Kernels
from bcg_compiler.compat.threads import threads_served_soon
from bcg_compiler.facts import AnnotatedGraph, ModeState, NodeFacts
from bcg_compiler.facts.node import RANDOM_STATE, WORLD
from bcg_compiler.lower.compiled import CompiledUnit, is_odd
from bcg_compiler.lower.exact import exact_fakes
from bcg_compiler.lower.products import compile_kernels, in_one_launch, products_of_one_input
from bcg_compiler.lower.texts import GENERATED, Texts
from bcg_compiler.plan import CompileUnit, Plan

log = logging.getLogger("bcg_compiler")

#: Takes a graph that returns a tuple, and fakes of its inputs; returns what is called in place of the graph.
SegmentCompiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class UnitCompiler:
    """The compiled units of one graph, by their keys.

    A unit that cannot be compiled runs as it is: ``refused`` counts them, by reason. ``texts`` keeps the code of their
    graphs.
    """

    def __init__(self, compiler: SegmentCompiler | str, texts: Texts | None = None) -> None:
        self._texts = texts
        context = tracing_context()
        self._compile: SegmentCompiler
        self._compile_exact: SegmentCompiler  # what it returns is captured at its first call
        self._inductor = compiler == "inductor"
        if self._inductor:
            start_workers()
            self._compile = lambda module, fakes: compile_graph(module, fakes, context)
            self._compile_exact = lambda module, fakes: compile_graph(module, fakes, context, tuned=True)
        else:
            assert callable(compiler)
            self._compile = self._compile_exact = compiler
        self._compiled: dict[str, CompiledUnit | None] = {}
        self._toolless = False  # whether it was seen that there is nothing to compile with
        self._late = False  # whether Dynamo's own call of the backend is over
        self.refused: Counter[str] = Counter()
        self.specialized = 0

    def units(self, graph: AnnotatedGraph, plan: Plan) -> dict[str, CompiledUnit]:
        """What is called for each unit, by its key; units that run as they are are left out."""
        nodes = {f.ordinal: n for n, f in graph.known.items()}
        touched = Touched.of(graph.facts.values())
        wanted: dict[str, CompileUnit] = {}
        refused: dict[str, str] = {}
        for unit in (unit for step in plan.segments for unit in step.units):
            wanted.setdefault(unit.key, unit)
            # The key says nothing of memory: of units of one key some may share it and others not.
            if unit.key not in refused and (reason := why_not(graph, unit, nodes, touched)):
                refused[unit.key] = reason
        for key, reason in refused.items():
            if self._compiled.get(key, self) is not None:
                self._compiled[key] = None
                self.refused[reason] += 1
        missing = {key: unit for key, unit in wanted.items() if key not in self._compiled}
        if self._inductor:
            self._compiled |= self._compile_together(graph, missing, nodes)
        else:
            self._compiled |= {key: self._try(graph, unit, nodes) for key, unit in missing.items()}
        self._late = True
        return {key: made for key in wanted if (made := self._compiled[key]) is not None}

    def units_for(self, graph: AnnotatedGraph, plan: Plan, sizes: Mapping[str, int]) -> dict[str, CompiledUnit]:
        """The same, and those that depend on ``sizes``, by the symbols of the graph, are compiled for exactly these."""
        nodes = {f.ordinal: n for n, f in graph.known.items()}
        found = self.units(graph, plan)
        for unit in {unit.key: unit for step in plan.segments for unit in step.units if unit.key in found}.values():
            fakes = exact_fakes(_fakes(graph, unit, nodes), graph.fake_mode, sizes)
            if fakes is None:
                continue
            try:
                module = self._unit_graph(graph, unit, nodes)
                with self._code_seen(unit.key):
                    run = self._compile_exact(self._to_compile(module, graph, unit, nodes), fakes)
            except Exception as error:
                _warn(graph, unit, nodes, error, f"for {sizes}, where it runs as in other buckets")
                self.refused["specialize_failed"] += 1
                continue
            found[unit.key] = found[unit.key].compiled_as(run)
            self.specialized += 1
        return found

    def give_up(self, keys: Sequence[str], reason: str) -> bool:
        """Run these units as they are from now on; whether any of them was compiled."""
        given_up = [key for key in dict.fromkeys(keys) if self._compiled.get(key) is not None]
        for key in given_up:
            self._compiled[key] = None
            self.refused[reason] += 1
        return bool(given_up)

    def _unit_graph(self, graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> GraphModule:
        module = unit_graph(graph, unit, nodes)
        if self._texts is not None:
            keep_code(module, f"units/{unit.key}", self._texts)
        return module

    def _to_compile(
        self, module: GraphModule, graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]
    ) -> GraphModule:
        """What the compiler is given: a function of the user's gets the operations as they are."""
        together = products_of_one_input(graph, unit, nodes) if self._inductor else []
        return in_one_launch(module, together) if together else module

    def _compile_together(
        self, graph: AnnotatedGraph, units: Mapping[str, CompileUnit], nodes: Mapping[int, Node]
    ) -> dict[str, CompiledUnit | None]:
        """Let Inductor lower all of them before any kernel is waited for."""
        made: dict[str, CompiledUnit | None] = {}
        kernels = {key: Kernels() for key in units}
        with threads_served_soon():
            for key, unit in units.items():
                with kernels[key].later():
                    made[key] = self._try(graph, unit, nodes)
            # Our kernels first, which this thread compiles while Inductor's are compiled elsewhere.
            for finish in (lambda key: compile_kernels(graph, units[key], nodes), lambda key: kernels[key].finish()):
                for key in units:
                    if made[key] is not None:
                        try:
                            finish(key)
                        except Exception as error:
                            made[key] = None
                            self._refuse(graph, units[key], nodes, error)
        return made

    @contextmanager
    def _code_seen(self, key: str) -> Iterator[None]:
        if self._texts is None:
            yield
            return
        with written_code() as codes:
            yield
        for code in codes:
            self._texts.compiled(f"units/{key}", code)

    def with_every_value(
        self, graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]
    ) -> tuple[tuple[int, ...], Callable[..., Any]] | None:
        """A unit compiled once more so that it gives the values of all its nodes: their ordinals, and the code.

        ``None`` if it cannot be. To see which operation a compiler gets wrong; that it keeps all values may mend it.
        """
        every = tuple(o for o in unit.nodes if isinstance(graph.fakes.get(nodes[o]), torch.Tensor))
        whole = replace(unit, outputs=every)
        try:
            module = self._to_compile(unit_graph(graph, whole, nodes), graph, whole, nodes)
            return every, self._compile(module, _fakes(graph, whole, nodes))
        except Exception:
            return None

    def _refuse(self, graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node], error: Exception) -> None:
        """Let a unit that cannot be compiled run as it is: said, but no reason to stop, as results are the same."""
        if tool := missing_tool(error):
            _say_once(f"bcg: segments run as they are, uncompiled. {tool}")
            self._toolless = True
            self.refused["no_compiler"] += 1
            return
        _warn(graph, unit, nodes, error, "and runs as it is")
        self.refused["compile_failed"] += 1

    def _try(self, graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> CompiledUnit | None:
        if self._toolless:
            self.refused["no_compiler"] += 1
            return None
        facts = [graph.facts[nodes[ordinal]] for ordinal in unit.nodes]
        assumed = _guards(graph)
        try:
            module = self._unit_graph(graph, unit, nodes)
            with self._code_seen(unit.key):
                made = self._compile(self._to_compile(module, graph, unit, nodes), _fakes(graph, unit, nodes))
        except Exception as error:
            self._refuse(graph, unit, nodes, error)
            return None
        if self._late and _guards(graph) > assumed:
            self.refused["unit_sizes"] += 1  # Dynamo has its guards already, and would not check this one
            return None
        writes = frozenset().union(*(f.writes for f in facts))
        given = [graph.producer_facts(nodes[ordinal]) for ordinal in taken(graph, unit, nodes)]
        written = [i for i, f in enumerate(given) if f is not None and f.specs and f.results & writes]
        given_roots = [f.results for f in given if f is not None and f.specs]
        made_roots = [graph.facts[nodes[ordinal]].results for ordinal in unit.outputs]
        shares = any(sum(root in of for of in (*given_roots, *made_roots)) > 1 for of in made_roots for root in of)
        return CompiledUnit(module, made, written, shares, lambda reason: self.refused.update([reason]))


@functools.cache
def _say_once(text: str) -> None:
    """Warn, once in a process."""
    log.warning(text)


def _warn(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node], error: Exception, instead: str) -> None:
    first, last = (graph.facts[nodes[ordinal]] for ordinal in (unit.nodes[0], unit.nodes[-1]))
    log.warning(
        "bcg: a part of a segment, %s, could not be compiled %s: %s: %s",
        f"{first} to {last} ({first.source})",
        instead,
        type(error).__name__,
        (str(error).strip().splitlines() or [""])[0],
    )


class Touched(NamedTuple):
    """Roots that anything of a graph writes, reshapes in place, and addresses the storage of."""

    written: frozenset[int]
    reshaped: frozenset[int]
    addressed: frozenset[int]

    @classmethod
    def of(cls, facts: Collection[NodeFacts]) -> "Touched":
        """What these nodes touch."""
        strided = (f for f in facts if any(name.startswith("aten::as_strided") for name in f.aten))
        return cls(
            frozenset().union(*(f.writes for f in facts)),
            frozenset().union(*(f.reshapes for f in facts)),
            frozenset().union(*(f.reads | f.results for f in strided)),
        )


def why_not(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node], touched: Touched) -> str:
    """The reason code why a unit must not be compiled; "" if it may be. ``touched`` is what the whole graph does."""
    facts = [graph.facts[nodes[ordinal]] for ordinal in unit.nodes]
    if any(f.mode != ModeState() for f in facts):
        return "unit_mode"  # a compiler would trace it in the mode of now
    if any(f.opaque or {WORLD, RANDOM_STATE} <= f.writes for f in facts):
        return "unit_opaque"
    if any(RANDOM_STATE in f.writes for f in facts):
        return "unit_random"  # it has random numbers of its own
    writes = frozenset().union(*(f.writes for f in facts))
    roots = [f.results for o in unit.inputs if (f := graph.producer_facts(nodes[o])) is not None]
    if any(sum(root in of for of in roots) > 1 for root in writes):
        return "unit_alias"  # it would not see that two inputs share what is written
    if any("dropout" in f.op and f.results & touched.written for f in facts):
        return "unit_alias"  # of nothing it is its argument, and Inductor's is a copy, in which a write is lost
    outside = frozenset().union(*roots)
    made = [graph.facts[nodes[ordinal]].results for ordinal in unit.outputs]
    if any(sum(root in of for of in made) > 1 for root in touched.written - outside):
        return "unit_alias"  # it might give each output memory of its own
    # What is reshaped anywhere does not look, where the unit takes it, as it looks at the end of the graph.
    if touched.reshaped & outside:
        return "unit_reshapes"
    if touched.addressed & outside.union(*made):
        return "unit_storage"  # what lies around a view is not there, or elsewhere, when a compiler has been at it
    if any(is_odd(graph.fakes.get(nodes[ordinal])) for ordinal in unit.inputs):
        return "unit_odd_input"
    if any(nodes[o].op == "placeholder" and _is_expanded(graph.fakes.get(nodes[o])) for o in unit.inputs):
        return "unit_odd_input"  # the memory that it is copied to for a replay has other strides
    return ""


def _is_expanded(value: Any) -> bool:
    """Whether several elements of a tensor are one in memory because it has a stride of 0."""
    if not isinstance(value, torch.Tensor):
        return False
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1)
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def _guards(graph: AnnotatedGraph) -> int:
    """How much has been assumed of the sizes that the graph leaves open."""
    env = getattr(graph.fake_mode, "shape_env", None)
    return 0 if env is None else len(env.guards)


def unit_graph(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> GraphModule:
    """A unit as a graph of its own, which takes the unit's inputs in order and returns a tuple."""
    made, copies = Graph(), dict[Node, Node]()
    for ordinal in unit.inputs:
        if not isinstance(graph.constants.get(nodes[ordinal]), GraphModule):
            copies[nodes[ordinal]] = made.placeholder(f"v{ordinal}")
    for ordinal in unit.inputs:
        if isinstance(graph.constants.get(nodes[ordinal]), GraphModule):
            copies[nodes[ordinal]] = made.get_attr(str(nodes[ordinal].target))
    for ordinal in unit.nodes:
        copy = copies[nodes[ordinal]] = made.node_copy(nodes[ordinal], copies.__getitem__)
        copy.meta = {k: v for k, v in copy.meta.items() if k in ("stack_trace", "nn_module_stack")}
    for node, copy in copies.items():
        if node in graph.fakes:
            # The cache of AOTAutograd takes methods of what it knows to be tensors only.
            copy.meta["example_value"] = graph.fakes[node]
    made.output(tuple(copies[nodes[ordinal]] for ordinal in unit.outputs))
    return GraphModule(graph.module, made)


def keep_code(module: GraphModule, name: str, texts: Texts) -> None:
    """Let the code of a graph be that of a file, in which its operations have the user's lines beside them."""
    code = module.graph.python_code("self", verbose=True)
    file = texts.file(name, code.src)
    if file is not None:
        scope = {**code.globals, "__name__": GENERATED}
        exec(compile(code.src, file, "exec"), scope)
        type(module).forward = scope["forward"]  # a class of its own, as ``GraphModule.recompile`` does it


def taken(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> list[int]:
    """The inputs that a unit's graph has placeholders for, by ordinal."""
    return [o for o in unit.inputs if not isinstance(graph.constants.get(nodes[o]), GraphModule)]


def _fakes(graph: AnnotatedGraph, unit: CompileUnit, nodes: Mapping[int, Node]) -> list[Any]:
    found = []
    for ordinal in taken(graph, unit, nodes):
        value = graph.fakes[nodes[ordinal]]
        if isinstance(value, torch.Tensor):
            fake = fresh_fake(value, graph.fake_mode)
            value = fake.requires_grad_(value.requires_grad) if fake.is_floating_point() else fake
        found.append(value)
    return found
