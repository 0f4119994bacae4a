"""Runs a graph once on fresh fake tensors and collects what each node does.

Note [Why a second run on fakes]
    The values that Dynamo leaves on its nodes show the state at the end of its trace: after ``x.unsqueeze_(0)`` every
    earlier mention of ``x`` has the new shape. So the graph is run again, in order, on fakes that nothing else holds,
    with a recorder below. Storages of fakes behave like real ones, which gives aliases and writes for views, in-place
    operations and custom ops alike. No guard may be added on the way: symbolic sizes are only ever printed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat import dynamo
from bcg_compiler.compat.fake import (
    FakeTensorMode,
    forget_sizes,
    fresh_fake,
    keeps_sizes,
    size_conditions,
    size_expression,
    tracing,
    tracing_fake_mode,
    tree_leaves,
)
from bcg_compiler.compat.functorch import leave_transforms, transform_depth
from bcg_compiler.compat.recorder import OpRecorder, Recorded
from bcg_compiler.facts import footprint, known_ops
from bcg_compiler.facts.allocations import new_storages
from bcg_compiler.facts.graph import AnnotatedGraph
from bcg_compiler.facts.modes import ModeTracker, is_functorch_node, is_mode_node, nesting_change
from bcg_compiler.facts.node import (
    FENCE,
    RANDOM_STATE,
    STREAMS,
    WORLD,
    NodeFacts,
    Reason,
    RowVerdict,
    Source,
    TensorSpec,
)
from bcg_compiler.facts.repeats import Again, Call, Pattern, Repeats, Seen, Storage
from bcg_compiler.facts.roots import Roots, storage_keys
from bcg_compiler.facts.row_proof import Ran, row_verdicts
from bcg_compiler.facts.sizes import Symbols


def collect_facts(module: GraphModule, example_inputs: list[Any], capturable: tuple[str, ...] = ()) -> AnnotatedGraph:
    """The facts of all nodes of ``module``, Dynamo's graph, whose break nodes are bound (``BoundBreak``).

    ``example_inputs`` are the real values Dynamo compiles for; only sizes, types and shared storages are read.
    ``capturable`` are the names that the user declared safe to capture.
    """
    collector = _Collector(module, example_inputs, frozenset(capturable))
    collector.run()
    return collector.annotated()


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class _Collector:
    def __init__(self, module: GraphModule, example_inputs: list[Any], declared: frozenset[str]) -> None:
        self.module = module
        self.declared = declared
        self.mode = tracing_fake_mode()
        self.roots = Roots()
        self.repeats = Repeats(self.mode, self.roots)
        self.values: dict[Node, Any] = {}
        self.facts: dict[Node, NodeFacts] = {}
        self.input_facts: dict[Node, NodeFacts] = {}
        self.mode_nodes: dict[int, Node] = {}
        self.constants: dict[Node, Any] = {}
        self.modes = ModeTracker()
        placeholders = module.graph.find_nodes(op="placeholder")
        self.inputs = dict(zip(placeholders, example_inputs, strict=True))
        self.symbols = Symbols(frozenset())
        self.device = "cpu"
        self._seen: dict[Node, Seen | Again] = {}
        self._patterns: dict[Node, Pattern] = {}  # what nodes have in common that do the same
        self._measured: list[torch.Tensor] = []  # whose data gave the size of another
        self._depth = 0  # functorch transforms that are open
        self._region: int | None = None

    def run(self) -> None:
        self._bind_inputs()
        with tracing(self.mode), _real_tensors_allowed(self.mode), torch.inference_mode(), _everything_restored():
            for ordinal, node in enumerate(self.module.graph.nodes):
                if node.op in ("placeholder", "output"):
                    continue
                if node.op == "get_attr":
                    self._bind_constant(node, ordinal)
                elif is_mode_node(node):
                    self.mode_nodes[ordinal] = node
                    self.modes.see(node, ordinal)
                    self.values[node] = self._call(node)
                else:
                    self._see_node(node, ordinal)
        self._add_reasons()

    def annotated(self) -> AnnotatedGraph:
        facts = _with_outside_effects(self.facts, self.roots)
        return AnnotatedGraph(
            module=self.module,
            facts=facts,
            input_facts=self.input_facts,
            device=self.device,
            whole=dynamo.is_whole_frame(self.module),
            parameters=self.roots.parameters,
            outside=self.roots.outside,
            written=frozenset().union(*(f.writes for f in self.facts.values())),
            fakes=self.values,
            fake_mode=self.mode,
            rows=self._row_verdicts(),
            conditions=size_conditions(self.mode),
            input_views=self._input_views(),
            mode_nodes=self.mode_nodes,
            constants=self.constants,
            exit_grad=self.modes.state.grad,
        )

    def _row_verdicts(self) -> tuple[RowVerdict, ...]:
        callers: dict[int, torch.Tensor] = {}
        outside: list[torch.Tensor] = []
        for node, facts in self.input_facts.items():
            fake = self.values[node]
            if not isinstance(fake, torch.Tensor):
                continue
            if node.op == "get_attr" or dynamo.comes_back(node):
                outside.append(fake)
            else:
                callers[facts.ordinal] = fake
        returned = tree_leaves(self._given(self.module.graph.output_node().args))
        return row_verdicts(callers, outside, self._ran, returned)

    def _ran(self) -> list[Ran]:
        return [(n, self.facts[n], seen.calls, seen.given, seen.result) for n, seen in self._seen.items()]

    def _input_views(self) -> frozenset[tuple[int, int]]:
        inputs = {key: f.ordinal for n, f in self.input_facts.items() for key in _keys_of(self.values[n])}
        returned = [n for n in self.module.graph.output_node().all_input_nodes if n in self.facts]
        return frozenset(
            (self.facts[node].ordinal, inputs[key])
            for node in returned
            for key in _keys_of(self.values[node])
            if key in inputs
        )

    # -- inputs -------------------------------------------------------------------------------------------------

    def _bind_inputs(self) -> None:
        for ordinal, node in enumerate(self.module.graph.nodes):
            if node.op != "placeholder":
                continue
            example = self.inputs[node]
            described = node.meta.get("example_value", example)
            if isinstance(example, torch.Tensor):
                fake = fresh_fake(described if isinstance(described, torch.Tensor) else example, self.mode)
                root = self.roots.of_input(example, fake, node)
                self.values[node] = fake
                self._see_device(fake)
                owner = dynamo.owner_of(node)
                facts = NodeFacts(ordinal, "input", results=root, specs=specs_of(fake), owner=owner)
            else:
                self.values[node] = described
                facts = NodeFacts(ordinal, "input", host_only=True, size=_size(described))
            self.input_facts[node] = facts
        self.symbols = Symbols.of_inputs(list(self.values.values()))

    def _bind_constant(self, node: Node, ordinal: int) -> None:
        value: Any = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        self.constants[node] = value
        if isinstance(value, torch.Tensor):
            fake = fresh_fake(value, self.mode)
            root = self.roots.of_input(value, fake, node)
            self._see_device(fake)
            self.values[node] = fake
            self.input_facts[node] = NodeFacts(ordinal, "constant", results=root, specs=specs_of(fake))
        else:
            self.values[node] = value
            self.input_facts[node] = NodeFacts(ordinal, "constant", host_only=True)

    # -- nodes --------------------------------------------------------------------------------------------------

    def _see_node(self, node: Node, ordinal: int) -> None:
        group = self._group(node, ordinal)
        given = self._given(node.args), self._given(node.kwargs)
        streams = dynamo.streams_of(node)
        known = streams is not None or _reads_a_number(node)
        in_transform = self._depth > 0 or is_functorch_node(node)
        call = None if known or in_transform else self.repeats.call(node, *given)
        again = None if call is None else self.repeats.again(call, given)
        if again is None:
            self._run_node(node, ordinal, group, given, call)
        else:
            self._repeat_node(node, ordinal, group, again)
        # A write by a repeat, or through what a repeat made, is none that a fake has seen.
        for tensor in self._measured:
            if self.roots.number(tensor) in self.facts[node].writes:
                forget_sizes(tensor)

    def _repeat_node(self, node: Node, ordinal: int, group: int, again: Again) -> None:
        pattern = again.pattern
        first = self.roots.reserve(pattern.count)
        for tensor, at in again.made:
            self.roots.place(tensor, first + at)

        def touched(storages: Iterable[Storage]) -> frozenset[int]:
            new = {first + storage.at for storage in storages if not storage.of_argument}
            return self.roots.of([again.tensors[s.at] for s in storages if s.of_argument]) | new

        reads = touched(pattern.reads)
        tensors = _tensors(again.result)
        for tensor in tensors:
            self._see_device(tensor)
        results = self.roots.of(tensors)
        if _gives_argument(pattern.facts.aten):
            results = self.roots.may_alias(results, reads)
        moved = first - pattern.first
        self.values[node] = again.result
        self.facts[node] = replace(
            pattern.facts,
            ordinal=ordinal,
            **_place_of(node),
            reads=reads,
            writes=touched(pattern.writes) | {root for root in pattern.facts.writes if root < 0},
            results=results,
            fresh=frozenset(root for root in results if root >= first),
            allocates=tuple(replace(new, root=new.root + moved) for new in pattern.facts.allocates),
            mode=self.modes.state,
            group=group,
        )
        self._seen[node], self._patterns[node] = again, pattern

    def _run_node(self, node: Node, ordinal: int, group: int, given: tuple[Any, Any], call: Call | None) -> None:
        args, kwargs = given
        before = self.roots.known
        recorder = OpRecorder()
        failure: Reason | None = None
        streams = dynamo.streams_of(node)
        try:
            with recorder:
                known = streams is not None or _reads_a_number(node)
                result = _described(node, self.mode) if known else self._call(node)
        except Exception as error:
            # Whatever cannot be run on fakes is run for real in a break; Dynamo's own value describes the result.
            failure = Reason(
                "unknown_op", f"it cannot be run on fake tensors ({type(error).__name__}: {_first(error)})"
            )
            result = _described(node, self.mode)
        self.values[node] = result
        calls = recorder.calls
        reads = self.roots.of([t for call in calls for t in call.reads] + _tensors((args, kwargs)))
        writes = self.roots.of([t for call in calls if footprint.writes_data(call) for t in call.writes])
        reshapes = self.roots.of([t for call in calls if footprint.is_inplace_view(call) for t in call.writes])
        opaque = failure is not None or footprint.opaque_function(node) is not None
        if isinstance(node.target, BoundBreak):
            opaque, calls = True, []
            writes = self.roots.of(node.target.spec.mutated(args, kwargs))
        elif failure is not None or footprint.holds_break((args, kwargs)):
            opaque = True
            writes = self.roots.of(_tensors((args, kwargs)))
        if opaque or any(footprint.foreign_op(call) for call in calls):
            writes |= {WORLD, RANDOM_STATE}
        if any(footprint.is_random(call) for call in calls):
            writes |= {RANDOM_STATE}
        if streams is not None:
            failure = Reason("side_stream", f"it orders work on streams {_listed(streams)}, which a replay would not")
            if not dynamo.is_stream_lookup(node):
                writes |= {STREAMS}
        elif self._is_unknown_state(node, calls, result):
            writes |= {FENCE}
        tensors = _tensors(result)
        for tensor in tensors:
            self._see_device(tensor)
        results = self.roots.of(tensors)
        gives_argument = _gives_argument(recorder.names)
        if isinstance(node.target, BoundBreak):
            # Whatever its fake says, the body may hand an argument back; and it may keep what it was given.
            results = self.roots.may_alias(results, reads)
            self.roots.reachable |= results
        elif gives_argument:
            results = self.roots.may_alias(results, reads)
        self.facts[node] = NodeFacts(
            ordinal=ordinal,
            op=footprint.node_name(node),
            **_place_of(node),
            aten=tuple(recorder.names),
            kernels=footprint.kernel_count(node, calls),
            reads=reads,
            writes=writes,
            reshapes=reshapes,
            results=results,
            fresh=frozenset(root for root in results if root >= before),
            allocates=new_storages(calls, tensors, self.roots.number, before, gives_argument),
            specs=specs_of(result),
            size=_size(result),
            uncapturable=(failure,) if failure else (),
            host_only=not tensors and not _tensors((args, kwargs)),
            opaque=opaque,
            mode=self.modes.state,
            group=group,
        )
        self._seen[node] = seen = Seen(given, calls, result)
        self._measured += [t for c in calls if self.symbols.data(c.results) for t in c.reads if keeps_sizes(t)]
        if call is not None and failure is None:
            pattern = self.repeats.keep(node, call, seen, self.facts[node], before)
            if pattern is not None:
                self._patterns[node] = pattern

    def _call(self, node: Node) -> Any:
        args, kwargs = self._given(node.args), self._given(node.kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))(*args, **kwargs)
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator) and footprint.op_name(target) in known_ops.WRAPPERS:
            inner = footprint.graph_operand(args)
            if inner is not None:
                run, operands = inner
                return run(*operands)
        return target(*args, **kwargs)

    def _given(self, value: Any) -> Any:
        """An argument with the values of its nodes, in plain containers: custom ops refuse FX's own list type."""
        if isinstance(value, Node):
            return self.values[value]
        if isinstance(value, list):
            return [self._given(item) for item in value]
        if isinstance(value, tuple):
            items = [self._given(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            return {key: self._given(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self._given(value.start), self._given(value.stop), self._given(value.step))
        return value

    def _group(self, node: Node, ordinal: int) -> int:
        """Functorch regions stay whole: their values exist only between the nodes that open and close them."""
        change = nesting_change(node)
        if self._depth == 0 and change > 0:
            self._region = ordinal
        inside = self._region is not None and (self._depth > 0 or change > 0)
        self._depth += change
        if inside:
            assert self._region is not None
            return self._region
        # An item of a tuple is no operation of its own: it stays where the tuple was made.
        if footprint.node_name(node) == "getitem" and isinstance(node.args[0], Node):
            producer = node.args[0]
            if producer in self.facts and isinstance(self.values[producer], (tuple, list)):
                return self.facts[producer].group
        return ordinal

    @staticmethod
    def _is_unknown_state(node: Node, calls: list[Recorded], result: Any) -> bool:
        """Whether nothing may be moved past the node, for what it sets: the memory behind a tensor; or whatever a call
        into torch sets that dispatches nothing, returns nothing and is not a check.
        """
        if any(footprint.op_name(call.op) in known_ops.REPLACES_STORAGE for call in calls):
            return True
        if calls or node.users or result is not None or node.op != "call_function" or is_functorch_node(node):
            return False
        if isinstance(node.target, BoundBreak):
            return False
        return not getattr(node.target, "__name__", "").lstrip("_").startswith(known_ops.NO_STATE)

    def _add_reasons(self) -> None:
        """Once all devices are known: whether a CPU tensor is out of place depends on the whole graph."""
        live: set[Node] = set()  # numbers that are new at each call, also where Dynamo knows their value
        known: dict[Pattern, tuple[Reason, ...]] = {}
        for node, seen in self._seen.items():
            pattern = self._patterns.get(node)
            if pattern in known:
                found = known[pattern]
            else:
                found = footprint.reasons_against_capture(
                    node, seen.calls, seen.given, seen.result, self.symbols, self.device, self.declared
                )
                if pattern is not None:
                    known[pattern] = found
            if not found and live & set(node.all_input_nodes):
                found = (Reason("host_number", "an argument is a number read on the host"),)
            if found:
                if any(isinstance(leaf, _NUMBERS) for leaf in tree_leaves(seen.result)):
                    live.add(node)
                facts = self.facts[node]
                self.facts[node] = replace(facts, uncapturable=(*facts.uncapturable, *found))

    def _see_device(self, tensor: torch.Tensor) -> None:
        if self.device == "cpu":
            self.device = str(tensor.device)


def _with_outside_effects(facts: dict[Node, NodeFacts], roots: Roots) -> dict[Node, NodeFacts]:
    """Add what the graph alone does not show.

    Note [What may be touched unseen]
        Inputs may overlap in ways that no guard checks: one ``a.add_(1)`` compiled for separate ``a`` and ``b`` is
        called with overlapping ones. So if the graph writes into any input or buffer, all of them count as one.
        An opaque break may reach, through the objects that it was made with, any buffer, whatever the graph itself
        writes outside of the call, and what break functions were given or returned before. It is taken not to write
        parameters, nor inputs that no break was given.
    """
    written = frozenset().union(*(f.writes for f in facts.values()))
    merged: frozenset[int] = frozenset()
    if written & (roots.outside - roots.parameters):
        merged = roots.outside - roots.parameters
    shared = ((roots.outside & written) | roots.buffers | merged | roots.reachable) - roots.parameters
    fences = written & {FENCE, STREAMS}

    def widen(touched: frozenset[int]) -> frozenset[int]:
        return touched | merged if touched & merged else touched

    def completed(f: NodeFacts) -> NodeFacts:
        reads, writes = widen(f.reads), widen(f.writes)
        if writes & roots.outside:
            writes |= {WORLD}
        if reads & shared:
            reads |= {WORLD}
        reads |= fences
        return f if (reads, writes) == (f.reads, f.writes) else replace(f, reads=reads, writes=writes)

    return {node: completed(f) for node, f in facts.items()}


@contextmanager
def _everything_restored() -> Iterator[None]:
    """Leave autocast, grad mode and functorch's stack as they were, whatever the graph's nodes set on the way.

    The innermost block: left after the block of a mode, an open transform would bring the thread's mode inside it back.
    """
    depth = transform_depth()
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        leave_transforms(depth)
        for kind, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
        torch.set_grad_enabled(grad)


@contextmanager
def _real_tensors_allowed(mode: FakeTensorMode) -> Iterator[None]:
    """Graphs of higher-order operations and foreign functions hold real tensors that never were inputs."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _described(node: Node, mode: FakeTensorMode) -> Any:
    value = node.meta.get("example_value")
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: fresh_fake(t, mode), value)


def _reads_a_number(node: Node) -> bool:
    # Dynamo made the symbol for this number; on the backend's fakes the same call would make another one, or refuse.
    return node.op == "call_method" and node.target == "item"


def _place_of(node: Node) -> dict[str, Any]:
    """Where a node is in the user's code."""
    frame = dynamo.user_frame(node)
    return {
        "module": dynamo.module_of(node)[0],
        "modules": dynamo.module_classes_of(node),
        "source": Source(*frame) if frame else None,
    }


def _gives_argument(names: Iterable[str]) -> bool:
    return any(name.partition(".")[0] in known_ops.MAY_GIVE_AN_ARGUMENT for name in names)


def _keys_of(value: Any) -> list[int]:
    return [key for tensor in _tensors(value) for key in storage_keys(tensor)]


def _size(value: Any) -> str:
    return str(size_expression(value)) if isinstance(value, torch.SymInt) else ""


def specs_of(value: Any) -> tuple[TensorSpec, ...]:
    """What is known of the tensors of a value."""
    return tuple(_spec(t) for t in _tensors(value))


def _spec(tensor: torch.Tensor) -> TensorSpec:
    strides: tuple[Any, ...] = tensor.stride() if tensor.layout is torch.strided else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(map(str, tensor.shape)), tuple(map(str, strides)), str(tensor.device))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
