"""Keeps memory that two streams use until they are joined.

Note [Memory of two streams]
    The allocator gives a freed block at once to the next one who asks on the stream that it was made on, while work of
    the other stream may still read it. ``record_stream`` would prevent that, and in a capture keep the block until the
    capture is over. Here it is known where the streams are joined: what both use is let go behind that, and what one
    alone uses as ever.
"""

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Node

from bcg_compiler.compat.side_streams import fork_stream, join_stream
from bcg_compiler.facts import NodeFacts


def let_go_behind(nodes: Sequence[Node], facts: Mapping[Node, NodeFacts]) -> Callable[[Node, Node], Node]:
    """For a value and the last of ``nodes`` that uses it: the node behind which its memory may be let go.

    ``nodes`` are those of one step in order.
    """
    joins = _joins(nodes)
    shared = _used_by_two_streams(nodes, facts) if joins else frozenset()

    def behind(value: Node, user: Node) -> Node:
        return joins[user] if user in joins and facts[value].results & shared else user

    return behind


def _joins(nodes: Sequence[Node]) -> dict[Node, Node]:
    """For each node while a stream is forked: the one behind which all are joined."""
    forked: set[object] = set()
    waiting: list[Node] = []
    found: dict[Node, Node] = {}
    for node in nodes:
        if node.target is fork_stream:
            forked.add(node.args[0])
        if forked:
            waiting.append(node)
        if node.target is join_stream:
            forked.discard(node.args[0])
            if not forked:
                found.update(dict.fromkeys(waiting, node))
                waiting = []
    return found


def _used_by_two_streams(nodes: Sequence[Node], facts: Mapping[Node, NodeFacts]) -> frozenset[int]:
    """The storages that nodes of several streams make, read or write."""
    streams: dict[int, set[int]] = {}
    for f in map(facts.__getitem__, nodes):
        for root in f.reads | f.writes | f.results:
            streams.setdefault(root, set()).add(f.mode.stream)
    return frozenset(root for root, of in streams.items() if root >= 0 and len(of) > 1)
