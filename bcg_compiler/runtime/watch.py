"""Where replays can be looked at: for checks, which cost as much as running everything twice.

Programs that are made ``with watched(watch)`` tell it of each capture; others have nothing of it in their code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.fx import Node

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.lower import Code, UnitCompiler
from bcg_compiler.plan import Plan, Step
from bcg_compiler.runtime.buckets import Bucket
from bcg_compiler.runtime.capture import CaptureDevice, Replay


class CaptureWatch(Protocol):
    """Looks at one capture and at its replays."""

    def segment(self, step: Step, run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """What is captured in place of ``run``, the code of a segment: of the same arguments, with the same results."""

    def replay(self, step: Step, args: tuple[Any, ...], results: tuple[Any, ...], replay: Replay) -> Replay:
        """What is called in place of a segment's replay, which takes and leaves values at the given addresses."""

    def around(self, node: Node, target: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of ``target`` by a node of a break, at each replay."""

    def call(self, run: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of ``run``, all of a replay; ``eager`` runs the steps of the plan as they are."""

    def note(self, ordinal: int, value: Any) -> None:
        """Called at each replay with what a break gives to the steps behind it."""


class Watch(Protocol):
    """Looks at all captures of the programs that are made while it is in place."""

    def device(self, device: torch.device, wanted: str) -> CaptureDevice | None:
        """What to capture on, where the option ``capture`` is ``wanted``; ``None`` for the program's own choice."""

    def capture(
        self,
        graph: AnnotatedGraph,
        plan: Plan,
        compiler: UnitCompiler | None,
        bucket: Bucket | None,
        add: Callable[[Code], None],
    ) -> CaptureWatch:
        """Called before each capture. ``compiler`` is what compiled the units of segments, if anything did; ``add`` is
        to be given each text that runs in place of the program's own, for the notes on exceptions.
        """


_watches: list[Watch] = []


def watching() -> Watch | None:
    """The innermost watch in place."""
    return _watches[-1] if _watches else None


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Have the programs that any thread makes within it looked at by ``watch``, as long as they live."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
