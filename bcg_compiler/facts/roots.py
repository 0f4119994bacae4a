"""Which storage each tensor of a graph lives in, by small numbers."""

from typing import Any

import torch
from torch.fx import Node

from bcg_compiler.compat import dynamo
from bcg_compiler.compat.fake import is_traceable_wrapper_subclass, storage_key


class Roots:
    """Storages by small numbers. A root outlives the tensor that showed it, so that no number is used twice."""

    def __init__(self) -> None:
        self._by_storage: dict[int, int] = {}
        self._inputs: dict[int, int] = {}
        self._alive: list[Any] = []
        self._kinds: dict[int, set[str]] = {}
        self._also: dict[int, frozenset[int]] = {}
        self.reachable: frozenset[int] = frozenset()  # what break functions have seen
        self.known = 0

    def of_input(self, real: torch.Tensor, fake: torch.Tensor, node: Node) -> frozenset[int]:
        """The root of an input or constant: the same one for those that share a storage when compiled."""
        key = storage_key(real)
        root = self._inputs.setdefault(id(real) if key is None else key, self.known)
        self.known = max(self.known, root + 1)
        static = node.op == "get_attr" or dynamo.is_static_input(node)
        kind = "user" if not static else "parameter" if isinstance(real, torch.nn.Parameter) else "buffer"
        if kind == "user" and dynamo.is_held(node):
            kind = "buffer"  # of an object that is no module
        self._kinds.setdefault(root, set()).add(kind)
        self._keep(real)
        self._keep(fake)
        for key in storage_keys(fake):
            self._by_storage[key] = root
        return frozenset({root})

    def of(self, tensors: list[torch.Tensor]) -> frozenset[int]:
        """The roots of ``tensors``; a storage not seen before gets a new one."""
        found: set[int] = set()
        for tensor in tensors:
            for key in storage_keys(tensor):
                if key not in self._by_storage:
                    self._by_storage[key] = self.known
                    self._keep(tensor)
                    self.known += 1
                root = self._by_storage[key]
                found |= {root} | self._also.get(root, frozenset())
        return frozenset(found)

    def _keep(self, tensor: torch.Tensor) -> None:
        """Let no other storage get the identity of this one: a graph may put another one into ``tensor``."""
        self._alive.append(tensor)
        if storage_key(tensor) is not None:
            self._alive.append(tensor.untyped_storage())

    def number(self, tensor: torch.Tensor) -> int:
        """The root of the storage that ``tensor`` itself lives in, whatever else it counts as."""
        (key,) = storage_keys(tensor)
        if key not in self._by_storage:
            self.of([tensor])
        return self._by_storage[key]

    def reserve(self, count: int) -> int:
        """The first of ``count`` numbers that no storage has yet; ``place`` gives them to storages."""
        self.known += count
        return self.known - count

    def place(self, tensor: torch.Tensor, root: int) -> None:
        """A reserved number for the new storage that ``tensor`` lives in."""
        (key,) = storage_keys(tensor)
        self._by_storage[key] = root
        self._keep(tensor)

    def may_alias(self, roots: frozenset[int], others: frozenset[int]) -> frozenset[int]:
        """From here on a tensor of ``roots`` counts as one of ``others``, too."""
        for root in roots:
            self._also[root] = self._also.get(root, frozenset()) | others
        return roots | others

    @property
    def outside(self) -> frozenset[int]:
        return frozenset(self._kinds)

    @property
    def parameters(self) -> frozenset[int]:
        return frozenset(root for root, kinds in self._kinds.items() if kinds == {"parameter"})

    @property
    def buffers(self) -> frozenset[int]:
        return frozenset(root for root, kinds in self._kinds.items() if "buffer" in kinds)


def storage_keys(tensor: torch.Tensor) -> list[int]:
    """Identities of the storages that a tensor lives in: of a wrapper around others, those of the others."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [key for t in inner for key in storage_keys(t)]
    key = storage_key(tensor)
    return [id(tensor) if key is None else key]
