"""Attention of torch's own is a break where the user asks for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import bcg_compiler as bcg
from bcg_compiler.errors import OptionError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.mark_attention import mark_attention

GraphOf = Callable[..., AnnotatedGraph]


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = scaled_dot_product_attention(q.cos(), k.cos(), v.cos())
    return (heads * heads.sin() + 1).mT.relu() @ heads


def given() -> list[Tensor]:
    return list(torch.randn(3, 1, 4, 6, 8))


def test_attention_alone_is_marked(graph_of: GraphOf) -> None:
    graph = graph_of(layer, *given())
    result = mark_attention(graph, wanted=True)
    assert (result.changes, result.notes) == (1, ())
    assert [(graph.facts[n].op, r.code) for n, r in graph.marks.items()] == [
        ("scaled_dot_product_attention", "attention")
    ]


def test_nothing_is_marked_unasked(graph_of: GraphOf) -> None:
    graph = graph_of(layer, *given())
    result = mark_attention(graph, wanted=False)
    assert (result.changes, result.notes, graph.marks) == (0, (), {})


def test_a_graph_without_attention_is_untouched_and_the_pass_says_so(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: x.softmax(-1) @ x, torch.ones(4, 4))
    before = graph.module.code, dict(graph.facts)
    result = mark_attention(graph, wanted=True)
    assert (result.changes, len(result.notes)) == (0, 1) and "no attention" in result.notes[0]
    assert (graph.marks, (graph.module.code, graph.facts)) == ({}, before)


def test_the_break_replays_with_eager_s_bits_also_for_a_result_with_several_users() -> None:
    compiled = torch.compile(layer, backend="bcg", options={"mark": ["attention"], "min_segment_kernels": 1})
    for _ in range(4):
        inputs = given()
        assert torch.equal(compiled(*inputs), layer(*inputs))
    stats = bcg.stats(compiled)
    assert (dict(stats.reasons), stats.replays, stats.eager_runs) == ({"attention": 1}, 3, {"warm_up": 1})


def test_an_unknown_part_to_mark_is_an_error_with_the_nearest_names() -> None:
    compiled = torch.compile(layer, backend="bcg", options={"mark": ["atention"]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Did you mean 'attention'") as caught:
        compiled(*given())
    assert isinstance(caught.value.inner_exception, OptionError)
