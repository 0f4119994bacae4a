"""From an annotated graph to a plan."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from bcg_compiler.compat import dynamo
from bcg_compiler.facts import AnnotatedGraph, ModeState, NodeFacts, Reason
from bcg_compiler.facts.modes import is_functorch_node
from bcg_compiler.facts.node import FENCE, STREAMS
from bcg_compiler.options import Options
from bcg_compiler.passes import PassResult
from bcg_compiler.plan.costs import Island, LaunchCosts
from bcg_compiler.plan.declared import bucket_multiple, reserves
from bcg_compiler.plan.lifetimes import with_lifetimes
from bcg_compiler.plan.padded_rows import PaddedRows
from bcg_compiler.plan.padding import (
    check_rules,
    check_slot_names,
    check_specialized,
    choose_padding,
    has_rows,
    slot_policy,
)
from bcg_compiler.plan.partition import Cut, Unit, partition
from bcg_compiler.plan.plan import (
    CompileUnit,
    HoistedPlan,
    Padding,
    PassSummary,
    Plan,
    PlanNode,
    Slot,
    Step,
    StepReason,
    Value,
)
from bcg_compiler.plan.structure import SymbolNames, constant_text, structural_key, unit_key
from bcg_compiler.plan.units import cut_units


def build_plan(graph: AnnotatedGraph, passes: Iterable[PassResult], options: Options) -> Plan:
    """Cut the marked graph into steps and describe them."""
    return _Builder(graph, options).build(tuple(passes))


class _Builder:
    def __init__(self, graph: AnnotatedGraph, options: Options) -> None:
        self.graph = graph
        self.options = replace(options, bucket_multiple=bucket_multiple(graph, options.bucket_multiple))
        self.costs = LaunchCosts()
        self.symbols = SymbolNames()
        self.by_ordinal = {facts.ordinal: node for node, facts in graph.facts.items()}
        self.members: dict[int, list[Node]] = {}
        for node, facts in graph.facts.items():
            self.members.setdefault(facts.group, []).append(node)
        known = graph.known
        self.ordinals = {n: f.ordinal for n, f in known.items()}
        self.specs = {n: f.specs for n, f in known.items()}
        self.sizes = {n: f.size for n, f in known.items() if f.size}
        self.graph_symbols = SymbolNames()
        for node in self.specs:  # in the order of the graph, whatever is cut where
            self.graph_symbols.text(self.sizes.get(node, ""))
            for spec in self.specs[node]:
                self.graph_symbols.text(" ".join((*spec.shape, *spec.strides)))
        self.held = {n: value for n, value in graph.constants.items() if isinstance(value, GraphModule)}
        self.objects = graph.objects
        self.given = {facts.ordinal: facts for facts in graph.input_facts.values()}

    def build(self, passes: tuple[PassResult, ...]) -> Plan:
        check_specialized(self.options)
        inputs = self._inputs()
        if self.graph.whole and self.options.ladder is not None:
            check_slot_names(self.options, inputs)
        conditions = map(self.symbols.text, self.graph.conditions)
        rows = [replace(v, bounds=tuple(map(self.symbols.text, v.bounds))) for v in self.graph.rows]
        padding = choose_padding(self.options, {v.ordinal: v for v in inputs}, rows, conditions, self.graph.proxies)
        if isinstance(padding, Padding):
            plan = self._plan(inputs, passes, padding, None)
            refusal = PaddedRows(self.graph, self.symbols, padding).refusal(plan)
            if refusal is None:
                return plan
            padding = refusal
        unpadded = padding and Reason(padding.code, self.symbols.text(padding.text))
        return self._plan(inputs, passes, None, unpadded)

    def _plan(
        self, inputs: list[Value], passes: tuple[PassResult, ...], padding: Padding | None, unpadded: Reason | None
    ) -> Plan:
        values = list(inputs)
        output = self.graph.module.graph.output_node()
        returned = [n for n in output.all_input_nodes if n in self.ordinals]
        copied = {v.ordinal for v in inputs if v.kind == "input"}
        if self.options.outputs == "copy":
            copied |= {self.ordinals[n] for n in returned}
        units = [self._unit(ordinal, copied) for ordinal in sorted(self.members)]
        least = self.options.min_segment_kernels
        cuts = partition(units, None if least == "auto" else least, self.costs)
        crossing = _Crossing([self._nodes(cut) for cut in cuts], returned, self.graph.facts)
        numbers = {v.ordinal for v in values if v.kind == "number"}
        wanted = {self.ordinals[n] for i, cut in enumerate(cuts) if cut.kind == "segment" for n in crossing.inputs[i]}
        wanted |= self._read_by(self._fixed(cuts, numbers), wanted)
        if padding is not None:  # breaks, too, see all inputs of one length
            read = {self.ordinals[n] for nodes in crossing.inputs for n in nodes if n in self.ordinals}
            wanted |= {v.ordinal for v in values if v.ordinal in read and has_rows(v.specs, padding.symbol)}
        # An input that no segment needs has no slot: it is another tensor at each call.
        unfixed = {v.ordinal for v in values if v.kind == "input" and v.ordinal not in wanted}
        fixed = self._fixed(cuts, numbers | unfixed)
        steps = tuple(self._step(index, cut, crossing, fixed) for index, cut in enumerate(cuts))
        in_segments = {o for step in steps if step.kind == "segment" for o in step.inputs}
        of_breaks = {o for step in steps if step.kind == "break" for o in step.outputs if o not in fixed}
        bridges = in_segments & of_breaks
        if padding is not None:
            padded = PaddedRows(self.graph, self.symbols, padding)
            steps = tuple(replace(step, tails=tuple(padded.tails(step, bridges))) for step in steps)
        cleared = {value for step in steps for _, value in step.tails if value in self.by_ordinal}
        results = sorted({ordinal for step in steps for ordinal in step.outputs} | cleared)
        values += [self._value(self.by_ordinal[o], f"%{o}", "result") for o in results]
        written_inputs = {
            f.ordinal
            for n, f in self.graph.input_facts.items()
            if n.op == "placeholder" and f.results & self.graph.written
        }
        plan = Plan(
            slots=tuple(
                Slot(
                    v.ordinal,
                    v.ordinal in written_inputs,
                    v.ordinal in self.graph.moving,
                    slot_policy(self.options, v, padding, self.graph.proxies),
                )
                for v in values
                if v.kind == "input" and v.ordinal in wanted
            ),
            bridges=tuple(sorted(bridges)),
            written_inputs=tuple(sorted(written_inputs)),
            steps=steps,
            values=tuple(replace(v, size=self._size(v.ordinal)) for v in values),
            inputs=tuple(self.ordinals[n] for n in self.graph.module.graph.find_nodes(op="placeholder")),
            outputs=tuple(self.ordinals[n] for n in returned),
            device=self.graph.device,
            uncaptured=self._uncaptured(steps) or self._stale_bridge(steps, bridges),
            passes=tuple(PassSummary(p.name, p.changes, p.notes) for p in passes),
            rows=tuple(
                replace(v, text=self.symbols.text(v.text), bounds=tuple(map(self.symbols.text, v.bounds)))
                for v in self.graph.rows
            ),
            conditions=tuple(map(self.symbols.text, self.graph.conditions)),
            padding=padding,
            unpadded=unpadded,
            hoisted=self._hoisted(),
            reserves=reserves(self.graph),
        )
        plan = replace(plan, broken_rules=check_rules(self.options, plan))
        # Last: the order in which symbols are met gives them their names in the stable text.
        return with_lifetimes(plan, self.graph, self.symbols)

    def _hoisted(self) -> tuple[HoistedPlan, ...]:
        shared: dict[Any, list[Node]] = {}
        for node, call in self.graph.hoisted.items():
            shared.setdefault(call.key, []).append(node)
        return tuple(
            HoistedPlan(
                name=self.graph.hoisted[nodes[0]].function.name,
                constants=self.graph.hoisted[nodes[0]].text,
                nodes=tuple(_plan_node(self.graph.facts[node]) for node in nodes),
                eager=tuple(self.ordinals[node] for node in nodes if node in self.graph.marks),
            )
            for nodes in shared.values()
        )

    def _size(self, ordinal: int) -> str:
        node = self.by_ordinal.get(ordinal)
        facts = self.graph.facts[node] if node is not None else self.given[ordinal]
        return self.symbols.text(facts.size)

    def _inputs(self) -> list[Value]:
        values, taken, count = [], set(), 0
        for node, facts in self.graph.input_facts.items():
            source = dynamo.source_name(node)
            kind: Literal["input", "size", "number", "static", "constant"]
            if node.op == "get_attr":
                kind, name = "constant", f"constant.{node.target}"
            elif facts.ordinal not in self.graph.moving and dynamo.comes_back(node):
                kind, name = "static", dynamo.dotted_path(source) or f"static{count}"
            else:
                of_size = any(part in source for part in (".size()[", ".stride()[", ".storage_offset()"))
                kind = "input" if facts.specs else "size" if of_size else "number"
                name = f"in{count}"
            count += node.op == "placeholder"
            if name in taken:  # two modules whose roots are different local variables
                name = f"{name}#{facts.ordinal}"
            taken.add(name)
            values.append(replace(self._value(node, name, kind), argument=dynamo.argument_name(source)))
        return values

    def _value(
        self, node: Node, name: str, kind: Literal["input", "size", "number", "static", "constant", "result"]
    ) -> Value:
        facts = self.graph.producer_facts(node)
        specs = tuple(map(self.symbols.spec, facts.specs)) if facts else ()
        return Value(self.ordinals[node], name, kind, specs)

    def _unit(self, ordinal: int, copied: Collection[int]) -> Unit:
        members = self.members[ordinal]
        facts = [self.graph.facts[node] for node in members]
        inside = set(members)
        needs = {
            self.graph.facts[n].group for node in members for n in node.all_input_nodes if n in self.graph.facts
        } - {ordinal}
        touched = {self.ordinals[n] for node in members for n in (node, *node.all_input_nodes) if n in self.ordinals}
        marked = any(node in self.graph.marks for node in inside)
        # A check has no users: it stays where it is, before what it is to prevent.
        frozen = marked and all(f.host_only for f in facts) and any(node.users for node in members)
        writes = frozenset().union(*(f.writes for f in facts))
        return Unit(
            ordinal=ordinal,
            kind="host" if frozen else "break" if marked else "segment",
            kernels=sum(f.kernels for f in facts),
            needs=frozenset(needs),
            reads=frozenset().union(*(f.reads for f in facts)),
            writes=writes,
            pinned=any(root < 0 or root in self.graph.outside for root in writes),
            copied=frozenset(touched.intersection(copied)),
        )

    def _nodes(self, cut: Cut) -> list[Node]:
        nodes = [node for unit in cut.units for node in self.members[unit]]
        return sorted(nodes, key=self.ordinals.__getitem__)

    def _uncaptured(self, steps: Iterable[Step]) -> Reason | None:
        """What a slot cannot stand for: an input whose shape is changed in place, or whose storage is looked at."""
        crossing = {o for step in steps for o in (*step.inputs, *step.outputs)}
        seen = {root for n, f in self.graph.input_facts.items() if not dynamo.comes_back(n) for root in f.results}
        for o in crossing & self.by_ordinal.keys():
            seen |= self.graph.facts[self.by_ordinal[o]].results
        inputs = {root for f in self.graph.input_facts.values() for root in f.results}
        for facts in self.graph.facts.values():
            if FENCE in facts.writes:
                return Reason("unknown_state", f"{facts} may set state that a replay would not set")
            if facts.reshapes & seen:
                return Reason("reshaped_in_place", f"{facts} changes the shape of a value that other steps use")
            if "aten::as_strided.default" in facts.aten and facts.reads & inputs & seen:
                return Reason("input_storage", f"{facts} addresses the storage behind an input")
        return None

    def _stale_bridge(self, steps: Iterable[Step], bridges: Iterable[int]) -> Reason | None:
        """A bridge that holds a copy of memory which is then written through another value."""
        of_breaks = [self.graph.facts[self.by_ordinal[n.ordinal]] for s in steps if s.kind == "break" for n in s.nodes]
        for ordinal in bridges:
            bridge = self.graph.facts[self.by_ordinal[ordinal]]
            if not bridge.results & self.graph.written:
                continue
            for other in of_breaks:
                if other.group != bridge.group and other.results & bridge.results & self.graph.written:
                    return Reason("break_alias", f"{bridge} shares memory with {other}, and it is written")
        return None

    def _fixed(self, cuts: Iterable[Cut], unfixed: set[int]) -> set[int]:
        """Nodes of breaks that compute nothing, on values that are fixed once their program is captured."""
        live = set(unfixed)
        fixed: set[int] = set()
        # What opens and closes a functorch transform computes nothing either, but acts on the thread.
        regions = {facts.group for node, facts in self.graph.facts.items() if is_functorch_node(node)}
        for cut in cuts:
            for node in self._nodes(cut) if cut.kind == "break" else ():
                facts = self.graph.facts[node]
                given = {self.ordinals[n] for n in node.all_input_nodes if n in self.ordinals}
                computes = facts.kernels or facts.writes or facts.opaque or facts.uncapturable
                if computes or facts.group in regions or node in self.graph.marks or given & live:
                    live.add(facts.ordinal)
                else:
                    fixed.add(facts.ordinal)
        return fixed

    def _read_by(self, fixed: set[int], wanted: set[int]) -> set[int]:
        """What the fixed nodes behind ``wanted`` read."""
        found: set[int] = set()
        todo = list(wanted & fixed)
        while todo:
            node = self.by_ordinal[todo.pop()]
            given = {self.ordinals[n] for n in node.all_input_nodes if n in self.ordinals} - found
            found |= given
            todo += given & fixed
        return found

    def _step(self, index: int, cut: Cut, crossing: "_Crossing", fixed: set[int]) -> Step:
        nodes = self._nodes(cut)
        facts = [self.graph.facts[node] for node in nodes]
        unit, units = "", tuple[CompileUnit, ...]()
        if cut.kind == "segment":
            unit = self._key(nodes, crossing.outputs[index])
            units = tuple(self._units(nodes, crossing.outputs[index]))
        return Step(
            index=index,
            kind=cut.kind,
            nodes=tuple(map(_plan_node, facts)),
            inputs=tuple(self.ordinals[n] for n in crossing.inputs[index] if n in self.ordinals),
            outputs=self._numbered(crossing.outputs[index]),
            frees=self._numbered(crossing.frees[index]),
            kernels=sum(f.kernels for f in facts),
            reasons=tuple(self._reasons(cut, nodes)),
            fixed=tuple(f.ordinal for f in facts if f.ordinal in fixed),
            unit=unit,
            units=units,
        )

    def _key(self, nodes: Sequence[Node], outputs: Iterable[Node], symbols: SymbolNames | None = None) -> str:
        modes = {mode: self._mode_text(mode) for mode in {self.graph.facts[node].mode for node in nodes}}
        return structural_key(
            nodes,
            self.graph.facts,
            self.specs,
            self.sizes,
            modes,
            self.held,
            outputs,
            self.graph.device,
            self.objects,
            symbols,
        )

    def _units(self, nodes: Sequence[Node], outputs: Sequence[Node]) -> Iterable[CompileUnit]:
        """The parts of a segment that are compiled; arithmetic on sizes comes before and is in none of them.

        None where streams are forked: what a compiler makes of a part knows of one stream only.
        """
        if any(STREAMS in self.graph.facts[node].writes for node in nodes):
            return
        inside = self._computing(nodes)
        leaving = set(outputs)

        def given_by(piece: Sequence[Node]) -> frozenset[int]:
            own = set(piece)
            return frozenset(i for i, n in enumerate(piece) if n in leaving or not own.issuperset(n.users))

        keys: dict[tuple[Node, ...], str] = {}

        def body(piece: Sequence[Node]) -> str:
            known = tuple(piece)
            if known not in keys:
                keys[known] = self._key(piece, (), self.graph_symbols)
            return keys[known]

        pieces = [(piece, body(piece)) for piece in cut_units(inside, self.graph.facts.__getitem__, body)]
        # Of the last layer fewer values are taken than of others. It gives them all the same: that is one unit less.
        given: dict[str, set[frozenset[int]]] = {}
        for piece, key in pieces:
            given.setdefault(key, set()).add(given_by(piece))
        most = {key: max(sets, key=len) for key, sets in given.items()}
        for piece, key in pieces:
            own, gives = set(piece), given_by(piece)
            gives = most[key] if gives < most[key] else gives
            taken = dict.fromkeys(n for node in piece for n in node.all_input_nodes if n not in own)
            yield CompileUnit(
                key=unit_key(key, gives),
                nodes=tuple(self.ordinals[n] for n in piece),
                inputs=tuple(self.ordinals[n] for n in taken if n in self.ordinals),
                outputs=tuple(self.ordinals[piece[i]] for i in sorted(gives)),
            )

    def _computing(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes but for arithmetic on sizes that needs nothing of the others."""
        # What opens and closes a functorch transform takes no tensor, but belongs to what is between.
        groups = {self.graph.facts[node].group for node in nodes if not self.graph.facts[node].host_only}
        found: dict[Node, None] = {}
        for node in nodes:
            facts = self.graph.facts[node]
            if not facts.host_only or facts.group in groups or not found.keys().isdisjoint(node.all_input_nodes):
                found[node] = None
        return list(found)

    def _reasons(self, cut: Cut, nodes: list[Node]) -> Iterable[StepReason]:
        too_small = {ordinal: self._too_small(island) for island in cut.islands for ordinal in island.units}
        if cut.kind == "segment":
            yield _step_reason(self.graph.facts[nodes[0]], Reason("capturable", "nothing speaks against capture"))
        for node in nodes:
            facts = self.graph.facts[node]
            if node in self.graph.marks:
                mark = self.graph.marks[node]
                yield _step_reason(facts, Reason(mark.code, self.symbols.text(mark.text)))
            elif facts.group in too_small and facts.kernels:
                yield _step_reason(facts, Reason("small_segment", too_small[facts.group]))
            elif facts.group in cut.moved:
                yield _step_reason(facts, Reason("moved", "out of the way of breaks, which join"))

    def _too_small(self, island: Island) -> str:
        least = self.options.min_segment_kernels
        return self.costs.why_not(island) if least == "auto" else f"fewer kernels than min_segment_kernels={least}"

    def _mode_text(self, mode: ModeState) -> str:
        entered = [self.graph.mode_nodes[ordinal] for ordinal in mode.stack]
        main = torch.device(self.graph.device)
        regions = (constant_text((n.target, *_as_devices(n.args)), str, main, self.objects) for n in entered)
        return " ".join([*regions, f"grad={mode.grad}", *([f"stream={mode.stream}"] if mode.stream else [])])

    def _numbered(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        return tuple(sorted(self.ordinals[node] for node in nodes))


class _Crossing:
    """What crosses the boundaries of steps, and what nobody reads any more."""

    def __init__(self, steps: list[list[Node]], returned: list[Node], facts: dict[Node, NodeFacts]) -> None:
        step_of = {node: index for index, nodes in enumerate(steps) for node in nodes}
        last_use: dict[Node, int] = {}
        self.inputs: list[list[Node]] = []
        for index, nodes in enumerate(steps):
            used = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
            given = [n for n in used if step_of.get(n) != index]
            self.inputs.append(given)
            last_use.update(dict.fromkeys(given, index))
        kept = set(returned)
        self.outputs = [
            _ordered((n for n in nodes if n in last_use or n in kept), facts.__getitem__) for nodes in steps
        ]
        self.frees: list[list[Node]] = [[] for _ in steps]
        for node, index in last_use.items():
            if node in step_of and node not in kept:
                self.frees[index].append(node)


def _as_devices(args: Iterable[Any]) -> list[Any]:
    """Autocast names its device by a string."""
    return [torch.device(arg) if arg in ("cpu", "cuda") else arg for arg in args]


def _ordered(nodes: Iterable[Node], facts: Callable[[Node], NodeFacts]) -> list[Node]:
    return sorted(nodes, key=lambda node: facts(node).ordinal)


def _plan_node(facts: NodeFacts) -> PlanNode:
    return PlanNode(facts.ordinal, facts.op, facts.module, facts.kernels, facts.mode, facts.source)


def _step_reason(facts: NodeFacts, reason: Reason) -> StepReason:
    return StepReason(reason.code, reason.text, facts.ordinal, facts.op, facts.module, facts.source)
