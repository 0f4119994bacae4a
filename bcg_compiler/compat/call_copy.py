"""What a call has put into Dynamo's graph, put there for another one (see ``equal_calls``; run with torch 2.11, 2.13
and 2.14).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from bcg_compiler.compat.call_record import Call, Record, stack_text
from bcg_compiler.compat.fake import fake_like, memory_of, outline_of, storage_key, tree_leaves
from bcg_compiler.compat.likeness import Likeness
from bcg_compiler.compat.trace_values import Part, Unlike, constant_key, seen_of


class Copy:
    """Nodes of a record, made once more for another call."""

    def __init__(self, record: Record, call: Call, alike: Likeness, given: Sequence[Part]) -> None:
        self._record, self._call, self._alike = record, call, alike
        self._tracer = call.tx.output.current_tracer
        self._mode = call.tx.output.fake_mode
        self._nodes: dict[Node, Node] = {}
        self._given: dict[Node, Part] = {}
        self._fakes: dict[int, Any] = {}
        self._memories: dict[int | None, torch.Tensor] = {}
        self._variables: dict[Node, Any] = {}
        self._stacks: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._made: list[Node] = []
        self._line = stack_text(call.tx)
        self._counted = dict(call.tx.num_calls)
        self._memories_of: dict[int | None, int | None] = {}
        self._named: set[Node] = set()
        for mine, theirs in zip(record.arguments, given, strict=True):
            if mine.node is not None:
                self._given[mine.node] = theirs

    def result(self) -> Any:
        """Make the nodes, and what the call returns."""
        names = None
        try:
            for node in (*self._record.earlier, *self._record.inputs):
                self._stands_for(node)
            for node, given in self._given.items():
                if not given.waiting:
                    self._stands_for(node)
            self._give_names(self._record.last)
            names = _names_of(self._call.tx.output.graph)
            self._check_constants(self._record.last)
            for node in self._record.nodes:
                self._make(node)
                self._give_names(node)
                self._check_constants(node)
            found = self._value(self._record.result)
        except Exception as error:  # one of Dynamo's own, too: it will be raised again if the call is at fault
            for made in reversed(self._made):
                self._tracer.remove_node(made)
            if names is not None:
                vars(self._call.tx.output.graph._graph_namespace).update(names)
            raise error if isinstance(error, Unlike) else Unlike(f"{type(error).__name__}: {error}") from error
        counts = self._call.tx.num_calls
        for path, n in self._record.counts.items():
            moved = self._moved(path)
            counts[moved] = counts.get(moved, 0) + n
        return found

    def _give_names(self, last: Node | None) -> None:
        """Name nodes after variables of the code, as it was done once a node of the record had been made."""
        for at, node, name in self._record.names:
            if at is not last:
                continue
            if node in self._given:
                self._given[node].variable.set_name_hint(name)
            elif node.op != "placeholder" and node not in self._named:
                self._nodes[node]._rename(name)
                self._named.add(node)

    def _check_constants(self, last: Node | None) -> None:
        """Run what ran for real once a node of the record had been made: what a break gave, is read like this."""
        for at, function, result in self._record.constants:
            if at is last and constant_key(function()) != constant_key(result):
                raise Unlike("an operation gives something else")

    def _stands_for(self, node: Node) -> Node:
        """The node in place of one of the record's."""
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = self._input(node)
            mine, theirs = node.meta["example_value"], found.meta["example_value"]
            if node is not found and seen_of(mine) != seen_of(theirs):
                raise Unlike("another input")
            if isinstance(mine, torch.Tensor):
                self._fakes[id(mine)] = theirs
                key = storage_key(mine)
                if self._memories_of.setdefault(key, storage_key(theirs)) != storage_key(theirs):
                    raise Unlike("tensors that share memory do not")
                if key is not None:
                    self._memories.setdefault(key, outline_of(theirs, self._mode))
        return found

    def _input(self, node: Node) -> Node:
        from torch._dynamo.variables.base import VariableTracker

        given = self._given.get(node)
        if given is not None:
            variable, is_new = given.variable, bool(given.waiting)
            self._check_place(node, is_new)
        elif node.op != "placeholder":
            raise Unlike("reads a result that is not among its arguments")
        else:
            tensor, source = node.meta["grapharg"].example, node.meta["grapharg"].source
            if not isinstance(tensor, torch.Tensor) or not self._alike.is_own(id(tensor)):
                return node
            tx, own = self._call.tx, self._alike.counterparts[id(tensor)]
            is_new = own not in tx.output.side_effects
            self._check_place(node, is_new)
            variable = VariableTracker.build(
                tx, own, _moved_source(source, self._record.call.source, self._call.source)
            )
        self._variables[node] = variable.realize()
        found: Node = self._variables[node].as_proxy().node
        if is_new:
            self._note_place(node, found)
        return found

    def _check_place(self, node: Node, is_new: bool) -> None:
        if is_new and node in self._record.earlier:
            raise Unlike("an input was read before, and this one was not")  # nobody knows where it would be read

    def _note_place(self, node: Node, made: Node) -> None:
        if "nn_module_stack" in node.meta:
            made.meta["nn_module_stack"] = self._stack(node.meta["nn_module_stack"])
        if "stack_trace" in node.meta:
            made.meta["stack_trace"] = self._line + node.meta["stack_trace"][len(self._record.line) :]

    def _make(self, node: Node) -> None:
        from torch._dynamo.utils import get_fake_value

        args = map_arg(node.args, self._stands_for)
        kwargs = map_arg(node.kwargs, self._stands_for)
        own = [a for a in tree_leaves((args, kwargs)) if type(a) is int and self._alike.is_own(a)]
        is_break = hasattr(node.target, "__bcg_bind__")
        if own and not is_break:
            raise Unlike("asks which object it is")
        if own:
            instances = self._alike.counterparts
            args = tuple(id(instances[a]) if type(a) is int and a in instances else a for a in args)
        made = self._tracer.create_node(node.op, node.target, args, kwargs)
        self._made.append(made)
        self._nodes[node] = made
        self._note_place(node, made)
        if "source_fn_stack" in node.meta:
            made.meta["source_fn_stack"] = [(made.name, node.meta["source_fn_stack"][-1][1])]
        if "example_value" not in node.meta:
            return
        mine = node.meta["example_value"]
        fakes = [leaf for leaf in tree_leaves(mine) if isinstance(leaf, torch.Tensor)]
        # The fake of a break is code that runs, with the instance; and some views have a history that is looked at.
        if is_break or node in self._record.views or any(fake.requires_grad for fake in fakes):
            theirs = get_fake_value(made, self._call.tx, allow_non_graph_fake=True)
            if seen_of(mine) != seen_of(theirs):
                raise Unlike("an operation gives something else")
            for a, b in zip(tree_leaves(mine), tree_leaves(theirs), strict=True):
                if isinstance(a, torch.Tensor):
                    self._memories.setdefault(storage_key(a), outline_of(b, self._mode))
                    self._fakes[id(a)] = b
        else:
            theirs = self._fake(mine)
        made.meta["example_value"] = theirs

    def _fake(self, value: Any) -> Any:
        """A new value that looks like one of the record's, and shares memory as that one does."""
        if isinstance(value, (tuple, list)):
            return type(value)([self._fake(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return value
        found = self._fakes.get(id(value))
        if found is None:
            key = storage_key(value)
            if key not in self._memories:
                self._memories[key] = memory_of(value.untyped_storage().nbytes(), self._mode)
            found = fake_like(outline_of(value, self._mode), value.device, self._mode, self._memories[key])
            self._fakes[id(value)] = found
        return found

    def _stack(self, stack: Mapping[str, tuple[str, type]]) -> dict[str, tuple[str, type]]:
        key = tuple(stack)
        if key not in self._stacks:
            found = dict(self._call.tx.nn_module_stack)
            for name, (path, cls) in list(stack.items())[self._record.modules :]:
                address, _, number = name.partition("@")
                if not address.isdigit():
                    found[name] = (self._moved(path), cls)
                    continue
                module = self._alike.counterparts.get(int(address))
                moved = self._moved(path)
                n = int(number or 0) - self._record.counted.get(path, 0) + self._counted.get(moved, 0)
                found[f"{address if module is None else id(module)}{f'@{n}' if n else ''}"] = (moved, cls)
            self._stacks[key] = found
        return dict(self._stacks[key])

    def _moved(self, path: str) -> str:
        mine = self._record.call.path
        if path == mine or path.startswith((f"{mine}.", f"{mine}[")):
            return self._call.path + path[len(mine) :]
        return path

    def _value(self, variable: Any) -> Any:
        """The variable in place of one of the recorded result's."""
        from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
        from torch._dynamo.variables.builder import handle_traced_output

        variable = variable.unwrap()
        if type(variable) is TupleVariable:
            return TupleVariable([self._value(item) for item in variable.items], mutation_type=variable.mutation_type)
        if type(variable) is ConstantVariable:
            return variable
        node = variable.as_proxy().node
        made = self._stands_for(node)
        if made is node:
            return variable
        if node not in self._variables:
            example, proxy = made.meta["example_value"], self._tracer.proxy(made)
            found: Any = handle_traced_output(example, self._call.tx, proxy, {}, None, TensorVariable)
            found._is_name_set = node in self._named
            self._variables[node] = found
        return self._variables[node]


def _names_of(graph: Any) -> dict[str, Any]:
    """The names that are taken in a graph; one of a node that was removed stays taken."""
    return {name: copy.copy(value) for name, value in vars(graph._graph_namespace).items()}


def _moved_source(source: Any, mine: Any, theirs: Any) -> Any:
    if source == mine:
        return theirs
    if getattr(source, "base", None) is None:
        raise Unlike("an input is found elsewhere")
    return replace(source, base=_moved_source(source.base, mine, theirs))
