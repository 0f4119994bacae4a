"""What the call of a module has put into Dynamo's graph, and whether another call would put the same there (see
``equal_calls``; run with torch 2.11, 2.13 and 2.14).
"""

import functools
import re
import traceback
import types
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.compat.dynamo import OWN_DIR, name_of
from bcg_compiler.compat.fake import tree_leaves
from bcg_compiler.compat.likeness import Likeness, likeness, notes_on, tensors_alike
from bcg_compiler.compat.python_changes import changes_of, nodes_in, same_changes
from bcg_compiler.compat.trace_values import Part, Unlike, add_parts, constant_key, is_list, object_of, seen_of

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

_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")


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

    @functools.cached_property
    def modules(self) -> frozenset[int]:
        """The module and its parts, by ``id()``."""
        return frozenset(map(id, self.module.modules()))

    def arguments(self) -> list[Part]:
        """What the arguments are now."""
        parts: list[Part] = []
        for value in self._args:
            add_parts(value, parts)
        for name, value in self._kwargs.items():
            parts.append(Part(("name", name), None))
            add_parts(value, parts)
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
        self.arguments = call.arguments()
        self.modules = len(tx.nn_module_stack)
        self.counts = dict(tx.num_calls)
        self.line = stack_text(tx)
        self.last = _last_node(tx.output.graph)
        self.names: list[tuple[Node | None, Node, str]] = []
        self.constants: list[tuple[Node | None, Callable[[], Any], Any]] = []
        self.inputs = frozenset(tx.output.graph.find_nodes(op="placeholder"))
        self.codes = len(tx.output.tracing_context.traced_code)
        self.random = len(tx.output.random_calls)
        self.changes = changes_of(tx.output.side_effects)

    def is_own(self, part: Any) -> bool:
        """Whether a module is a part of the one that is called."""
        return id(part) in self.call.modules

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
        tx = self.call.tx
        self._check_python()
        arguments = self.call.arguments()
        self._check_arguments(arguments)
        results = self._parts_of(result)
        graph = tx.output.graph
        nodes = [*_nodes_behind(graph, self.last)][::-1]
        inputs = [node for node in graph.find_nodes(op="placeholder") if node not in self.inputs]
        self._check_nodes(nodes, inputs, {part.node for part in arguments} | set(nodes))
        read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
        counts = {path: n - self.counts.get(path, 0) for path, n in tx.num_calls.items()}
        return Record(
            call=self.call,
            arguments=arguments,
            lazily=frozenset(id(p.variable.unwrap()) for p in self.arguments if p.waiting),
            inputs=inputs,
            earlier=[n for n in read if n.op == "placeholder" and n not in inputs],
            nodes=nodes,
            views=_views(results, set(nodes)),
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

    def _check_python(self) -> None:
        tx = self.call.tx
        if not self.call.ambient.check() or not same_changes(self.changes, changes_of(tx.output.side_effects)):
            raise Unlike("changes Python objects")
        codes = tx.output.tracing_context.traced_code[self.codes :]
        if any(_IDENTITIES & set(code.co_names) and not code.co_filename.startswith(OWN_DIR) for code in codes):
            raise Unlike("asks which object it is")
        if len(tx.output.random_calls) > self.random:
            raise Unlike("calls Python's random numbers")

    def _check_arguments(self, arguments: Sequence[Part]) -> None:
        stored = self.call.tx.output.side_effects.store_attr_mutations
        if any(p.node is not None and p.variable in stored for p in arguments):
            raise Unlike("an argument has new attributes")
        before = {id(p.variable): p.seen for p in self.arguments if p.node is not None}
        if any(before.get(id(p.variable), p.seen) != p.seen for p in arguments if p.node is not None):
            raise Unlike("changes the shape of an argument")

    def _parts_of(self, result: Any) -> list[Part]:
        parts: list[Part] = []
        add_parts(result, parts)
        stored = self.call.tx.output.side_effects.store_attr_mutations
        if any(part.waiting for part in parts):
            raise Unlike("returns what it did not look at")
        if any(p.seen[0] not in _RESULTS or p.variable in stored or is_list(p) for p in parts):
            raise Unlike("its result is not only tensors and numbers")
        return parts

    def _check_nodes(self, nodes: Sequence[Node], inputs: Sequence[Node], known: Collection[Node | None]) -> None:
        for node in (*nodes, *inputs):
            _check_node(node, self.call.source)
            if any(n not in known and n.op != "placeholder" for n in node.all_input_nodes):
                raise Unlike("reads a result that is not among its arguments")
            if not node.meta.get("stack_trace", self.line).startswith(self.line):  # none, where a mode is entered
                raise Unlike("a source line is not below that of the call")
        if any(node not in known and node.op != "placeholder" for _, node, _ in self.names):
            raise Unlike("names a result that is not among its arguments")


@dataclass(frozen=True)
class Record:
    """What a call has put into the graph.

    ``inputs``, ``nodes``  new ones, in their order
    ``earlier``            those that nodes read, and were there before
    ``views``              nodes whose results know what they are views of, where others can see that: in the result
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
    arguments: list[Part]
    lazily: frozenset[int]
    inputs: list[Node]
    nodes: list[Node]
    views: set[Node]
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

    def match(self, call: Call, seen: Seen, around: frozenset[int]) -> tuple[Likeness, list[Part]]:
        """How another call is like this one: its module, and its arguments.

        Raises ``Unlike`` if code may tell them apart.
        ``seen``: in this trace. ``around``: modules around those of which there are equal ones, by ``id()``.
        """
        if any(node._erased for node in self.nodes):
            raise Unlike("Dynamo went back in its trace")
        if self.call.inference != call.inference or not self.call.ambient.check():
            raise Unlike("another mode")
        call.check_plain()
        if not same_changes(self.changes, changes_of(call.tx.output.side_effects)):
            raise Unlike("Python objects were changed")
        alike = likeness(self.call.module, call.module)
        if alike is None:
            raise Unlike("modules differ")
        if alike.different & seen.names:
            raise Unlike(f"reads what differs: {', '.join(sorted(alike.different & seen.names))}")
        detours = self._detours(call, alike, seen)
        if (around - self.call.modules) & alike.counterparts.keys() or self._is_elsewhere(call, alike, seen, detours):
            raise Unlike("finds itself elsewhere")
        through = {_MEMBER.sub(r".\2", detour) for detour in detours}
        if any(path != detour and _is_below(path, detour) for path in self.counts for detour in through):
            raise Unlike("calls a module that is a part of what it shares")  # its path is that of the first one
        return alike, self._matched(call, alike, seen)

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

    def _matched(self, call: Call, alike: Likeness, seen: Seen) -> list[Part]:
        """The arguments of another call, in the order of this one's."""
        given = call.arguments()
        stored = call.tx.output.side_effects.store_attr_mutations
        if any(p.node is not None and p.variable in stored for p in given):
            raise Unlike("an argument has new attributes")
        if len(given) != len(self.arguments):
            raise Unlike("other arguments")
        pairs: dict[Node, Any] = {}
        stored_nodes = nodes_in(self.changes)
        for mine, theirs in zip(self.arguments, given, strict=True):
            if mine.waiting:
                continue  # the call did not look at it
            if not (self._may_wait(mine, theirs, call) if theirs.waiting else mine.seen == theirs.seen):
                raise Unlike("another argument")
            a, b = object_of(mine), object_of(theirs)
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

    def _may_wait(self, mine: Part, theirs: Part, call: Call) -> bool:
        """Whether a value that Dynamo has not looked at will be what it was in the recorded call."""
        if id(mine.variable) not in self.lazily:
            return False
        (value,) = theirs.waiting
        if not isinstance(value, torch.Tensor):
            return bool(mine.seen == constant_key(value))
        example = mine.node.meta["grapharg"].example if mine.node is not None and "grapharg" in mine.node.meta else None
        return (
            isinstance(example, torch.Tensor)
            and tensors_alike(example, value)
            and not notes_on(example)
            and not notes_on(value)
            and value not in call.tx.output.side_effects
            and all(type(n) is int for n in mine.seen[1])
        )


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
    seen_of(node.meta.get("example_value"))  # none, where an item of a tensor is set


def _views(results: Sequence[Part], nodes: Container[Node]) -> set[Node]:
    waiting = [part.node for part in results if part.node is not None]
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        leaves = tree_leaves(node.meta.get("example_value"))
        if node in nodes and node not in found and any(isinstance(t, torch.Tensor) and t._is_view() for t in leaves):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _last_node(graph: Any) -> Node | None:
    return next((node for node in reversed(graph.nodes) if node.op != "placeholder"), None)


def _nodes_behind(graph: Any, last: Node | None) -> Iterator[Node]:
    for node in reversed(graph.nodes):
        if node is last:
            return
        if node.op != "placeholder":
            yield node


def stack_text(tx: Any) -> str:
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
