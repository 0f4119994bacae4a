"""Follows rows through a recorded graph, to a verdict. See Note [What is proven about rows] in ``rows.py``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat.fake import is_data_symbol, size_expression, storage_key, symbols_of, tree_leaves
from bcg_compiler.compat.recorder import Recorded
from bcg_compiler.facts.finite import Finite
from bcg_compiler.facts.node import NodeFacts, RowVerdict
from bcg_compiler.facts.row_rules import Operation, Rule, rule_for
from bcg_compiler.facts.rows import Axis, Mixed, MixesError, Rows, Sizes, grows, is_settled, leads

#: A node as it was recorded: its facts, the operations it dispatched, its arguments and its result.
Ran = tuple[Node, NodeFacts, Sequence[Recorded], Any, Any]


def row_verdicts(
    inputs: Mapping[int, torch.Tensor],
    outside: Iterable[torch.Tensor],
    record: Callable[[], Sequence[Ran]],
    returned: Sequence[Any],
) -> tuple[RowVerdict, ...]:
    """A verdict for each symbol that is a size of an input.

    ``inputs`` are the fakes of the caller's tensors by ordinal, ``outside`` those of parameters, buffers and constants,
    ``returned`` the values of the graph's result. ``record`` is asked for what ran, if there is such a symbol.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for ordinal, fake in inputs.items():
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                places.setdefault(str(size_expression(size)), []).append((ordinal, dim))
    ran = record() if places else ()
    return tuple(
        _Proof(symbol).verdict(tuple(where), [*inputs.values(), *outside], ran, returned)
        for symbol, where in places.items()
        if symbol.isidentifier()
    )


class _Proof:
    def __init__(self, symbol: str) -> None:
        self.sizes = Sizes(symbol)
        self.known: dict[int, Rows | Mixed] = {}
        self.shared: dict[int, list[torch.Tensor]] = {}
        self.here = -1
        self.finite = Finite(())
        self.fraction: Mixed | None = None
        self.misread: Mixed | None = None  # a number was read from mixed rows: whatever comes later may depend on it

    def verdict(
        self,
        places: tuple[tuple[int, int], ...],
        outside: list[torch.Tensor],
        ran: Sequence[Ran],
        returned: Sequence[Any],
    ) -> RowVerdict:
        self.finite = Finite(outside)
        for tensor in outside:
            self._learn(tensor, self._by_shape(tensor))
        for node, facts, calls, given, result in ran:
            self.here = facts.ordinal
            if isinstance(node.target, BoundBreak):
                self._break(node.target, given, result)
            self.fraction = self._fraction_of_rows(given)
            for call in calls:
                self._call(call)
                made = [leaf for leaf in call.results if isinstance(leaf, torch.Tensor)]
                self.finite.see(call, [*call.writes, *made])
            self._read_numbers(given, result)
        mixed = [state for state in map(self._settled, [*returned, *outside]) if isinstance(state, Mixed)]
        if mixed:
            first = min(mixed, key=lambda state: state.ordinal)
            facts = next((f for _, f, *_ in ran if f.ordinal == first.ordinal), NodeFacts(first.ordinal, ""))
            return RowVerdict(
                places,
                "mixing",
                self.sizes.least,
                tuple(self.sizes.bounds),
                first.text,
                first.ordinal,
                facts.op,
                facts.module,
                facts.source,
            )
        causal = any(isinstance(v, torch.Tensor) and self._rows(v).causal for v in [*returned, *outside])
        return RowVerdict(places, "causal" if causal else "row_wise", self.sizes.least, tuple(self.sizes.bounds))

    def _settled(self, value: Any) -> Rows | Mixed | None:
        """What is known of a value that outlives the call."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return (
                Mixed(self.here, "the number of rows is a result") if self.sizes.symbol in symbols_of(value) else None
            )
        if not isinstance(value, torch.Tensor):
            return None
        state = self.known.get(id(value)) or self._by_shape(value)
        if isinstance(state, Rows) and not is_settled(state):
            return Mixed(self.here, "the last rows of a result are made of padded ones")
        if isinstance(state, Rows) and not leads(state):
            return Mixed(self.here, "a reshape has merged the rows of a result with another dimension, behind it")
        return state

    # -- operations

    def _call(self, call: Recorded) -> None:
        results = [leaf for leaf in call.results if isinstance(leaf, torch.Tensor)]
        before = (
            self.misread
            or self.fraction
            or next((s for t in call.reads if isinstance(s := self.known.get(id(t)), Mixed)), None)
        )
        made: Rows | Mixed | tuple[Rows, ...]
        if before is not None:
            made = before
        elif self._has_no_part(call, results):
            causal = any(self._rows(t).causal for t in call.reads)
            for tensor in (*call.writes, *results):
                self._learn(tensor, Rows(self._by_shape(tensor).dims, causal=causal))
            return
        else:
            try:
                made = self._apply(call, results)
            except MixesError as error:
                made = Mixed(self.here, str(error))
            except Exception as error:  # no proof, and no reason to stop a compile
                made = Mixed(self.here, f"nothing could be shown ({type(error).__name__}: {error})")
        if call.writes:
            for tensor in call.writes:
                self._write(tensor, made if isinstance(made, (Rows, Mixed)) else made[0])
            return
        for position, tensor in enumerate(results):
            self._learn(tensor, made[position] if isinstance(made, tuple) else made)

    def _has_no_part(self, call: Recorded, results: Sequence[torch.Tensor]) -> bool:
        """Whether rows have no part in an operation that no rule is known for."""
        known = isinstance(call.op, torch._ops.OpOverload) and _rule_of(call) is not None
        random = isinstance(call.op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in call.op.tags
        seen = (*tree_leaves((call.args, call.kwargs)), *results)
        return not known and not random and not any(self.sizes.symbol in symbols_of(leaf) for leaf in seen)

    def _apply(self, call: Recorded, results: Sequence[torch.Tensor]) -> Rows | tuple[Rows, ...]:
        if not isinstance(call.op, torch._ops.OpOverload):
            raise MixesError("nothing is known of a higher-order operation")
        name = call.op._schema.name
        if torch.Tag.nondeterministic_seeded in call.op.tags and not _draws_nothing(call):
            raise MixesError("it draws random numbers: more of them for more rows")
        if torch.Tag.inplace_view in call.op.tags and name != "aten::detach_":
            raise MixesError("it changes a shape in place")
        rule = _rule_of(call)
        if rule is None:
            raise MixesError(f"nothing is known of {name}")
        bare = name.partition("::")[2].removesuffix("_")
        operation = Operation(bare, _named(call), results, self._rows, self.sizes, self.finite.why)
        operation.no_size_is_a_number()
        return rule(operation)

    def _break(self, target: BoundBreak, given: Any, result: Any) -> None:
        spec = target.spec
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        mixed = self.misread or next((s for t in tensors if isinstance(s := self.known.get(id(t)), Mixed)), None)
        if mixed is None and not spec.reads_live_rows:
            text = f"break {spec.name} may read padded rows; if it reads live ones only, declare reads_live_rows=True"
            mixed = Mixed(self.here, text)
        numbers = [leaf for leaf in tree_leaves(given) if not isinstance(leaf, torch.Tensor)]
        if mixed is None and any(self.sizes.symbol in symbols_of(number) for number in numbers):
            mixed = Mixed(self.here, f"break {spec.name} is given the number of rows")
        known = [] if mixed else [self._rows(t) for t in tensors]
        if not all(map(is_settled, known)):
            mixed = Mixed(self.here, f"the last rows that break {spec.name} is given are made of padded ones")
        if not all(map(leads, known)):
            text = f"a reshape has merged the rows that break {spec.name} is given with another dimension, behind it"
            mixed = Mixed(self.here, text)
        causal = any(rows.causal for rows in known)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._learn(leaf, mixed or Rows(self._by_shape(leaf).dims, causal=causal))
        args, kwargs = given
        for tensor in spec.mutated(args, kwargs):
            self._write(tensor, mixed or Rows(self._by_shape(tensor).dims, causal=causal))

    def _fraction_of_rows(self, given: Any) -> Mixed | None:
        """A number made of a number of rows is no size; ATen may get it as a constant, so it is looked for before."""
        numbers = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.SymFloat))
        if any(self.sizes.symbol in symbols_of(number) for number in numbers):
            return Mixed(self.here, "it computes with the number of rows")
        return None

    def _read_numbers(self, given: Any, result: Any) -> None:
        if not any(is_data_symbol(s) for leaf in tree_leaves(result) for s in symbols_of(leaf)):
            return
        for leaf in tree_leaves(given):
            state = self.known.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if isinstance(state, Mixed):
                self.misread = self.misread or state

    # -- what is known

    def _rows(self, tensor: torch.Tensor) -> Rows:
        state = self.known.get(id(tensor))
        if state is None:
            state = self._by_shape(tensor)
        if isinstance(state, Mixed):
            raise MixesError(state.text)
        return state

    def _by_shape(self, tensor: torch.Tensor) -> Rows:
        dims = []
        for size in map(size_expression, tensor.shape):
            try:
                dims.append(self.sizes.axis(size))
            except MixesError:
                dims.append((Axis(size, 0),))
        return Rows(tuple(dims))

    def _learn(self, tensor: torch.Tensor, state: Rows | Mixed) -> None:
        self.known[id(tensor)] = state
        key = storage_key(tensor)
        if key is not None:
            self.shared.setdefault(key, []).append(tensor)

    def _write(self, tensor: torch.Tensor, state: Rows | Mixed) -> None:
        """A write is seen through every value over the same memory; what else was known of them is over."""
        old = self.known.get(id(tensor))
        others = [t for t in self.shared.get(storage_key(tensor) or -1, ()) if t is not tensor]
        if isinstance(state, Rows) and isinstance(old, Rows) and old.window and any(map(grows, old.dims)):
            state = Mixed(self.here, "a write ends at a number of rows, and what is behind it stays")
        if isinstance(state, Rows) and others and not is_settled(state):
            state = Mixed(self.here, "padded rows are written behind live ones")
        self._learn(tensor, state)
        for other in others:
            before = self.known[id(other)]
            if isinstance(before, Rows):
                causal = isinstance(state, Rows) and state.causal
                self.known[id(other)] = (
                    state if isinstance(state, Mixed) else Rows(before.dims, causal=before.causal or causal)
                )


def _rule_of(call: Recorded) -> Rule | None:
    namespace, _, name = call.op._schema.name.partition("::")
    return rule_for(name.removesuffix("_")) or rule_for(name) if namespace == "aten" else None


def _draws_nothing(call: Recorded) -> bool:
    names = [argument.name for argument in call.op._schema.arguments]
    return "dropout_p" in names and _named(call).get("dropout_p") in (None, 0.0)


def _named(call: Recorded) -> dict[str, Any]:
    names = [argument.name for argument in call.op._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return {name: value for name, value in given.items() if value is not None}
