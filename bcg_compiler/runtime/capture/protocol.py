"""What a capture device does."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from bcg_compiler.errors import BcgError

#: Runs what was captured, on the addresses of capture.
Replay = Callable[[], None]


class CaptureError(BcgError, RuntimeError):
    """An operation cannot be captured: it asks the host, or its result's size depends on data."""


class CaptureDevice(Protocol):
    """Captures segments one after the other. Nothing runs while it does: results are buffers without values."""

    #: ``cuda`` or ``emulated``
    name: str

    #: Whether what replays name of a segment's results may leave their memory to the device, as a replay writes it anew
    #: before it is read, and later captures use it, too.
    keeps_memory: bool

    def session(self) -> AbstractContextManager[None]:
        """Around all segments of one capture: sets up and restores streams and garbage collection."""

    def capture(self, segment: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Replay]:
        """Record ``segment(*args)``: its results at their fixed addresses, and what replays it."""

    @property
    def bytes(self) -> int:
        """What all captures hold, in bytes."""

    def before_replay(self) -> None:
        """Make the current stream wait for the last replay, if that ran on another one."""

    def release(self) -> None:
        """Give the memory of all captures back."""
