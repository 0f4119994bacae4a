"""What Dynamo says about code that it did not compile, kept for a report and off the screen.

Its counters have the reasons but hardly any lines of code, its log has the lines. Where the user has set ``TORCH_LOGS``
the log is theirs: the screen is left alone, and only what they asked for is seen here.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch._dynamo.utils
import torch._logging

from bcg_compiler.compat.dynamo import graph_breaks, recompile_limit_hits

# Dynamo's own tests hold it to the words "Graph break" and "in user code at".
_BREAK = re.compile(r"^Graph break.* in user code at (?P<file>.+):(?P<line>\d+)$", re.MULTILINE)
_SKIPPED = re.compile(r"(?:frame skipped:|skip tracing the frame) (?P<name>\S+) \((?P<file>.+) line (?P<line>\d+)\)")
_LIMIT = re.compile(
    r"hit config\.(?P<limit>\w+) \((?P<number>\d+)\)\s+function: '(?P<name>\S+)' \((?P<file>.+):(?P<line>\d+)\)"
    r"(?:\s+last reason: (?:\d+/\d+: )?(?P<reason>[^\n]*))?"
)


@dataclass(frozen=True)
class CodePlace:
    """A function, or a line in one; ``detail`` is why Dynamo gave it up, where it says so."""

    file: str
    line: int
    name: str = ""
    detail: str = ""


@dataclass(frozen=True)
class GraphBreak:
    """Dynamo ended a graph ``count`` times for ``reason``, at these lines (none where the log is not known)."""

    reason: str
    count: int
    places: tuple[CodePlace, ...]


@dataclass(frozen=True)
class Uncompiled:
    """The code that Dynamo left to plain Python, outside of every graph that a backend sees.

    ``graph_breaks``  lines at which it ended one graph and began another
    ``skipped``       functions that it could not cut in that way
    ``limit_hits``    how often it stopped compiling a function that it had compiled too often; ``given_up`` which
    """

    graph_breaks: tuple[GraphBreak, ...] = ()
    skipped: tuple[CodePlace, ...] = ()
    limit_hits: int = 0
    given_up: tuple[CodePlace, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.graph_breaks or self.skipped or self.limit_hits)


class DynamoLog:
    """The messages of Dynamo's logger, each once, and what its counters were before."""

    def __init__(self) -> None:
        self.messages: dict[str, None] = {}
        self._breaks = Counter(graph_breaks())
        self._limit_hits = recompile_limit_hits()
        self._unimplemented = Counter(torch._dynamo.utils.counters["unimplemented"])

    def uncompiled(self) -> Uncompiled:
        """What was not compiled since the log began."""
        breaks = Counter(graph_breaks()) - self._breaks
        texts = map(str, Counter(torch._dynamo.utils.counters["unimplemented"]) - self._unimplemented)
        return Uncompiled(
            graph_breaks=tuple(
                GraphBreak(reason, count, self._break_places(reason)) for reason, count in breaks.items()
            ),
            skipped=_places(_SKIPPED, [*texts, *self.messages]),
            limit_hits=recompile_limit_hits() - self._limit_hits,
            given_up=_places(_LIMIT, self.messages),
        )

    def _break_places(self, reason: str) -> tuple[CodePlace, ...]:
        return _places(_BREAK, (message for message in self.messages if reason in message))


def _places(pattern: re.Pattern[str], texts: Iterable[str]) -> tuple[CodePlace, ...]:
    found = (match.groupdict() for text in texts for match in pattern.finditer(text))
    return tuple(
        dict.fromkeys(CodePlace(m["file"], int(m["line"]), m.get("name", ""), m.get("reason") or "") for m in found)
    )


class _Collect(logging.Handler):
    def __init__(self, log: DynamoLog) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.messages[record.getMessage()] = None


@contextmanager
def dynamo_log() -> Iterator[DynamoLog]:
    """Collect what Dynamo logs inside the ``with`` block, its graph breaks included, instead of printing it."""
    log = DynamoLog()
    theirs = "TORCH_LOGS" in os.environ
    if not theirs:
        torch._logging.set_logs(graph_breaks=True)
    logger = logging.getLogger("torch._dynamo")
    handlers = logger.handlers[:]
    logger.handlers = [_Collect(log), *(handlers if theirs else [])]
    try:
        yield log
    finally:
        logger.handlers = handlers
        if not theirs:
            torch._logging.set_logs()
