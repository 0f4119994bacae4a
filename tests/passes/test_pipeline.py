"""The passes together: their order, and how they are left out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.errors import OptionError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.options import Options
from bcg_compiler.passes import names, run_passes
from bcg_compiler.runtime import programs_of

GraphOf = Callable[..., AnnotatedGraph]


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@torch.library.custom_op("bcg_tests_pipeline::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    return -x


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def fn(x: Tensor) -> Tensor:
    return cosine(x) + negative(x) + torch.sin(x)


#: What each pass changes in the graph of ``fn`` if ``sin`` is named by a rule.
CHANGES = dict.fromkeys(names(), 0) | {"mark_break_functions": 1, "mark_rules": 1, "mark_uncapturable": 1}


def test_the_default_order() -> None:
    assert names() == (
        "bind_pp_proxies",
        "hoist_plans",
        "mark_break_functions",
        "mark_attention",
        "mark_logits_gate",
        "mark_dsa_indexer",
        "mark_a2a_moe",
        "mark_rules",
        "mark_cp_gather_tail",
        "join_side_streams",
        "mark_uncapturable",
        "fuse_mla_bmm",
    )


def test_each_pass_reports_in_order(graph_of: GraphOf) -> None:
    results = run_passes(graph_of(fn, torch.ones(4)), Options(breaks=("op:aten::sin",)))
    assert [(result.name, result.changes) for result in results] == list(CHANGES.items())


def test_the_most_deliberate_reason_wins(graph_of: GraphOf) -> None:
    """A declared break, matched by a rule; an unknown op, matched by a rule."""
    graph = graph_of(fn, torch.ones(4))
    options = Options(breaks=(lambda facts: facts.opaque or "bcg_tests" in facts.op,))
    assert {r.name: r.changes for r in run_passes(graph, options)} == CHANGES | {"mark_uncapturable": 0}
    assert [reason.code for reason in graph.marks.values()] == ["eager_break", "user_rule"]


@pytest.mark.parametrize("name", names())
def test_a_disabled_pass_does_nothing_and_says_so(graph_of: GraphOf, name: str) -> None:
    graph = graph_of(fn, torch.ones(4))
    results = run_passes(graph, Options(breaks=("op:aten::sin",), disable_passes=(name,)))
    assert {result.name: result.changes for result in results} == CHANGES | {name: 0}
    assert {result.name: result.notes for result in results}[name] == ("disabled by option",)
    assert len(graph.marks) == 3 - CHANGES[name]


def test_an_unknown_pass_is_an_error_with_the_nearest_names(graph_of: GraphOf) -> None:
    graph = graph_of(fn, torch.ones(4))
    with pytest.raises(OptionError, match=r"names 'mark_rule', which is no pass. Did you mean 'mark_rules'"):
        run_passes(graph, Options(disable_passes=("mark_rule",)))
    assert graph.marks == {}


def test_compiling_with_an_unknown_pass_fails_with_the_error_inside() -> None:
    compiled = torch.compile(fn, backend="bcg", options={"disable_passes": ["mark_rule"]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Did you mean 'mark_rules'") as caught:
        compiled(torch.ones(4))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_what_passes_did_is_on_the_plan() -> None:
    options = {"breaks": ["op:aten::sin"], "disable_passes": ["mark_uncapturable"]}
    compiled = torch.compile(fn, backend="bcg", options=options)
    compiled(torch.ones(4))
    (program,) = programs_of(compiled)
    assert program.plan is not None
    assert [p.name for p in program.plan.passes] == list(names())
    assert [(p.name, p.changes, p.notes) for p in program.plan.passes if p.changes or p.notes] == [
        ("mark_break_functions", 1, ()),
        ("mark_rules", 1, ()),
        ("mark_uncapturable", 0, ("disabled by option",)),
    ]
    codes = program.plan.reasons()
    assert (codes["eager_break"], codes["user_rule"], codes["unknown_op"]) == (1, 1, 0)
