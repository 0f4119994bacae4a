"""What the call of a module has put into Dynamo's graph, and the same for a call of an equal module (see
``equal_calls``; run with torch 2.11, 2.13 and 2.14).
"""

import copy
import re
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from bcg_compiler.compat.dynamo import OWN_DIR, name_of
from bcg_compiler.compat.fake import (
    FakeTensor,
    fake_like,
    is_plain,
    memory_of,
    outline_of,
    size_expression,
    storage_key,
    tree_leaves,
)
from bcg_compiler.compat.likeness import MARKS, Likeness, likeness, notes_on, tensors_alike

#: What Dynamo notes on a node; one with more notes is not copied.
_NOTES = {"nn_module_stack", "source_fn_stack", "stack_trace", "example_value", "creation_timestamp"}

_PLAIN_TYPES = (
    *(int, float, bool, str, complex, type(None), type(Ellipsis), Node),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

#: What a call that is copied may return, and tuples of it.
_RESULTS = ("tensor", "constant", "items")

#: What tells objects apart where nobody sees it. A copied tensor is no view of another one.
_IDENTITIES = {"id", "hash", "repr", "__hash__", "__repr__", "_base", "_is_view"}
_IDENTITY_FUNCTIONS = (id, hash, repr)

#: Variables of objects whose attributes are all that a trace can change of them.
_OBJECTS = ("UserDefinedObjectVariable", "UnspecializedNNModuleVariable")

_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")


class Unlike(Exception):
    """Why one call is not taken for another one."""


@dataclass(frozen=True)
class _Part:
    """An argument of a call, or of its result, or an item of one: what code can see of it, and the node that it is.

    ``waiting``: the value, in a tuple, if Dynamo has not looked at it.
    """

    seen: tuple[Any, ...]
    variable: Any
    node: Node | None = None
    waiting: tuple[Any, ...] = ()


class Seen:
    """What code has read in a trace: names of attributes and keys, and objects with where they were found."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.identities = False
        self._sources: dict[int, list[Any]] = {}
        self._kept: list[Any] = []

    def add(self, source: Any, value: Any) -> None:
        """Dynamo takes a value from where the code that it traces finds it."""
        self._sources.setdefault(id(value), []).append(source)
        self._kept.append(value)
        if any(value is function for function in _IDENTITY_FUNCTIONS) and "builtins" not in name_of(source):
            self.identities = True  # under a name of the code's own
        while source is not None:
            self.names |= {str(getattr(source, "member", "")), str(getattr(source, "index", ""))}
            source = getattr(source, "base", None)

    def elsewhere(self, address: int, root: Any, detours: Collection[str]) -> bool:
        """Whether an object was found other than below a source, or by a detour below it.

        Code may have asked whether it is that very one.
        """
        return any(
            not _is_below(name, name_of(root)) or any(_is_below(name, detour) for detour in detours)
            for name in self.places(address)
        )

    def places(self, address: int) -> set[str]:
        """The texts of the sources at which an object was found."""
        return {name_of(source) for source in self._sources.get(address, ())}


class Call:
    """A call of a module in a trace of Dynamo's, and how things are before it."""

    def __init__(self, variable: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        from torch._C._dynamo.guards import GlobalStateGuard

        self.tx = tx
        self.module: torch.nn.Module = variable.value
        self.source = variable.source
        self.path = _MEMBER.sub(r".\2", name_of(variable.get_nn_module_stack_source()))
        self._args, self._kwargs = args, kwargs
        self.ambient = GlobalStateGuard()
        self.inference = torch.is_inference_mode_enabled()

    def arguments(self) -> list[_Part]:
        """What the arguments are now."""
        parts: list[_Part] = []
        for value in self._args:
            _add_parts(value, parts)
        for name, value in self._kwargs.items():
            parts.append(_Part(("name", name), None))
            _add_parts(value, parts)
        return parts

    def check_plain(self) -> None:
        """Raise ``Unlike`` if the module was called before, or a mode or a stream is entered."""
        tx = self.tx
        if self.path in tx.num_calls:
            raise Unlike("called again")
        if tx.symbolic_torch_function_state.mode_stack or len(tx.symbolic_stream_state.cur_stream_stack) > 1:
            raise Unlike("a mode or a stream is entered")


class Recording:
    """What is there before a call, to tell what the call does."""

    def __init__(self, call: Call) -> None:
        tx = call.tx
        call.check_plain()
        self.call = call
        self._own = {id(part) for part in call.module.modules()}
        self.arguments = call.arguments()
        self.modules = len(tx.nn_module_stack)
        self.counts = dict(tx.num_calls)
        self.line = _stack_text(tx)
        self.last = _last_node(tx.output.graph)
        self.names: list[tuple[Node | None, Node, str]] = []
        self.constants: list[tuple[Node | None, Callable[[], Any], Any]] = []
        self.inputs = frozenset(tx.output.graph.find_nodes(op="placeholder"))
        self.codes = len(tx.output.tracing_context.traced_code)
        self.random = len(tx.output.random_calls)
        self.changes = _changes(tx.output.side_effects)

    def is_own(self, part: Any) -> bool:
        """Whether a module is a part of the one that is called."""
        return id(part) in self._own

    def note_name(self, variable: Any, name: str) -> None:
        """Dynamo names the node of a tensor after a variable of the code, if it has no such name yet."""
        graph = self.call.tx.output.graph
        if variable.proxy.node.graph is graph:
            self.names.append((_last_node(graph), variable.proxy.node, name))

    def note_constant(self, function: Callable[[], Any], result: Any) -> None:
        """Dynamo runs a function for real, for a constant that the code reads."""
        self.constants.append((_last_node(self.call.tx.output.graph), function, result))

    def record(self, result: Any) -> "Record":
        """What the call has put into the graph. Raises ``Unlike`` if that is not all it did, or cannot be said."""
        call, tx = self.call, self.call.tx
        if not call.ambient.check() or not _same(self.changes, _changes(tx.output.side_effects)):
            raise Unlike("changes Python objects")
        codes = tx.output.tracing_context.traced_code[self.codes :]
        if any(_IDENTITIES & set(code.co_names) and not code.co_filename.startswith(OWN_DIR) for code in codes):
            raise Unlike("asks which object it is")
        if len(tx.output.random_calls) > self.random:
            raise Unlike("calls Python's random numbers")
        arguments = call.arguments()
        effects = tx.output.side_effects
        if any(p.node is not None and p.variable in effects.store_attr_mutations for p in arguments):
            raise Unlike("an argument has new attributes")
        before = {id(p.variable): p.seen for p in self.arguments if p.node is not None}
        if any(before.get(id(p.variable), p.seen) != p.seen for p in arguments if p.node is not None):
            raise Unlike("changes the shape of an argument")
        graph = tx.output.graph
        nodes = [*_nodes_behind(graph, self.last)][::-1]
        inputs = [node for node in graph.find_nodes(op="placeholder") if node not in self.inputs]
        known = {p.node for p in arguments} | set(nodes)
        for node in (*nodes, *inputs):
            _check_node(node, call.source)
            if any(n not in known and n.op != "placeholder" for n in node.all_input_nodes):
                raise Unlike("reads a result that is not among its arguments")
            if not (node.meta.get("stack_trace") or "").startswith(self.line):
                raise Unlike("a source line is not below that of the call")
        if any(node not in known and node.op != "placeholder" for _, node, _ in self.names):
            raise Unlike("names a result that is not among its arguments")
        read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        results: list[_Part] = []
        _add_parts(result, results)
        stored = tx.output.side_effects.store_attr_mutations
        if any(p.waiting or p.seen[0] not in _RESULTS or p.variable in stored or _is_list(p) for p in results):
            raise Unlike("its result is not only tensors")
        counts = {path: n - self.counts.get(path, 0) for path, n in tx.num_calls.items()}
        return Record(
            call=call,
            arguments=arguments,
            lazily=frozenset(id(p.variable.unwrap()) for p in self.arguments if p.waiting),
            inputs=inputs,
            earlier=[n for n in read if n.op == "placeholder" and n not in inputs],
            nodes=nodes,
            names=self.names,
            constants=self.constants,
            last=self.last,
            result=result,
            changes=self.changes,
            modules=self.modules,
            counts={path: n for path, n in counts.items() if n},
            counted=self.counts,
            line=self.line,
        )


@dataclass(frozen=True)
class Record:
    """What a call has put into the graph.

    ``inputs``, ``nodes``  new ones, in their order
    ``earlier``            those that nodes read, and were there before
    ``names``              those that nodes got from variables of the code, after which node was made, in their order
    ``constants``          functions that ran for real, after which node was made, and what they gave
    ``last``               the node before the call
    ``lazily``             arguments that Dynamo looked at within the call
    ``changes``            what had been changed in Python before it
    ``modules``            how many modules there are around the call, in the stack that nodes have
    ``counts``             how often modules were called in it, by their path
    ``counted``            how often before it
    ``line``               the text of the source lines around the call
    """

    call: Call
    arguments: list[_Part]
    lazily: frozenset[int]
    inputs: list[Node]
    nodes: list[Node]
    earlier: list[Node]
    names: list[tuple[Node | None, Node, str]]
    constants: list[tuple[Node | None, Callable[[], Any], Any]]
    last: Node | None
    result: Any
    changes: list[Any]
    modules: int
    counts: dict[str, int]
    counted: dict[str, int]
    line: str

    def copy(self, call: Call, seen: Seen, around: frozenset[int]) -> Any:
        """Put the same into the graph for another call, and return its result. Raises ``Unlike`` if it may be another.

        ``seen``: in this trace. ``around``: modules around those of which there are equal ones, by ``id()``.
        """
        if any(node._erased for node in self.nodes):
            raise Unlike("Dynamo went back in its trace")
        if self.call.inference != call.inference or not self.call.ambient.check():
            raise Unlike("another mode")
        call.check_plain()
        if not _same(self.changes, _changes(call.tx.output.side_effects)):
            raise Unlike("Python objects were changed")
        alike = likeness(self.call.module, call.module)
        if alike is None:
            raise Unlike("modules differ")
        if alike.different & seen.names:
            raise Unlike(f"reads what differs: {', '.join(sorted(alike.different & seen.names))}")
        detours = self._detours(call, alike, seen)
        if around & alike.counterparts.keys() or self._is_elsewhere(call, alike, seen, detours):
            raise Unlike("finds itself elsewhere")
        through = {_MEMBER.sub(r".\2", detour) for detour in detours}
        if any(path != detour and _is_below(path, detour) for path in self.counts for detour in through):
            raise Unlike("calls a module that is a part of what it shares")  # its path is that of the first one
        parts = self._matched(call, alike, seen)
        return _Copy(self, call, alike, parts).result()

    def _detours(self, call: Call, alike: Likeness, seen: Seen) -> list[str]:
        """Where the modules of two calls have what is one object in both: what is below it is found from both."""
        mine, theirs = name_of(self.call.source), name_of(call.source)
        shared = [address for address in alike.counterparts if not alike.is_own(address)]
        ways = {way for address in shared for way in seen.places(address)}
        return [way for way in ways if _is_below(way, mine) or _is_below(way, theirs)]

    def _is_elsewhere(self, call: Call, alike: Likeness, seen: Seen, detours: Collection[str]) -> bool:
        """Whether what only one of two calls' modules has was found by another way than as a part of it."""
        own = [address for address in alike.counterparts if alike.is_own(address)]
        return any(
            seen.elsewhere(address, self.call.source, detours)
            or seen.elsewhere(id(alike.counterparts[address]), call.source, detours)
            for address in own
        )

    def _matched(self, call: Call, alike: Likeness, seen: Seen) -> list[_Part]:
        """The arguments of another call, in the order of this one's."""
        given = call.arguments()
        stored = call.tx.output.side_effects.store_attr_mutations
        if any(p.node is not None and p.variable in stored for p in given):
            raise Unlike("an argument has new attributes")
        if len(given) != len(self.arguments):
            raise Unlike("other arguments")
        pairs: dict[Node, Any] = {}
        stored_nodes = _nodes_in(self.changes)
        for mine, theirs in zip(self.arguments, given, strict=True):
            if mine.waiting:
                continue  # the call did not look at it
            if not (self._may_wait(mine, theirs, call) if theirs.waiting else mine.seen == theirs.seen):
                raise Unlike("another argument")
            a, b = _object_of(mine), _object_of(theirs)
            if not alike.are_counterparts(a, b):
                raise Unlike("an argument is a part of the module")
            is_other = (a is not b and id(a) not in alike.counterparts) or mine.node is not theirs.node
            if is_other and (
                any(len(seen.places(id(tensor))) > 1 for tensor in (a, b) if tensor is not None)
                or not stored_nodes.isdisjoint((mine.node, theirs.node))
            ):
                raise Unlike("an argument is found elsewhere")
            if id(mine.variable) in self.lazily and mine.node is not theirs.node and not theirs.waiting:
                raise Unlike("another argument")  # it had its name before, and this one gets one in the call
            if mine.node is not None:
                stands = id(theirs.waiting[0]) if theirs.waiting else theirs.node
                if pairs.setdefault(mine.node, stands) != stands:
                    raise Unlike("arguments that were one are two")
        if len(set(pairs.values())) != len(pairs):
            raise Unlike("arguments that were two are one")
        return given

    def _may_wait(self, mine: _Part, theirs: _Part, call: Call) -> bool:
        """Whether a value that Dynamo has not looked at will be what it was in the recorded call."""
        if id(mine.variable) not in self.lazily:
            return False
        (value,) = theirs.waiting
        if not isinstance(value, torch.Tensor):
            return bool(mine.seen == _constant(value))
        example = mine.node.meta["grapharg"].example if mine.node is not None and "grapharg" in mine.node.meta else None
        return (
            isinstance(example, torch.Tensor)
            and tensors_alike(example, value)
            and not notes_on(example)
            and not notes_on(value)
            and value not in call.tx.output.side_effects
            and all(type(n) is int for n in mine.seen[1])
        )


class _Copy:
    """Nodes of a record, made once more for another call."""

    def __init__(self, record: Record, call: Call, alike: Likeness, given: Sequence[_Part]) -> None:
        self._record, self._call, self._alike = record, call, alike
        self._tracer = call.tx.output.current_tracer
        self._mode = call.tx.output.fake_mode
        self._nodes: dict[Node, Node] = {}
        self._given: dict[Node, _Part] = {}
        self._fakes: dict[int, Any] = {}
        self._memories: dict[int | None, torch.Tensor] = {}
        self._variables: dict[Node, Any] = {}
        self._stacks: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._made: list[Node] = []
        self._line = _stack_text(call.tx)
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
            if at is last and _constant(function()) != _constant(result):
                raise Unlike("an operation gives something else")

    def _stands_for(self, node: Node) -> Node:
        """The node in place of one of the record's."""
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = self._input(node)
            mine, theirs = node.meta["example_value"], found.meta["example_value"]
            if node is not found and _seen_of(mine) != _seen_of(theirs):
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
        made.meta["source_fn_stack"] = [(made.name, node.meta["source_fn_stack"][-1][1])]
        if "example_value" not in node.meta:
            return
        mine = node.meta["example_value"]
        # The fake of a break is code that runs, with the instance; and views know what they are views of.
        if is_break or any(isinstance(leaf, torch.Tensor) and leaf._is_view() for leaf in tree_leaves(mine)):
            theirs = get_fake_value(made, self._call.tx, allow_non_graph_fake=True)
            if _seen_of(mine) != _seen_of(theirs):
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


def _add_parts(variable: Any, parts: list[_Part]) -> None:
    from torch._dynamo.variables import ConstantVariable, ListVariable, TensorVariable, TupleVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized() and type(variable.peek_value()) in (tuple, list):
            variable.realize()  # whose items are not looked at by that
        if not variable.is_realized():
            parts.append(_Part(("waiting",), variable, waiting=(variable.peek_value(),)))
            return
        variable = variable.unwrap()
    kind = type(variable)
    if kind is TensorVariable:
        node = variable.as_proxy().node
        parts.append(_Part((*_seen_of(node.meta["example_value"]), _notes_key(node)), variable, node))
    elif kind is SymNodeVariable:
        parts.append(_Part(("size", size_expression(variable.sym_num)), variable, variable.as_proxy().node))
    elif kind is ConstantVariable:
        parts.append(_Part(_constant(variable.value), variable))
    elif kind is TupleVariable or (kind is ListVariable and variable.source is not None):
        parts.append(_Part(("items", kind, len(variable.items)), variable))
        for item in variable.items:
            _add_parts(item, parts)
    elif getattr(variable, "source", None) is not None and hasattr(variable, "value"):
        parts.append(_Part(("object", id(variable.value)), variable))
    else:
        raise Unlike(f"an argument is a {kind.__name__}")


def _is_list(part: _Part) -> bool:
    from torch._dynamo.variables import ListVariable

    return part.seen[0] == "items" and part.seen[1] is ListVariable


def _notes_key(node: Node) -> Any:
    """A key of what code has noted on a tensor: none, or which tensor it is."""
    example = node.meta["grapharg"].example if "grapharg" in node.meta else None
    notes = notes_on(example) if isinstance(example, torch.Tensor) else ()
    return id(example) if any(not name.startswith(MARKS) for name in notes) else None


def _seen_of(value: Any) -> tuple[Any, ...]:
    """All that code can see of a value of a trace, symbolic numbers by their expressions, which adds no guard."""
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_seen_of, value))
    if not isinstance(value, torch.Tensor):
        return ("number", size_expression(value))
    if type(value) is not FakeTensor or not is_plain(value) or value.constant is not None:
        raise Unlike("a tensor is not a plain one")
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return (
        "tensor",
        tuple([n if type(n) is int else str(size_expression(n)) for n in numbers]),
        value.dim(),
        value.dtype,
        value.device,
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
        value.requires_grad,
    )


def _constant(value: Any) -> tuple[Any, ...]:
    return ("constant", type(value), repr(value))


def _check_node(node: Node, root: Any) -> None:
    """Raise ``Unlike`` for a node that cannot be made once more by what is known of it."""
    if node.op == "placeholder":
        given = node.meta["grapharg"]
        if not isinstance(given.example, torch.Tensor) and _is_below(name_of(given.source), name_of(root)):
            raise Unlike("a number of the module's is an input")
        return
    if node.op not in ("call_function", "call_method") or isinstance(node.target, types.MethodType):
        raise Unlike(f"a node is a {node.op}")
    if not node.meta.keys() <= _NOTES:
        raise Unlike(f"a node has notes: {', '.join(sorted(node.meta.keys() - _NOTES))}")
    if not all(isinstance(leaf, _PLAIN_TYPES) for leaf in tree_leaves((node.args, node.kwargs))):
        raise Unlike("an operation takes an object")
    _seen_of(node.meta.get("example_value"))  # none, where an item of a tensor is set


def _names_of(graph: Any) -> dict[str, Any]:
    """The names that are taken in a graph; one of a node that was removed stays taken."""
    return {name: copy.copy(value) for name, value in vars(graph._graph_namespace).items()}


def _last_node(graph: Any) -> Node | None:
    return next((node for node in reversed(graph.nodes) if node.op != "placeholder"), None)


def _object_of(part: _Part) -> Any:
    """What an argument is, if that was there before the trace and is more than its value."""
    if part.waiting:
        value = part.waiting[0]
        return value if isinstance(value, torch.Tensor) else None
    if part.node is not None:
        return part.node.meta["grapharg"].example if part.node.meta.get("grapharg") is not None else None
    return part.variable.value if part.seen[0] == "object" else None


def _nodes_in(changes: Sequence[Any]) -> set[Node]:
    from torch._dynamo.variables import TensorVariable

    # By type(): to ask a lazy variable with isinstance() makes an input of it.
    return {change.as_proxy().node for change in changes if type(change) is TensorVariable}


def _nodes_behind(graph: Any, last: Node | None) -> Iterator[Node]:
    for node in reversed(graph.nodes):
        if node is last:
            return
        if node.op != "placeholder":
            yield node


def _stack_text(tx: Any) -> str:
    """The source lines of a place in a trace, as Dynamo notes them on nodes."""
    from torch._dynamo.guards import uninteresting_files

    frames = []
    while tx is not None:
        if not tx.is_co_filename_from_nn_modules():
            frames.append(tx.frame_summary())
        tx = getattr(tx, "parent", None)
    files = uninteresting_files()
    shown = [frame for frame in reversed(frames) if frame.filename not in files]
    return "".join(traceback.StackSummary.from_list(shown).format())


def _is_below(name: str, around: str) -> bool:
    # By their texts: one source has types of its own for what is in a module, and another one has not.
    return name == around or name.startswith((f"{around}.", f"{around}["))


def _moved_source(source: Any, mine: Any, theirs: Any) -> Any:
    if source == mine:
        return theirs
    if getattr(source, "base", None) is None:
        raise Unlike("an input is found elsewhere")
    return replace(source, base=_moved_source(source.base, mine, theirs))


def _changes(effects: Any) -> list[Any]:
    """What a trace has changed of objects that were there before it, and what it has put there, in one order."""
    found: list[Any] = [len(effects.tensor_hooks), len(effects.save_for_backward)]
    seen: set[int] = set()
    for variable in effects.id_to_variable.values():
        if type(variable.mutation_type).__name__.endswith("Existing") and effects.is_modified(variable):
            _add_change(effects, variable, found, seen)
    return found


def _add_change(effects: Any, variable: Any, found: list[Any], seen: set[int]) -> None:
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.lists import BaseListVariable

    if isinstance(variable, LazyVariableTracker):
        variable = variable.unwrap()
    constant = type(variable) is ConstantVariable
    found.append(_constant(variable.value) if constant else variable)
    if constant or id(variable) in seen or type(variable) is LazyVariableTracker:
        return
    seen.add(id(variable))
    for name, value in effects.store_attr_mutations.get(variable, {}).items():
        found.append(name)
        _add_change(effects, value, found, seen)
    if isinstance(variable, ConstDictVariable):
        for key, value in variable.items.items():
            _add_change(effects, key.vt, found, seen)
            _add_change(effects, value, found, seen)
    elif isinstance(variable, BaseListVariable):
        for value in variable.items:
            _add_change(effects, value, found, seen)
    elif _is_hidden(effects, variable):
        raise Unlike("a Python object was changed in a way that is not seen")


def _is_hidden(effects: Any, variable: Any) -> bool:
    """Whether a variable that is not a container may have changed in another way than by its attributes."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if isinstance(variable, (TensorVariable, SymNodeVariable)):
        return False
    if variable in effects.store_attr_mutations:
        return isinstance(variable, UserDefinedObjectVariable) and type(variable).__name__ not in _OBJECTS
    if variable.mutation_type is None:
        return variable.source is None
    return bool(effects.is_modified(variable))


def _same(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(mine) == len(theirs) and all(
        a is b or (isinstance(a, (int, str, tuple)) and a == b) for a, b in zip(mine, theirs, strict=True)
    )
