"""What comes from the pipeline stage before is found by where it lies, and runs in slots with zeroed tails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.errors import OptionError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.bind_pp_proxies import bind_pp_proxies
from bcg_compiler.proxies import PipelineProxy
from bcg_compiler.runtime import programs_of

GraphOf = Callable[..., AnnotatedGraph]

WEIGHT = torch.randn(4, 4)


def stage(given: PipelineProxy, positions: Tensor) -> PipelineProxy:
    """Three tensors, each with several users."""
    assert given.residual is not None and given.topk_indices is not None
    x = given.hidden_states @ WEIGHT + given.hidden_states + positions[:, None]
    residual = given.residual + x[:, None]
    best = residual.sum(1).argmax(-1).int()[:, None]
    return PipelineProxy(x.sin(), residual * given.residual, given.topk_indices + best)


def proxy(rows: int) -> PipelineProxy:
    made = PipelineProxy(torch.randn(rows, 4), torch.randn(rows, 2, 4), torch.randint(9, (rows, 3), dtype=torch.int32))
    for _, tensor in made.tensors():
        torch._dynamo.mark_dynamic(tensor, 0)
    return made


def call(fn: Callable[..., Any], rows: int) -> tuple[PipelineProxy, PipelineProxy]:
    """What a compiled stage gives, and what eager code gives."""
    given, positions = proxy(rows), torch.arange(rows)
    torch._dynamo.mark_dynamic(positions, 0)
    return fn(given, positions), stage(given, positions)


def in_a_list(found: list[dict[str, PipelineProxy]], positions: Tensor) -> PipelineProxy:
    return stage(found[0]["anything"], positions)


class Named:
    """Not a proxy, with a tensor of the same name."""

    def __init__(self, rows: int) -> None:
        self.hidden_states = torch.randn(rows, 4)


def test_it_finds_the_tensors_of_a_proxy_wherever_it_lies(graph_of: GraphOf) -> None:
    positions = torch.arange(5)
    torch._dynamo.mark_dynamic(positions, 0)
    for graph in (graph_of(stage, proxy(5), positions), graph_of(in_a_list, [{"anything": proxy(5)}], positions)):
        result = bind_pp_proxies(graph)
        assert result.changes == len(graph.proxies) == 3
        shapes = {graph.input_facts_of(ordinal).specs[0].shape[1:] for ordinal in graph.proxies}
        assert shapes == {("4",), ("2", "4"), ("3",)}
        assert not graph.marks


def test_what_lies_in_anything_else_is_no_proxy_and_the_graph_stays(graph_of: GraphOf) -> None:
    graph = graph_of(lambda given, hidden_states: given.hidden_states + hidden_states, Named(5), torch.randn(5, 4))
    before = graph.module.code, dict(graph.facts), dict(graph.input_facts)
    assert bind_pp_proxies(graph).changes == 0
    assert not graph.proxies and not graph.marks
    assert (graph.module.code, graph.facts, graph.input_facts) == before


def test_padded_rows_are_zeroed_and_results_are_cut() -> None:
    seen: list[Tensor] = []

    @bcg.eager_break(fake=torch.empty_like)
    def look(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x.clone()

    def looked_at(given: PipelineProxy, positions: Tensor) -> PipelineProxy:
        return stage(PipelineProxy(look(given.hidden_states), given.residual, given.topk_indices), positions)

    options = dict(capture="emulated", ladder=[8, 16], assume_rows_independent=True)
    compiled = torch.compile(looked_at, backend="bcg", fullgraph=True, options=options)
    for rows in (16, 5, 11, 7):
        found, wanted = call(compiled, rows)
        for (name, tensor), (_, expected) in zip(found.tensors(), wanted.tensors(), strict=True):
            assert tensor.shape == expected.shape, name
            torch.testing.assert_close(tensor, expected)
    (program,) = programs_of(compiled)
    assert program.plan is not None and program.replays == 3
    assert {len(x) for x in seen[1:]} == {8, 16} and not seen[-1][7:].any() and seen[-1][:7].all()
    slots = {program.plan.value(slot.ordinal).argument for slot in program.plan.slots}
    assert slots >= {"given.hidden_states", "given.residual", "given.topk_indices"}
    assert {slot.policy.kind for slot in program.plan.slots} == {"zero"}


@pytest.mark.parametrize("policy", ["keep", "once", 7])
def test_another_policy_is_refused_with_the_reason(policy: Any) -> None:
    options = {"capture": "emulated", "ladder": [8], "slots": {"given.hidden_states": policy}}
    compiled = torch.compile(stage, backend="bcg", options=options)
    says = rf"gives '.*{policy}.*' for in\d \(given.hidden_states\), which the pipeline stage before hands on"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=says) as caught:
        call(compiled, 5)
    assert isinstance(caught.value.inner_exception, OptionError)


def test_the_rows_of_a_proxy_are_the_tokens_where_other_sizes_are_open() -> None:
    def fn(given: PipelineProxy, table: Tensor) -> Tensor:
        return given.hidden_states * table.sum()

    plans = {}
    for disabled in ((), ("bind_pp_proxies",)):
        torch.compiler.reset()
        options = {"capture": "emulated", "ladder": [8], "disable_passes": disabled}
        compiled = torch.compile(fn, backend="bcg", options=options)
        table = torch.randn(13)
        torch._dynamo.mark_dynamic(table, 0)
        compiled(PipelineProxy(proxy(5).hidden_states), table)
        program = programs_of(compiled)[-1]  # of one code object, whatever it was compiled with
        plans[disabled] = program.plan
    bound, unbound = plans.values()
    assert bound is not None and bound.padding is not None
    assert bound.by_ordinal[bound.padding.place[0]].argument == "given.hidden_states"
    assert unbound is not None and unbound.unpadded is not None and unbound.unpadded.code == "ambiguous_tokens"
