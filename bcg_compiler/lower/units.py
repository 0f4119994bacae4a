"""Compiles the units of a plan: each different one once, and the result is called with the values of each."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from bcg_compiler.compat.fake import fresh_fake
from bcg_compiler.compat.inductor import compile_graph, tracing_context
from bcg_compiler.facts import AnnotatedGraph, ModeState, NodeFacts
from bcg_compiler.facts.node import RANDOM_STATE
from bcg_compiler.plan import CompileUnit, Plan

log = logging.getLogger("bcg_compiler")

#: Takes a graph that returns a tuple, and fakes of its inputs; returns what is called in place of the graph.
SegmentCompiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class CompiledUnit:
    """A unit with what a compiler made of it. ``eager`` is the unit's graph as it is."""

    def __init__(self, eager: GraphModule, run: Callable[..., Any]) -> None:
        self.eager = eager
        self.run = run

    def __call__(self, *args: Any) -> Any:
        seen_by = _recorder.get()
        return self.run(*args) if seen_by is None else seen_by(self, args)


#: Who is to be called in place of compiled units, whose operations cannot be seen from outside.
_recorder: ContextVar[Callable[[CompiledUnit, tuple[Any, ...]], Any] | None] = ContextVar("bcg_recorder", default=None)


@contextmanager
def units_seen_by(recorder: Callable[[CompiledUnit, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within it calls of compiled units go to ``recorder``."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


class UnitCompiler:
    """The compiled units of one graph, by their keys.

    A unit that cannot be compiled runs as it is: ``refused`` counts them, by reason.
    """

    def __init__(self, compiler: SegmentCompiler | str) -> None:
        context = tracing_context()
        self._compile: SegmentCompiler
        if compiler == "inductor":
            self._compile = lambda module, fakes: compile_graph(module, fakes, context)
        else:
            assert callable(compiler)
            self._compile = compiler
        self._compiled: dict[str, CompiledUnit | None] = {}
        self.refused: Counter[str] = Counter()

    def units(self, graph: AnnotatedGraph, plan: Plan) -> dict[str, CompiledUnit]:
        """What is called for each unit, by its key; units that run as they are are left out."""
        wanted = {unit.key: unit for step in plan.segments for unit in step.units}
        for key, unit in wanted.items():
            if key not in self._compiled:
                self._compiled[key] = self._try(graph, unit)
        return {key: made for key in wanted if (made := self._compiled[key]) is not None}

    def give_up(self, keys: Sequence[str], reason: str) -> bool:
        """Run these units as they are from now on; whether any of them was compiled."""
        given_up = [key for key in keys if self._compiled.get(key) is not None]
        for key in given_up:
            self._compiled[key] = None
            self.refused[reason] += 1
        return bool(given_up)

    def _try(self, graph: AnnotatedGraph, unit: CompileUnit) -> CompiledUnit | None:
        nodes = {f.ordinal: n for n, f in {**graph.input_facts, **graph.facts}.items()}
        facts = [graph.facts[nodes[ordinal]] for ordinal in unit.nodes]
        refusal = why_not(facts, [graph.producer_facts(nodes[ordinal]) for ordinal in unit.inputs])
        if refusal:
            self.refused[refusal] += 1
            return None
        try:
            module = unit_graph(graph, unit, nodes)
            return CompiledUnit(module, self._compile(module, _fakes(graph, unit, nodes)))
        except Exception as error:
            # Results are the same without it, so this is no reason to stop: but it is said.
            where = f"{facts[0]} to {facts[-1]} ({facts[0].source})"
            log.warning(
                "bcg: a part of a segment, %s, could not be compiled and runs as it is: %s: %s",
                where,
                type(error).__name__,
                (str(error).strip().splitlines() or [""])[0],
            )
            self.refused["compile_failed"] += 1
            return None


def why_not(facts: Sequence[NodeFacts], given: Sequence[NodeFacts | None]) -> str:
    """The reason code why a unit must not be compiled; "" if it may be."""
    if any(f.mode != ModeState() for f in facts):
        return "unit_mode"  # a compiler would trace it in the mode of now
    if any(RANDOM_STATE in f.writes for f in facts):
        return "unit_random"  # it has random numbers of its own
    if any(f.opaque for f in facts):
        return "unit_opaque"
    written = frozenset().union(*(f.writes for f in facts))
    roots = [f.results for f in given if f is not None]
    if any(sum(root in of for of in roots) > 1 for root in written):
        return "unit_alias"  # it would not see that two inputs share what is written
    outside = frozenset().union(*roots)
    if any(f.reshapes & outside for f in facts):
        return "unit_reshapes"
    return ""


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
    made.output(tuple(copies[nodes[ordinal]] for ordinal in unit.outputs))
    return GraphModule(graph.module, made)


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
