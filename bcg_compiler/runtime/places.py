"""Captures by the addresses that they hold: a graph reads parameters where they lay when it was captured."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from bcg_compiler.compat.addresses import same_addresses
from bcg_compiler.runtime.recording import Capture

#: How often a tensor may be replaced, while others stay, before it is no longer read where it lies.
MOVES = 4


class Place(NamedTuple):
    """The captures at one set of addresses, by shape."""

    key: tuple[int, ...]
    addresses: list[int | None]  # by argument; None for those that are not bound
    captures: dict[Any, Capture]


class Places:
    """The captures of one program. ``statics`` are the positions of the arguments whose addresses count.

    A set of addresses goes when a tensor of it dies: when the model is deleted, say. ``emptied`` is called when the
    last one has.
    """

    def __init__(self, statics: list[int], emptied: Callable[[], None]) -> None:
        self._statics = statics
        self._emptied = weakref.WeakMethod(emptied)
        self._last: Place | None = None
        self._places: dict[tuple[int, ...], Place] = {}
        self._watched: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}
        self._dropped: list[list[weakref.ref[Any]]] = []
        self._moves: Counter[int] = Counter()

    def of(self, args: Sequence[Any]) -> Place:
        """The captures at the addresses of a call; a new place, which is not kept, if there are none."""
        place = self._last
        if place is None or not same_addresses(args, place.addresses, self._statics):
            key = tuple([args[i].data_ptr() for i in self._statics])
            found = self._places.get(key)
            if found is None:
                addresses: list[int | None] = [None] * len(args)
                for position, address in zip(self._statics, key, strict=True):
                    addresses[position] = address
                found = Place(key, addresses, {})
            self._last = place = found
        return place

    def keep(self, place: Place, args: Sequence[Any]) -> None:
        """Keep a place, which has a capture, as long as the tensors at its addresses live."""
        if place.key in self._places:
            return
        self._places[place.key] = place
        places, key = weakref.ref(self), place.key

        def gone(_: Any) -> None:
            alive = places()
            if alive is not None and key in alive._watched:
                alive._drop(key)

        self._watched[key] = [weakref.ref(args[i], gone) for i in self._statics]

    def captures(self) -> Iterator[Capture]:
        """All captures."""
        for place in self._places.values():
            yield from place.captures.values()

    def living(self) -> list[Tensor] | None:
        """The tensors at some addresses that have captures, in the order of ``statics``; ``None`` if there are none."""
        for refs in self._watched.values():
            found = [tensor for ref in refs if (tensor := ref()) is not None]
            if len(found) == len(refs):
                return found
        return None

    def has(self, shape: Any) -> bool:
        """Whether a shape is captured at any addresses."""
        return any(shape in place.captures for place in self._places.values())

    def moving(self) -> list[int]:
        """Positions of tensors that keep being replaced while the others stay.

        A module that binds a new state at each call would be captured anew each time. Where all tensors of a capture
        have died, the whole model has.
        """
        for refs in self._dropped:
            dead = [i for i, ref in zip(self._statics, refs, strict=True) if ref() is None]
            if len(dead) < len(refs) or len(refs) == 1:
                self._moves.update(dead)
        self._dropped.clear()
        return [i for i, times in self._moves.items() if times >= MOVES]

    def clear(self) -> None:
        """Forget all captures, and not how often tensors have moved."""
        self._places.clear()
        self._watched.clear()
        self._last = None

    def _drop(self, key: tuple[int, ...]) -> None:
        # First: what dies with the captures may be another of its tensors, which calls this again.
        self._dropped.append(self._watched.pop(key))
        self._places.pop(key, None)
        self._last = None
        emptied = self._emptied()
        if not self._places and emptied is not None:
            emptied()
