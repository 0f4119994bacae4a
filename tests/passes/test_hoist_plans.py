"""Plans of breaks are hoisted; a plan that needs the graph is not, and says why."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.hoist_plans import hoist_plans
from bcg_compiler.passes.mark_break_functions import mark_break_functions

GraphOf = Callable[..., AnnotatedGraph]


def plan(scale: float) -> None: ...


def plan_of_rows(count: Any) -> None: ...


@bcg.eager_break(plan=plan, mutates_args=("out",))
def planned(x: Tensor, out: Tensor, scale: float = 2.0) -> None:
    torch.mul(x, scale, out=out)


@bcg.eager_break(plan=plan_of_rows, fake=lambda x, count: torch.empty_like(x))
def given_a_number(x: Tensor, count: Any) -> Tensor:
    return x * 2


@bcg.eager_break(fake=torch.empty_like)
def plain(x: Tensor) -> Tensor:
    return x.cos()


def fn(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    planned(x, out)
    planned(plain(out), out, scale=2.0)
    planned(x, out, 3.0)
    return given_a_number(out, [x.shape[0], 1]) + out


def dynamic(rows: int) -> Tensor:
    x = torch.ones(rows, 2)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_plans_are_hoisted_and_their_breaks_are_none(graph_of: GraphOf) -> None:
    graph = graph_of(fn, dynamic(5))
    result = hoist_plans(graph, padded=False)
    assert (result.name, result.changes, len(result.notes)) == ("hoist_plans", 3, 1)
    first, second, third = graph.hoisted.values()
    assert (first.key == second.key, first.key == third.key) == (True, False)
    assert [call.text for call in graph.hoisted.values()] == ["scale=2.0", "scale=2.0", "scale=3.0"]
    mark_break_functions(graph)
    assert [reason.code for reason in graph.marks.values()] == ["plan_argument", "eager_break"]


def test_with_a_ladder_a_body_that_may_leave_padded_rows_stays_a_break(graph_of: GraphOf) -> None:
    graph = graph_of(fn, dynamic(5))
    assert hoist_plans(graph, padded=True).changes == 3
    assert [reason.code for reason in graph.marks.values()] == ["plan_padded_rows"] * 3 + ["plan_argument"]


def test_rows_that_are_not_open_are_not_padded(graph_of: GraphOf) -> None:
    graph = graph_of(fn, torch.ones(4, 2))
    hoist_plans(graph, padded=True)
    assert (len(graph.hoisted), graph.marks) == (4, {})


def test_a_graph_without_plans_is_untouched(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: plain(x).relu(), torch.ones(4))
    before = graph.module.code, dict(graph.facts)
    assert hoist_plans(graph, padded=True).changes == 0
    assert (graph.marks, graph.hoisted, (graph.module.code, graph.facts)) == ({}, {}, before)
