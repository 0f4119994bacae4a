"""What facts speak against capturing is marked, with the most telling reason."""

from collections.abc import Callable

import torch
from torch import Tensor

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.mark_uncapturable import mark_uncapturable

GraphOf = Callable[..., AnnotatedGraph]


@torch.library.custom_op("bcg_tests_uncapturable::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: Tensor) -> Tensor:
    return -x


@unsafe.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_what_has_a_reason_is_marked_with_it(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: torch.sin(x) * x.sum().item() + 1, torch.ones(4))
    result = mark_uncapturable(graph)
    assert (result.name, result.changes, result.notes) == ("mark_uncapturable", 2, ())
    marks = {graph.facts[node].op: reason for node, reason in graph.marks.items()}
    assert {op: reason.code for op, reason in marks.items()} == {".item": "host_sync", "mul": "host_number"}
    assert marks["mul"] == next(f for f in graph.facts.values() if f.op == "mul").uncapturable[0]


def test_other_reasons_are_named_after_the_first(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: unsafe(x) + 1, torch.ones(4))
    assert mark_uncapturable(graph).changes == 1
    (reason,) = graph.marks.values()
    assert reason.code == "unsafe_tag"
    assert reason.text == "bcg_tests_uncapturable::unsafe carries the tag cudagraph_unsafe (also unknown_op)"


def test_an_earlier_mark_keeps_its_reason_and_is_not_counted(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: unsafe(x) + unsafe(x), torch.ones(4))
    graph.mark(graph.nodes[0], "user_rule", "said so")
    assert mark_uncapturable(graph).changes == 1
    assert [reason.code for reason in graph.marks.values()] == ["user_rule", "unsafe_tag"]


def test_a_capturable_graph_is_untouched(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: torch.relu(x).add_(1).split(2)[0], torch.ones(4))
    before = graph.module.code, dict(graph.facts)
    assert mark_uncapturable(graph).changes == 0
    assert (graph.marks, (graph.module.code, graph.facts)) == ({}, before)
