"""Dynamo's own graphs, run node by node as they are, beside the values between the steps of compiled programs."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from bcg_compiler.backend import bcg_backend
from bcg_compiler.checks.numbers import Difference, tensor_difference
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.facts.node import Source
from bcg_compiler.plan import Step

#: A graph by what Dynamo traced, and its how-manieth run in one call of the model.
Run = tuple[tuple[str, ...], int]


@dataclass(frozen=True)
class Boundary:
    """A value between two steps, eager against replay.

    ``step``, ``step_kind``  the step that gives it; ``graph`` numbers the graphs of a call
    ``difference``           how far the replay's live rows are from eager; ``None`` if they are equal
    """

    graph: int
    step: int
    step_kind: str
    ordinal: int
    op: str
    module: str
    source: Source | None
    difference: Difference | None

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        line = f" ({self.source})" if self.source else ""
        return f"{self.step_kind} {self.step}, %{self.ordinal} {self.op}{where}{line}"


@dataclass(frozen=True)
class _Kept:
    """A copy of a value between steps; ``after`` are the names of the nodes of its step."""

    boundary: Boundary
    value: Tensor
    after: frozenset[str]


class Numbers:
    """Collects values between steps while a compiled model runs, and compares them while its reference does."""

    def __init__(self) -> None:
        self.boundaries: list[Boundary] = []
        self._kept: dict[Run, dict[str, _Kept]] = {}
        self._order: list[Run] = []
        self._runs: Counter[tuple[str, ...]] = Counter()
        self._now: Run | None = None
        self._known: dict[int, tuple[AnnotatedGraph, Mapping[int, tuple[str, NodeFacts]]]] = {}

    def begin(self) -> None:
        """A new call of the compiled model."""
        self._kept.clear()
        self._order.clear()
        self.boundaries.clear()
        self._runs.clear()

    def begin_reference(self) -> None:
        """The same call of the reference."""
        self._runs.clear()

    def compiled(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        """A backend: this package's, each run of a program noted."""

        def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            traced = _traced(module)
            program = bcg_backend(module, example_inputs, options=options)

            def run(*args: Any) -> Any:
                self._now = self._next(traced)
                return program(*args)

            return run

        return backend

    def reference(self) -> Callable[..., Any]:
        """A backend: the graph as it is, each node compared with what was collected."""

        def backend(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
            traced = _traced(module)
            return lambda *args: _Comparing(module, self, self._next(traced)).run(*args)

        return backend

    def told(self, graph: AnnotatedGraph, step: Step, ordinal: int, value: Any) -> None:
        """A step of a replay has given a value."""
        if not isinstance(value, Tensor) or self._now is None:
            return
        if id(graph) not in self._known:
            self._known[id(graph)] = graph, {f.ordinal: (node.name, f) for node, f in graph.facts.items()}
        known = self._known[id(graph)][1]
        name, facts = known[ordinal]
        _, facts = known.get(facts.group, (name, facts))  # an item of a tuple is of what made the tuple
        if self._now not in self._kept:
            self._order.append(self._now)
        place = (self._order.index(self._now), step.index, step.kind, ordinal, facts.op, facts.module, facts.source)
        after = frozenset(known[n.ordinal][0] for n in step.nodes)
        self._kept.setdefault(self._now, {})[name] = _Kept(Boundary(*place, None), value.clone(), after)

    def wanted(self, run: Run) -> Mapping[str, _Kept]:
        """What was collected in a run, by the name of the node."""
        return self._kept.get(run, {})

    def _next(self, traced: tuple[str, ...]) -> Run:
        self._runs[traced] += 1
        return traced, self._runs[traced]


class _Comparing(Interpreter):
    """Runs a graph; the value of a node is compared once all nodes of its step have run, which may write it."""

    def __init__(self, module: GraphModule, numbers: Numbers, run: Run) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._numbers = numbers
        self._kept = numbers.wanted(run)
        last: dict[str, Node] = {}
        positions = {node.name: (place, node) for place, node in enumerate(module.graph.nodes)}
        for name, kept in self._kept.items():
            there = [positions[other] for other in {name, *kept.after} if other in positions]
            if name in positions:
                last[name] = max(there)[1]
        self._due: dict[Node, list[str]] = {}
        for name, node in last.items():
            self._due.setdefault(node, []).append(name)
        self._values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node, and compare what is due behind it."""
        value = super().run_node(n)
        if n.name in self._kept:
            self._values[n.name] = value
        for name in self._due.get(n, ()):
            kept = self._kept[name]
            if isinstance(want := self._values.pop(name, None), Tensor):
                difference = tensor_difference(live(kept.value, want), want)
                self._numbers.boundaries.append(replace(kept.boundary, difference=difference))
        return value


def live(value: Tensor, like: Tensor) -> Tensor:
    """The part of a value in a bucket that has the shape of the value at the exact number of rows."""
    for dim, size in enumerate(like.shape if value.dim() == like.dim() else ()):
        if size < value.shape[dim]:
            value = value.narrow(dim, 0, size)
    return value


def _traced(module: GraphModule) -> tuple[str, ...]:
    return tuple(f"{node.op} {node.name}" for node in module.graph.nodes)
