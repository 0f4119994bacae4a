"""What Dynamo says about code that it did not compile, kept for a report and off the screen.

Its counters have the reasons but hardly any lines of code, its log has the lines. Where the user has set ``TORCH_LOGS``
the log is theirs: the screen is left alone, and only what they asked for is seen here.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch._dynamo.utils
import torch._logging

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


@dataclass
class DynamoLog:
    """The messages of Dynamo's logger, each once."""

    messages: dict[str, None] = field(default_factory=dict)

    def break_places(self, reason: str) -> list[CodePlace]:
        """The lines at which Dynamo broke a graph for ``reason``, the first line of its own text."""
        matches = (_BREAK.search(message) for message in self.messages if reason in message)
        return list(dict.fromkeys(CodePlace(m["file"], int(m["line"])) for m in matches if m))

    def skipped_functions(self) -> list[CodePlace]:
        """Functions that Dynamo runs as plain Python because it could not cut them. No backend hears of them."""
        texts = [*self.messages, *map(str, torch._dynamo.utils.counters["unimplemented"])]
        matches = (m for text in texts for m in _SKIPPED.finditer(text))
        return list(dict.fromkeys(CodePlace(m["file"], int(m["line"]), m["name"]) for m in matches))

    def given_up(self) -> list[CodePlace]:
        """Functions that Dynamo stopped compiling because they were compiled too often."""
        matches = (m for message in self.messages for m in _LIMIT.finditer(message))
        return list(dict.fromkeys(CodePlace(m["file"], int(m["line"]), m["name"], m["reason"] or "") for m in matches))


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
