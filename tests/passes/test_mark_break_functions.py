"""Calls of break functions are marked, in any form; nothing else is."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.mark_break_functions import mark_break_functions

GraphOf = Callable[..., AnnotatedGraph]


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)  # Dynamo of torch 2.11 does not trace the id() of torch's own functions


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@bcg.eager_break(mutates_args=("out",))
def write(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


def halve(x: Tensor) -> Tensor:
    return x / 2


class Module(nn.Module):
    @bcg.eager_break
    def method(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        write(cosine(x), buffer)
        self.method(x)
        return bcg.call_with_break(halve, buffer, fake=like) + cosine(buffer)


def test_every_call_of_a_break_function_is_marked_with_its_name(graph_of: GraphOf) -> None:
    graph = graph_of(Module(), torch.ones(4))
    result = mark_break_functions(graph)
    assert (result.name, result.changes, result.notes) == ("mark_break_functions", 5, ())
    names = [cosine, write, Module.method, halve, cosine]
    assert [(reason.code, reason.text) for reason in graph.marks.values()] == [
        ("eager_break", f"{fn.__module__}.{fn.__qualname__} is declared a break") for fn in names
    ]


def test_a_graph_without_breaks_is_untouched(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: torch.relu(x).add_(1).split(2)[0], torch.ones(4))
    before = graph.module.code, dict(graph.facts)
    assert mark_break_functions(graph).changes == 0
    assert (graph.marks, (graph.module.code, graph.facts)) == ({}, before)


def test_marking_again_changes_nothing(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: cosine(x) + 1, torch.ones(4))
    assert [mark_break_functions(graph).changes for _ in range(2)] == [1, 0]
