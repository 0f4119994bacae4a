"""What padding asks of a plan beyond the proof about rows: what is cleared behind breaks, and what cannot be padded."""

from collections.abc import Iterable

from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import AnnotatedGraph, NodeFacts, Reason
from bcg_compiler.plan.padding import has_rows, symbol_sources
from bcg_compiler.plan.plan import Padding, Plan, Step, Value
from bcg_compiler.plan.sizes import evaluate, symbols_in
from bcg_compiler.plan.structure import SymbolNames


class PaddedRows:
    """The questions about one graph and the size that is padded."""

    def __init__(self, graph: AnnotatedGraph, symbols: SymbolNames, padding: Padding) -> None:
        self._graph = graph
        self._symbols = symbols
        self._padding = padding
        self._nodes = {facts.ordinal: node for node, facts in graph.facts.items()}

    def tails(self, step: Step, bridges: set[int]) -> Iterable[tuple[int, int]]:
        """What the breaks of a step may have written only the live rows of, in memory that the plan allocates."""
        for plan_node in step.nodes if step.kind == "break" else ():
            node = self._nodes[plan_node.ordinal]
            facts = self._graph.facts[node]
            if not facts.opaque or (isinstance(node.target, BoundBreak) and node.target.spec.writes_every_row):
                continue
            for given in self._written_by(node):
                if self._has_rows(given) and (given.ordinal in bridges or not given.results & self._graph.outside):
                    yield facts.ordinal, given.ordinal
            # A break function gives a list, whose items are nodes of their own.
            for user in node.users if isinstance(node.target, BoundBreak) else (node, *node.users):
                made = self._graph.facts.get(user)
                if made is None or made.group != facts.group or len(made.specs) != 1:
                    continue
                readers = [self._graph.facts.get(reader) for reader in user.users]
                if made.ordinal not in bridges and all(f is None or f.opaque for f in readers):
                    continue  # bodies read live rows, and results are cut
                if made.results & facts.fresh and self._has_rows(made):
                    yield made.ordinal, made.ordinal

    def refusal(self, plan: Plan) -> Reason | None:
        """What keeps a plan from being padded, whatever is known of its rows."""
        found = (
            self._rows_returned(plan),
            self._input_returned(plan),
            self._open_number(plan),
            self._unclear_tail(plan),
            self._unknown_layout(plan),
        )
        return next((reason for reason in found if reason is not None), None)

    def _rows_returned(self, plan: Plan) -> Reason | None:
        returned = [plan.value(ordinal) for ordinal in plan.outputs]
        if any(v.kind == "result" and v.size and self._padding.symbol in symbols_in(v.size) for v in returned):
            return Reason("rows_returned", "the number of rows is a result")
        return None

    def _input_returned(self, plan: Plan) -> Reason | None:
        slots = {slot.ordinal for slot in plan.slots if self._of_rows(plan.value(slot.ordinal))}
        for ordinal, lies_in in sorted(self._graph.input_views):
            if lies_in in slots:
                result = self._graph.facts[self._nodes[ordinal]]
                return Reason(
                    "input_returned", f"{result}, a result, is a view of an input, of which the program has a copy"
                )
        return None

    def _open_number(self, plan: Plan) -> Reason | None:
        known = set(symbol_sources(plan))
        slots = [slot.ordinal for slot in plan.slots if self._of_rows(plan.value(slot.ordinal))]
        for value in map(plan.value, (*plan.bridges, *slots)):
            sizes = [size for spec in value.specs for size in (*spec.shape, *spec.strides)]
            open_ = {symbol for size in sizes for symbol in symbols_in(size)} - known
            if open_:
                return Reason("open_number", f"a size of {value.name} depends on {min(open_)}")
        return self._number_beside_rows(plan)

    def _number_beside_rows(self, plan: Plan) -> Reason | None:
        """A number of the caller's may be the number of live rows, such as a size that was read before Dynamo cut the
        graph. An operation would tie it to the rows; what a body is given would have other rows than its neighbours.
        """
        given_as_numbers = (symbols_in(value.size) for value in map(plan.value, plan.inputs) if value.size)
        numbers = frozenset().union(*given_as_numbers) - set(symbol_sources(plan, tensors_only=True))
        for node, facts in self._graph.facts.items() if numbers else ():
            given = [f for f in map(self._graph.producer_facts, node.all_input_nodes) if f is not None]
            if not facts.opaque or not any(map(self._has_rows, given)):
                continue
            for other in given:
                sizes = (size for spec in map(self._symbols.spec, other.specs) for size in spec.shape)
                if any(not numbers.isdisjoint(symbols_in(size)) for size in sizes):
                    text = f"{facts} is given rows, and {other}, whose size depends on a number of the caller's"
                    return Reason("open_number", text)
        return None

    def _unclear_tail(self, plan: Plan) -> Reason | None:
        for node in (self._nodes[n.ordinal] for step in plan.breaks for n in step.nodes):
            facts = self._graph.facts[node]
            for given in self._written_by(node) if facts.opaque else ():
                inside = given.results - self._graph.outside
                unsure = given.results & self._graph.outside and inside and given.ordinal not in plan.bridges
                if unsure and self._has_rows(given):
                    text = f"{facts} writes {given}, which may be memory of the caller's"
                    return Reason("unclear_tail", f"{text}: its padded rows cannot be cleared")
        return None

    def _unknown_layout(self, plan: Plan) -> Reason | None:
        """A proof follows where rows lie; the user's word says only that they are independent."""
        if self._padding.proof != "assumed":
            return None
        cleared = [value for step in plan.steps for _, value in step.tails]
        for value in map(plan.value, (*plan.outputs, *cleared)):
            for size in (size for spec in value.specs for size in spec.shape):
                if not self._grows_row_by_row(size):
                    text = f"{value.name} has {size} rows, and it is not shown which of them are live"
                    return Reason("unknown_layout", text)
        return None

    def _grows_row_by_row(self, size: str) -> bool:
        symbol = self._padding.symbol
        if symbol not in symbols_in(size):
            return True
        if symbols_in(size) != {symbol}:
            return False
        return all(evaluate(size, {symbol: rows + 1}) - evaluate(size, {symbol: rows}) == 1 for rows in (7, 64, 1000))

    def _written_by(self, node: Node) -> Iterable[NodeFacts]:
        """Arguments of a break over memory that it is declared to write."""
        written = {root for root in self._graph.facts[node].writes if root >= 0}
        for given in map(self._graph.producer_facts, node.all_input_nodes):
            if given is not None and given.results & written:
                yield given

    def _has_rows(self, facts: NodeFacts) -> bool:
        return has_rows(map(self._symbols.spec, facts.specs), self._padding.symbol)

    def _of_rows(self, value: Value) -> bool:
        return has_rows(value.specs, self._padding.symbol)
