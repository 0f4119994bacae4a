"""Side streams: what of them Dynamo leaves in a graph, and what takes its place in a program."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch.fx import Node

from bcg_compiler.compat.dynamo import is_stream_lookup, streams_of

#: The number of the stream that the caller is on.
CALLER = 0


class StreamOrder(NamedTuple):
    """What a node orders: ``stream`` waits for the stream ``other``; or it records, or waits for, the event ``other``.

    ``keep``: only the allocator is told that a tensor is used on ``stream``.
    """

    kind: Literal["wait", "record", "wait_event", "keep"]
    stream: int
    other: object = None


def stream_of(node: Node) -> int:
    """The number of the stream that the user has put a node on."""
    index = (node.meta.get("custom") or {}).get("stream")
    return CALLER if index is None else _number(index)


def stream_order(node: Node) -> StreamOrder | None:
    """What a node orders, if it is known: an operation of ``streams``, or a method of what was looked up."""
    if streams_of(node) is None or is_stream_lookup(node):
        return None
    args = [n.args[0] if isinstance(n, Node) and is_stream_lookup(n) else n for n in node.args]
    if node.op == "call_method":
        if node.target == "wait_stream":
            return StreamOrder("wait", _number(args[0]), _number(args[1]))
        if node.target == "wait_event":
            return StreamOrder("wait_event", _number(args[0]), args[1])
        if node.target == "record_event":
            return StreamOrder("record", _number(args[0]), args[1] if len(args) > 1 else node)
        if node.target == "record_stream":
            return StreamOrder("keep", _number(args[1]))
        return None
    name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))
    if name == "wait_stream":
        return StreamOrder("wait", _number(args[0]), _number(args[1]))
    if name in ("wait_event", "sync_dealloc"):
        return StreamOrder("wait_event", _number(args[1]), args[0])
    if name == "record_event":
        return StreamOrder("record", _number(args[1]), args[0])
    if name == "record_stream":
        return StreamOrder("keep", _number(args[1]))
    return None


def fork_stream(number: int, device: str) -> None:
    """Make a side stream wait for the current one: what follows on it comes after all that was issued so far."""
    side = _side(number, device)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))


def join_stream(number: int, device: str) -> None:
    """Make the current stream wait for a side stream."""
    side = _side(number, device)
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)


@contextmanager
def on_stream(number: int, device: str) -> Iterator[None]:
    """Within it work goes to a side stream. Away from CUDA there is one stream, and it does nothing.

    Raises ``RuntimeError`` in a capture that the stream is no part of: the work would run now, and in no replay.
    """
    side = _side(number, device)
    if side is None:
        yield
        return
    capturing = torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(side):
        if capturing and not torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"Side stream {number} does the work of a capture that it was not forked into.")
        yield


# One for each number and device, and not the user's: nothing else is ordered by it. Programs replay one at a time.
_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


def _side(number: int, device: str) -> torch.cuda.Stream | None:
    if not device.startswith("cuda"):
        return None
    if (number, device) not in _streams:
        _streams[number, device] = torch.cuda.Stream(torch.device(device))
    return _streams[number, device]


def _number(index: object) -> int:
    """From Dynamo's number of an object: which one is the caller's stream differs by version and by model."""
    assert isinstance(index, int)
    return CALLER if _is_callers(index) else index + 1


def _is_callers(index: int) -> bool:
    if not torch.accelerator.is_available():
        return index == 0
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return bool(get_external_object_by_index(index) == torch.accelerator.current_stream())
