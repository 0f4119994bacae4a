"""Whether two objects look alike to all code that reads them: the same types, the same attributes, all the way down."""

import enum
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_compiler.compat.fake import is_plain, is_traceable_wrapper_subclass, storage_key

_NUMBERS = (int, float, bool, str)
_HEAP_TYPE = 1 << 9  # a flag of types: made by a class statement, and not in C
_CONSTANTS = (*_NUMBERS, complex, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size, range)
#: What Dynamo notes on a tensor that it has seen.
_DYNAMO_NOTE = "_dynamo_static_input_type"
#: How the notes begin that ``torch._dynamo.mark_dynamic`` and its kin leave on a tensor.
MARKS = ("_dynamo_", "_specialize_on", "_has_dynamo_dim_marking")


@dataclass
class Likeness:
    """What stands for what.

    ``counterparts``  by the ``id()`` of an object of the first: the object of the second in its place
    ``origins``       the ``id()`` of an object of the first, by that of its counterpart
    ``different``     names of attributes that are numbers or strings in both, and not the same ones
    """

    counterparts: dict[int, Any] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    different: set[str] = field(default_factory=set)

    def is_own(self, address: int) -> bool:
        """Whether the first has an object of this ``id()`` that the second does not share."""
        return address in self.counterparts and id(self.counterparts[address]) != address

    def are_counterparts(self, first: Any, second: Any) -> bool:
        """Whether two objects stand for each other, if either of them is one of these."""
        stands = self.counterparts.get(id(first), second)
        return stands is second and self.origins.get(id(second), id(first)) == id(first)


def likeness(first: Any, second: Any) -> Likeness | None:
    """How two objects are alike; ``None`` if they are not, as far as can be seen without running code of theirs.

    Alike are: one object; equal constants; tensors of the same description; containers and instances of Python
    classes whose items and attributes are alike, where what is one object in one of them is one in the other.
    """
    found = Likeness()
    try:
        return found if _Comparison(found).alike(first, second, "") else None
    except RecursionError:  # a chain of objects
        return None


def tensors_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are described in the same way, whatever their values are."""
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and is_plain(tensor)
        and not is_traceable_wrapper_subclass(tensor)
        for tensor in (first, second)
    ) and _description(first) == _description(second)


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad is None,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        tensor._is_view(),
    )


class _Comparison:
    def __init__(self, found: Likeness) -> None:
        self._found = found
        self._memories: dict[int, int | None] = {}

    def alike(self, first: Any, second: Any, name: str) -> bool:
        """Compare two objects that are found under a name: of an attribute, "" for items of containers."""
        if _is_constant(first) or type(first) is not type(second):
            return self._constants(first, second, name)
        if id(first) in self._found.counterparts or id(second) in self._found.origins:
            return self._found.are_counterparts(first, second)
        self._found.counterparts[id(first)] = second
        self._found.origins[id(second)] = id(first)
        return (first is second and not isinstance(first, weakref.ref)) or self._contents(first, second)

    def _constants(self, first: Any, second: Any, name: str) -> bool:
        if type(first) is not type(second):
            return False
        if first == second and repr(first) == repr(second):  # -0.0 is not 0.0
            return True
        if name and type(first) in _NUMBERS:
            self._found.different.add(name)
            return True
        return False

    def _same_constants(self, first: Iterable[Any], second: Iterable[Any]) -> bool:
        mine, theirs = list(first), list(second)
        return len(mine) == len(theirs) and all(
            _is_constant(a) and self._constants(a, b, "") for a, b in zip(mine, theirs, strict=True)
        )

    def _contents(self, first: Any, second: Any) -> bool:
        if isinstance(first, torch.Tensor):
            mine, theirs = storage_key(first), storage_key(second)
            if mine is None or self._memories.setdefault(mine, theirs) != theirs:
                return False  # tensors that share memory do not
            return tensors_alike(first, second) and self._attributes(notes_on(first), notes_on(second))
        if type(first) in (dict, OrderedDict):
            noted = getattr(first, "__dict__", None) or getattr(second, "__dict__", None)  # on an OrderedDict
            return not noted and self._same_constants(first, second) and self._attributes(first, second)
        if type(first) in (list, tuple):
            return len(first) == len(second) and all(map(self.alike, first, second, [""] * len(first)))
        if type(first) is set:
            return self._same_constants(first, second)  # in one order: code may walk through them
        if isinstance(first, weakref.ref):
            return False  # it leads to the object by another way
        if type(first) is functools.partial:
            parts = [(p.func, p.args, p.keywords) for p in (first, second)]
            return not (vars(first) or vars(second)) and all(map(self.alike, *parts, [""] * 3))
        if type(first) is types.MethodType:
            return first.__func__ is second.__func__ and self.alike(first.__self__, second.__self__, "")
        cls: Any = type(first)
        if not _is_plain_class(cls):
            return False  # what else it is made of is not known
        return list(vars(first)) == list(vars(second)) and self._attributes(vars(first), vars(second))

    def _attributes(self, first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
        return first.keys() == second.keys() and all(
            self.alike(value, second[key], key if isinstance(key, str) else "") for key, value in first.items()
        )


def notes_on(tensor: torch.Tensor) -> dict[str, Any]:
    """What code has noted on a tensor as attributes."""
    return {name: value for name, value in vars(tensor).items() if name != _DYNAMO_NOTE}


def _is_constant(value: Any) -> bool:
    """Whether a value is all that there is to it: one of a class made by a ``class`` statement has attributes, too."""
    return isinstance(value, _CONSTANTS) and not type(value).__flags__ & _HEAP_TYPE


class _Plain:
    pass


@functools.cache
def _is_plain_class(cls: type) -> bool:
    """Whether all that says what an instance is stands in its ``__dict__``: no slots, no type written in C below it.

    Members of an ``Enum`` are told apart by which object they are.
    """
    return (
        cls.__basicsize__ == _Plain.__basicsize__
        and cls.__dictoffset__ != 0
        and not any(vars(base).get("__slots__") for base in cls.__mro__)
        and not issubclass(cls, enum.Enum)
    )
