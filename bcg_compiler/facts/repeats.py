"""What a node does that is equal to an earlier one, without running it on fakes again.

Note [Equal nodes]
    In a model of 61 layers nearly every node has 60 others that call the same function on tensors that look the same.
    What such a call dispatches and gives depends on what is called; on its constants, by type and value; of each tensor
    on all that a fake has (``Look``: sizes, strides and offset with symbols, dtype, device, bytes of the storage);
    on which of the tensors are one, and which share a storage; and on the modes of the thread. All of that is the key
    of a call. What no key can hold is run each time: functions whose body is not seen, operations that give a size or
    a number read from data, that change how an argument looks, or that work on anything but plain fakes.

    A repeat gives tensors of its own, in storages of its own or in those of its arguments, and its new storages have
    the numbers that a run would have given them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat.backends import attention_kernels
from bcg_compiler.compat.fake import (
    FakeTensorMode,
    Look,
    fake_like,
    is_data_symbol,
    look_of,
    memory_of,
    outline_of,
    symbols_of,
    tree_leaves,
)
from bcg_compiler.compat.recorder import Recorded
from bcg_compiler.facts import footprint, known_ops
from bcg_compiler.facts.node import NodeFacts
from bcg_compiler.facts.roots import Roots

#: Constants that are told by their type and their value.
_CONSTANTS = frozenset(
    {int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Tensors of a call by their ``id``: place among them, number of the storage, the tensor.
_Tensors = dict[int, tuple[int, int, Tensor]]


class Call(NamedTuple):
    """What a node calls: ``key`` is all that its results depend on, ``tensors`` its tensors, each once, in order."""

    key: Hashable
    tensors: list[Tensor]


class Storage(NamedTuple):
    """A storage by its place: that of an argument, or a new one, by its number among the new ones of a node."""

    of_argument: bool
    at: int


@dataclass(frozen=True)
class Seen:
    """What was seen of a node when it was run on fakes: its arguments, the operations it dispatched, its result."""

    given: tuple[Any, Any]
    calls: Sequence[Recorded]
    result: Any


class Made(NamedTuple):
    """A tensor that a call makes: how it looked when the call was over, and the storage that it lives in."""

    look: Look
    outline: Tensor
    storage: Storage


@dataclass(frozen=True, eq=False)
class Pattern:
    """A call that was run, as a pattern for those that are equal to it.

    ``facts``     of the node that it was run for
    ``calls``     what it dispatched
    ``result``    what it gave
    ``first``     the number of its first new storage, of ``count``
    ``reads``, ``writes``  the storages whose data it reads and writes, each once, in the order they were met
    ``tensors``   the arguments, then what was made: tensors of the result, then those that operations gave in between
    ``made``      each tensor that was made, of which the first ``given`` are in the result
    """

    facts: NodeFacts
    calls: Sequence[Recorded]
    result: Any
    first: int
    count: int
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    made: tuple[Made, ...]
    given: int

    @property
    def arguments(self) -> int:
        """How many different tensors are given to it."""
        return len(self.tensors) - len(self.made)


class Again:
    """A repeat of a call: the same with other tensors."""

    def __init__(
        self, pattern: Pattern, given: tuple[Any, Any], arguments: Sequence[Tensor], mode: FakeTensorMode
    ) -> None:
        self.pattern = pattern
        self.given = given
        self.tensors = list(arguments)
        self._mode = mode
        self._new: dict[int, Tensor] = {}
        self._make(pattern.given)
        self.result = self._swapped(pattern.result)

    @property
    def made(self) -> list[tuple[Tensor, int]]:
        """The tensors of the result in new storages, each with the number of its storage among them."""
        of_result = zip(self.tensors[self.pattern.arguments :], self.pattern.made[: self.pattern.given], strict=False)
        return [(tensor, made.storage.at) for tensor, made in of_result if not made.storage.of_argument]

    @property
    def calls(self) -> list[Recorded]:
        """What a run of it would have dispatched."""
        self._make(len(self.pattern.made))
        found = []
        for call in self.pattern.calls:
            parts = (call.reads, call.writes, call.results, call.args, call.kwargs)
            found.append(Recorded(call.op, *map(self._swapped, parts)))
        return found

    def _make(self, count: int) -> None:
        """Make the first tensors of those that a run makes."""
        for look, outline, storage in self.pattern.made[len(self.tensors) - self.pattern.arguments : count]:
            if storage.of_argument:
                memory = self.tensors[storage.at]
            elif storage.at in self._new:
                memory = self._new[storage.at]
            else:
                memory = self._new[storage.at] = memory_of(look.bytes, self._mode)
            self.tensors.append(fake_like(outline, look.device, self._mode, memory))

    def _swapped(self, value: Any) -> Any:
        """The value with tensors of this call in place of those of the call that was run."""
        if isinstance(value, Tensor):
            return self.tensors[next(at for at, own in enumerate(self.pattern.tensors) if own is value)]
        if type(value) in (tuple, list):
            return type(value)([self._swapped(item) for item in value])
        return pytree.tree_map_only(Tensor, self._swapped, value)


class Repeats:
    """The calls of one graph that have been run, by what their results depend on."""

    def __init__(self, mode: FakeTensorMode, roots: Roots) -> None:
        self._mode = mode
        self._roots = roots
        self._seen: dict[Hashable, Pattern] = {}

    def call(self, node: Node, args: Any, kwargs: Any) -> Call | None:
        """What ``node`` calls with these values; ``None`` if it has to be run whatever was run before."""
        target: Any = node.target
        if node.op not in ("call_function", "call_method") or isinstance(target, torch._ops.HigherOrderOperator):
            return None
        if isinstance(target, BoundBreak) or footprint.opaque_function(node) is not None:
            return None
        tensors: _Tensors = {}
        try:
            given = self._key((args, kwargs), tensors)
        except _NoKeyError:
            return None
        return Call((node.op, target, _modes(), given), [tensor for _, _, tensor in tensors.values()])

    def again(self, call: Call, given: tuple[Any, Any]) -> Again | None:
        """What an equal call did, done for this one, whose arguments are ``given``; ``None`` if there was none."""
        pattern = self._seen.get(call.key)
        return None if pattern is None else Again(pattern, given, call.tensors, self._mode)

    def keep(self, node: Node, call: Call, seen: "Seen", facts: NodeFacts, first: int) -> Pattern | None:
        """Keep what a call did, for others that are equal to it; ``None`` if they have to be run, too.

        ``first`` is the number of its first new storage; by now all of them have one.
        """
        if not all(map(_is_plain_call, seen.calls)):
            return None
        now = self.call(node, *seen.given)
        if now is None or now.key != call.key:
            return None  # it has changed how an argument looks, or a mode
        leaves = [leaf for leaf in tree_leaves(seen.result) if leaf is not None]
        inner = [leaf for c in seen.calls for leaf in (*c.reads, *c.results)]
        if not (leaves or seen.calls) or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        if _of_data([*tree_leaves(seen.given), *inner]):
            return None
        places = {id(tensor): place for place, tensor in enumerate(call.tensors)}
        of_result = {id(t): t for t in leaves if id(t) not in places}
        between = {id(t): t for t in inner if isinstance(t, Tensor) and id(t) not in places | of_result}
        tensors = [*call.tensors, *of_result.values(), *between.values()]
        looks = [look for tensor in tensors if (look := look_of(tensor, self._mode)) is not None]
        if len(looks) < len(tensors) or any(self._roots.number(t) >= first for t in call.tensors):
            return None
        storages = self._storages(tensors, len(call.tensors), first)
        if len(storages) < len(tensors):
            return None  # it knows of a tensor that was not given to it
        at = {id(tensor): storage for tensor, storage in zip(tensors, storages, strict=True)}

        def touched(given: Sequence[Tensor]) -> tuple[Storage, ...]:
            return tuple(dict.fromkeys(at[id(tensor)] for tensor in given))

        pattern = Pattern(
            facts=facts,
            calls=seen.calls,
            result=seen.result,
            first=first,
            count=self._roots.known - first,
            reads=touched([t for c in seen.calls for t in c.reads] + call.tensors),
            writes=touched([t for c in seen.calls if footprint.writes_data(c) for t in c.writes]),
            tensors=tuple(tensors),
            made=tuple(
                Made(look, outline_of(tensor, self._mode), storage)
                for look, tensor, storage in [*zip(looks, tensors, storages, strict=True)][len(call.tensors) :]
            ),
            given=len(of_result),
        )
        self._seen[call.key] = pattern
        return pattern

    def _storages(self, tensors: Sequence[Tensor], arguments: int, first: int) -> list[Storage]:
        """The storages of tensors, the arguments first; those that are neither an argument's nor new are left out."""
        numbers = [self._roots.number(tensor) for tensor in tensors]
        known = {number: place for place, number in reversed([*enumerate(numbers[:arguments])])}
        return [
            Storage(False, number - first) if number >= first else Storage(True, known[number])
            for number in numbers
            if number >= first or number in known
        ]

    # -- keys

    def _key(self, value: Any, tensors: _Tensors) -> Hashable:
        """What is equal for equal values. Raises ``_NoKeyError`` for values of which that is not known."""
        kind = type(value)
        if kind in _CONSTANTS:
            return kind, value
        if isinstance(value, Tensor):
            return self._tensor_key(value, tensors)
        if kind is tuple or kind is list or kind is torch.Size:
            return kind, tuple([self._key(item, tensors) for item in value])
        if kind is dict:
            return kind, tuple([(name, self._key(item, tensors)) for name, item in value.items()])
        if kind is float or kind is complex:
            return kind, repr(value)  # -0.0 is not 0.0
        if kind is slice:
            return kind, self._key((value.start, value.stop, value.step), tensors)
        if kind in _SYMBOLIC and hasattr(value.node, "expr"):
            return kind, value.node.expr
        raise _NoKeyError

    def _tensor_key(self, tensor: Tensor, tensors: _Tensors) -> Hashable:
        if id(tensor) in tensors:
            return "again", tensors[id(tensor)][0]
        look = look_of(tensor, self._mode)
        if look is None:
            raise _NoKeyError
        number = self._roots.number(tensor)
        shares = next((at for at, (_, n, _) in enumerate(tensors.values()) if n == number), -1)
        tensors[id(tensor)] = len(tensors), number, tensor
        return shares, look.key()


class _NoKeyError(Exception):
    """A value of which it is not known what it is equal to."""


def _modes() -> Hashable:
    """What of the thread an operation on fakes depends on."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        attention_kernels(),
        *autocast,
    )


def _is_plain_call(call: Recorded) -> bool:
    """Whether an operation only computes, of tensors that it is given, without a body of the user's."""
    if not isinstance(call.op, torch._ops.OpOverload) or footprint.foreign_op(call) is not None:
        return False
    reshapes = torch.Tag.inplace_view in call.op.tags
    return not reshapes and footprint.op_name(call.op) not in known_ops.REPLACES_STORAGE


def _of_data(values: Sequence[Any]) -> bool:
    """Whether a size or a number among them was read from data."""
    return any(is_data_symbol(symbol) for value in values for symbol in symbols_of(value))
