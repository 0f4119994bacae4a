"""Work on a second stream is captured with its fork and its join, or left as it is with the reason.

The graphs are what Dynamo makes on a GPU, written by hand: there is one stream on a CPU. What streams do is tested on a
GPU (``tests/gpu/test_dual_stream.py``).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index
from torch.fx import Graph, GraphModule, Node

from bcg_compiler.backend import bcg_backend
from bcg_compiler.compat.side_streams import fork_stream, join_stream
from bcg_compiler.facts import collect_facts
from bcg_compiler.passes.join_side_streams import join_side_streams
from bcg_compiler.runtime import Program

CURRENT, SIDE, EVENT = 0, 3, 7


@torch.library.custom_op("bcg_tests_streams::plus_one", mutates_args=())
def plus_one(x: Tensor) -> Tensor:
    """A custom op that nobody declares: a break."""
    return x + 1


plus_one.register_fake(torch.empty_like)
PLUS_ONE = torch.ops.bcg_tests_streams.plus_one.default


class Traced:
    """A graph as Dynamo leaves it: streams by number, work with the stream that it is on in ``meta``."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["example_value"] = torch.randn(6, 4)

    def work(self, target: Callable[..., Any], *args: Any, stream: int | None = None) -> Node:
        node = self.graph.call_function(target, args)
        if stream is not None:
            node.meta["custom"] = {"stream": stream}
        return node

    def wait(self, stream: int, other: int) -> None:
        first, second = (self.graph.call_function(get_external_object_by_index, (i,)) for i in (stream, other))
        self.graph.call_method("wait_stream", (first, second))

    def record(self, stream: int) -> None:
        self.graph.call_function(torch.ops.streams.record_event, (EVENT, stream))

    def wait_event(self, stream: int) -> None:
        self.graph.call_function(torch.ops.streams.wait_event.default, (EVENT, stream))

    def module(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        return GraphModule(torch.nn.Module(), self.graph)


def joined(order: str) -> GraphModule:
    """``order``: where the break stands, and how streams wait."""
    t = Traced()
    h = t.work(torch.sin, t.x)
    t.record(CURRENT) if order == "events" else t.wait(SIDE, CURRENT)
    h2 = t.work(PLUS_ONE, h) if order == "break behind fork" else h
    routed = t.work(torch.cos, h2)
    if order == "events":
        t.wait_event(SIDE)
    shared = t.work(torch.mul, h, 2, stream=SIDE)
    if order == "break between":
        routed = t.work(PLUS_ONE, routed)
    shared = t.work(torch.tanh, shared, stream=SIDE)
    if order == "break before join":
        routed = t.work(PLUS_ONE, routed)
    if order == "break on side":
        shared = t.work(PLUS_ONE, shared, stream=SIDE)
    routed = t.work(torch.exp, routed)
    if order == "events":
        t.record(SIDE)
        t.wait_event(CURRENT)
    elif order != "not joined":
        t.wait(CURRENT, SIDE)
    out = t.work(torch.add, routed, shared)
    return t.module(t.work(torch.mul, out, h), shared)


def plain(module: GraphModule, x: Tensor) -> tuple[Tensor, ...]:
    """The same without streams."""
    graph = Graph()
    known: dict[Node, Node] = {}
    for node in module.graph.nodes:
        ordering = node.op == "call_method" or "stream" in str(node.target) or "external_object" in str(node.target)
        if not ordering or "bcg_tests" in str(node.target):
            known[node] = graph.node_copy(node, known.__getitem__)
    return GraphModule(module, graph)(x)


@torch.no_grad()
def run(make: Callable[[], GraphModule], **options: Any) -> Program:
    """Three calls on the emulated device equal eager bit for bit."""
    program = bcg_backend(make(), [torch.randn(6, 4)], options={"capture": "emulated", "dual_stream": True, **options})
    assert isinstance(program, Program)
    for _ in range(3):
        x = torch.randn(6, 4)
        assert all(torch.equal(a, b) for a, b in zip(program(x), plain(make(), x), strict=True))
    return program


def summary(program: Program) -> tuple[int, tuple[str, ...]]:
    (found,) = (p for p in program.plan.passes if p.name == "join_side_streams")
    return found.changes, found.notes


@pytest.mark.parametrize("order", ["waits", "events"])
def test_fork_work_and_join_are_one_segment(order: str) -> None:
    """By an event the side stream waits for what came before it was recorded: the fork stands there."""
    program = run(lambda: joined(order))
    assert summary(program) == (1, ())
    (step,) = program.plan.steps
    assert [n.op for n in step.nodes] == [
        *("sin", "fork_stream", "cos", "mul", "tanh", "exp", "join_stream", "add", "mul"),
    ]
    assert [n.op for n in step.nodes if n.mode.stream] == ["mul", "tanh"]
    assert not program.plan.reasons()


def test_a_join_moves_in_front_of_a_break_and_a_fork_behind_one() -> None:
    before_join = run(lambda: joined("break before join"), min_segment_kernels=1)
    assert summary(before_join) == (1, ())
    assert [s.kind for s in before_join.plan.steps] == ["segment", "break", "segment"]
    first, _, last = ([n.op for n in s.nodes] for s in before_join.plan.steps)
    assert first == ["sin", "fork_stream", "cos", "mul", "tanh", "join_stream"] and last == ["exp", "add", "mul"]

    behind_fork = run(lambda: joined("break behind fork"), min_segment_kernels=1)
    assert summary(behind_fork) == (1, ())
    first, _, last = ([n.op for n in s.nodes] for s in behind_fork.plan.steps)
    assert first == ["sin"]
    assert last == ["fork_stream", "cos", "mul", "tanh", "exp", "join_stream", "add", "mul"]


def other(kind: str) -> GraphModule:
    t = Traced()
    if kind == "outside_work":
        t.wait(CURRENT, SIDE)
    if kind == "unknown_order":
        looked_up = t.graph.call_function(get_external_object_by_index, (SIDE,))
        t.graph.call_method("synchronize", (looked_up,))
    if kind != "not_forked":
        t.wait(SIDE, CURRENT)
    a = t.work(torch.sin, t.x, stream=SIDE)
    if kind == "several_streams":
        t.wait(5, SIDE)
    t.wait(CURRENT, SIDE)
    return t.module(t.work(torch.add, a, 1))


REFUSED = {
    "not_joined": (joined, "not joined"),
    "break_between": (joined, "break between"),
    "break_between ": (joined, "break on side"),
    **{code: (other, code) for code in ("outside_work", "unknown_order", "not_forked", "several_streams")},
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_refused_is_left_as_it_is_and_said_with_its_reason(code: str) -> None:
    make, kind = REFUSED[code]
    graph = collect_facts(make(kind), [torch.randn(6, 4)])
    before = graph.module.code, dict(graph.facts)
    result = join_side_streams(graph, wanted=True)
    assert result.changes == 0 and [note.partition(":")[0] for note in result.notes] == [code.strip()]
    assert (graph.module.code, graph.facts) == before


@pytest.mark.parametrize("wanted", [True, False])
def test_a_graph_is_untouched_without_side_streams_or_unasked(wanted: bool) -> None:
    t = Traced()
    module = t.module(t.work(torch.sin, t.x)) if wanted else joined("waits")
    graph = collect_facts(module, [torch.randn(6, 4)])
    before = graph.module.code, dict(graph.facts)
    result = join_side_streams(graph, wanted=wanted)
    assert (result.changes, result.notes, (graph.module.code, graph.facts)) == (0, (), before)


def layers() -> GraphModule:
    """Two layers, whose side work reads and gives values with several users."""
    t = Traced()
    h = t.x
    for _ in range(2):
        h = t.work(torch.sin, h)
        t.wait(SIDE, CURRENT)
        shared = t.work(torch.mul, h, 2, stream=SIDE)
        view = t.work(torch.transpose, shared, 0, 1, stream=SIDE)
        shared = t.work(torch.transpose, t.work(torch.cos, view, stream=SIDE), 0, 1, stream=SIDE)
        routed = t.work(torch.exp, t.work(torch.neg, h))
        t.wait(CURRENT, SIDE)
        h = t.work(torch.add, t.work(torch.mul, routed, shared), shared)
    return t.module(h)


def test_what_two_streams_use_is_let_go_behind_the_join_and_no_sooner() -> None:
    """A block freed between them is given to the next one who asks, while the other stream still reads it."""
    program = run(layers)
    assert summary(program) == (2, ())
    (step,) = program.plan.steps
    lines = [line.strip().partition("  #")[0] for line in program.source.partition("def segment_0")[2].splitlines()]
    fork, join = (next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("fork_s", "join_s"))
    by_op = {n.op: f"v{n.ordinal}" for n in reversed(step.nodes)}
    inside = [name for line in lines[fork:join] if line.startswith("del ") for name in line[4:].split(", ")]
    # The first product is the side stream's alone, the negative the caller's; the sine is read by both.
    assert by_op["neg"] in inside and by_op["sin"] not in inside
    assert by_op["sin"] in lines[join + 1]


def test_rewritten_nodes_do_nothing_without_cuda() -> None:
    assert fork_stream(1, "cpu") is None and join_stream(1, "cpu") is None
