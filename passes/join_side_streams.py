"""Lets work on a second stream be captured: fork, work and join in one segment."""

from dataclasses import replace
from typing import Literal, NamedTuple

from torch.fx import Node

from bcg_compiler.compat.dynamo import is_stream_lookup, streams_of
from bcg_compiler.compat.side_streams import CALLER, StreamOrder, fork_stream, join_stream, stream_of, stream_order
from bcg_compiler.facts import AnnotatedGraph, Reason
from bcg_compiler.facts.node import STREAMS
from bcg_compiler.passes.result import PassResult

#: Why a stream is left as it is (``docs/passes/join_side_streams.md``).
Refusal = Literal["not_forked", "not_joined", "break_between", "outside_work", "several_streams", "unknown_order"]


class _Window(NamedTuple):
    """Work on a side stream between the caller's: the nodes that fork it, the work itself, and the node that joins."""

    forks: tuple[Node, ...]
    work: tuple[Node, ...]
    join: Node


def join_side_streams(graph: AnnotatedGraph, *, wanted: bool) -> PassResult:
    """Put what the forward does ``with torch.cuda.stream(side)`` on a stream of the program's, if ``wanted``.

    A graph can hold a fork only with its join: where a break stands between work and join, the join moves in front of
    the break, and a fork moves behind a break that stands between it and the work. Both make streams wait for more than
    they did. A stream with a break in the middle of its work is left as it is, as is one that is not forked and joined
    in this graph: its operations then run on the caller's stream, and ``notes`` say why.
    """
    streams = sorted({stream_of(node) for node in graph.facts} - {CALLER}) if wanted else []
    notes = []
    changes = 0
    for stream in streams:
        windows = _windows(graph, stream)
        if isinstance(windows, Reason):
            notes.append(f"{windows.code}: side stream {stream}: {windows.text}")
            continue
        for window in windows:
            _place(graph, window)
            _rewrite(graph, stream, window)
        kept = {node for window in windows for node in (*window.forks, window.join)}
        _drop(graph, stream, kept)
        changes += len(windows)
    if changes:
        graph.renumber()
    return PassResult("join_side_streams", changes, tuple(notes))


def _windows(graph: AnnotatedGraph, stream: int) -> list[_Window] | Reason:
    """The windows of one stream in order, or why it is left as it is."""
    recorded: dict[object, tuple[Node, int]] = {}
    found: list[_Window] = []
    forks: list[Node] = []
    work: list[Node] = []
    for node, facts in graph.facts.items():
        order = stream_order(node)
        if order is None:
            if streams_of(node) is not None and not is_stream_lookup(node):
                return Reason("unknown_order", f"{facts} does something else than wait or record")
            if stream_of(node) != stream or is_stream_lookup(node):
                continue
            if not forks:
                return Reason("not_forked", f"{facts} waits for nothing that the caller's stream has done")
            if _is_break(graph, node):
                return Reason("break_between", f"{facts} is a break")
            work.append(node)
            continue
        if order.kind == "record":
            recorded[order.other] = (node, order.stream)
        awaited = _awaited(order, recorded)
        if awaited is None or stream not in (order.stream, awaited[1]) or order.stream == awaited[1]:
            continue
        if CALLER not in (order.stream, awaited[1]):
            return Reason("several_streams", f"{facts} orders two side streams")
        if order.stream == stream:
            # By an event the stream waits for what came before that was recorded, not for all before it is awaited.
            forks = [*forks, awaited[0] or node] if work else [awaited[0] or node]
        elif work:
            found.append(_Window(tuple(forks), tuple(work), node))
            forks, work = [], []
        elif not found:
            return Reason("outside_work", f"{facts} waits for work that is not of this graph")
    if work:
        return Reason("not_joined", f"nothing waits for {graph.facts[work[-1]]}")
    for window in found:
        inside = _between(graph, window.work[0], window.work[-1])
        if broken := [node for node in inside if _is_break(graph, node)]:
            return Reason("break_between", f"{graph.facts[broken[0]]} is a break in the middle of its work")
    return found


def _awaited(order: StreamOrder, recorded: dict[object, tuple[Node, int]]) -> tuple[Node | None, int] | None:
    """The stream that is waited for, and the node that recorded the event of it, if there is one."""
    if order.kind == "wait":
        assert isinstance(order.other, int)
        return None, order.other
    return recorded.get(order.other) if order.kind == "wait_event" else None


def _is_break(graph: AnnotatedGraph, node: Node) -> bool:
    return node in graph.marks or bool(graph.facts[node].uncapturable and streams_of(node) is None)


def _between(graph: AnnotatedGraph, first: Node, last: Node) -> list[Node]:
    nodes = list(graph.module.graph.nodes)
    return [n for n in nodes[nodes.index(first) + 1 : nodes.index(last)] if n in graph.facts]


def _place(graph: AnnotatedGraph, window: _Window) -> None:
    """Move a fork behind, and a join in front of, the breaks that stand between them and the work."""
    for fork in window.forks:
        if breaks := [n for n in _between(graph, fork, window.work[0]) if _is_break(graph, n)]:
            breaks[-1].append(fork)
    if breaks := [n for n in _between(graph, window.work[-1], window.join) if _is_break(graph, n)]:
        breaks[0].prepend(window.join)


def _rewrite(graph: AnnotatedGraph, stream: int, window: _Window) -> None:
    for node, target in (*((fork, fork_stream) for fork in window.forks), (window.join, join_stream)):
        node.op, node.target = "call_function", target
        node.args, node.kwargs = (stream, graph.device), {}
        graph.facts[node] = replace(
            graph.facts[node],
            op=target.__name__,
            aten=(),
            writes=frozenset({STREAMS}),
            uncapturable=(),
            host_only=False,
            opaque=False,
        )
    for node in window.work:
        facts = graph.facts[node]
        graph.facts[node] = replace(facts, mode=replace(facts.mode, stream=stream))


def _drop(graph: AnnotatedGraph, stream: int, kept: set[Node]) -> None:
    """Take out what ordered the stream and is not needed any more, and the look-ups of streams for it."""
    orders = {node: stream_order(node) for node in graph.facts if node not in kept}
    events = {order.other for order in orders.values() if order and order.kind != "wait" and order.stream == stream}
    gone = [
        node
        for node, order in orders.items()
        if order is not None
        and (order.stream == stream or (order.kind == "wait" and order.other == stream) or order.other in events)
    ]
    for node in reversed(gone):
        _erase(graph, node)
    for node in [n for n in graph.facts if is_stream_lookup(n) and not n.users]:
        _erase(graph, node)


def _erase(graph: AnnotatedGraph, node: Node) -> None:
    if not node.users:
        graph.module.graph.erase_node(node)
        del graph.facts[node]
        graph.fakes.pop(node, None)
