"""The storages that a node allocates: each once, how large, and how long the node itself needs it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import bcg_compiler as bcg
from bcg_compiler.compat.recorder import Recorded
from bcg_compiler.facts.allocations import new_storages

Collect = Callable[..., Any]


@bcg.eager_break(fake=lambda x: x.new_empty(7).repeat(2))
def body(x: Tensor) -> Tensor:
    return x.new_empty(14)


def taken(facts: Any) -> list[tuple[str, int | None]]:
    return [(new.bytes, new.lasts) for new in facts.allocates]


def test_a_result_outlives_its_node(facts_of: Collect) -> None:
    facts = facts_of(lambda x: x + 1, torch.ones(4, 8))["add"]
    assert taken(facts) == [("128", None)]
    assert {new.root for new in facts.allocates} == facts.fresh


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x: x.view(32), ".view"),
        (lambda x: x.add_(1), ".add_"),
        (lambda x: x.reshape(32), ".reshape"),
        (lambda x: x.to(torch.float32), ".to"),
        (lambda x: x.contiguous(), ".contiguous"),
        (lambda x: x.split(2), ".split"),
        (lambda x: F.dropout(x, 0.5, False), "dropout"),
    ],
    ids=["view", "in place", "reshape that views", "cast to itself", "contiguous", "split", "dropout that is off"],
)
def test_these_allocate_nothing(facts_of: Collect, fn: Callable[..., Any], op: str) -> None:
    assert taken(facts_of(fn, torch.ones(4, 8))[op]) == []


def test_a_composite_operation_and_its_parts_count_each_storage_once(facts_of: Collect) -> None:
    facts = facts_of(lambda x: x.softmax(-1, dtype=torch.float64), torch.ones(4, 8))[".softmax"]
    assert len(facts.aten) > len(facts.allocates)
    assert taken(facts) == [("256", 1), ("256", None)]  # the cast, which is needed until the result is there


def test_unread_results_of_an_operation_die_inside_the_node(facts_of: Collect) -> None:
    facts = facts_of(lambda x: F.layer_norm(x, (8,)), torch.ones(4, 8))["layer_norm"]
    assert taken(facts) == [("128", None), ("16", 1), ("16", 0)]  # mean and rstd go once all three are there


def test_an_item_of_a_tuple_allocates_nothing_again(facts_of: Collect) -> None:
    collected = facts_of(lambda x: x.topk(2)[0], torch.ones(4, 8))
    assert taken(collected[".topk"]) == [("32", None), ("64", None)]
    assert taken(collected["getitem"]) == []


def test_of_a_break_only_the_results_are_known(facts_of: Collect) -> None:
    (facts,) = (f for f in facts_of(lambda x: body(x), torch.ones(4)).graph.facts.values() if f.opaque)
    assert taken(facts) == [("56", None)]


def test_sizes_are_expressions_in_the_graphs_symbols(facts_of: Collect) -> None:
    collected = facts_of(lambda x: torch.cat([x, x]) * 2, torch.ones(4, 8), again=(torch.ones(6, 8),))
    (symbol,) = {size for spec in collected.given("x").specs for size in spec.shape if not size.isdigit()}
    assert [new.bytes for new in collected["mul"].allocates] == [f"64*{symbol}"]


@pytest.mark.parametrize(
    "without",
    [lambda: torch.eye(4).to_sparse(), lambda: TwoTensor(torch.ones(4), torch.ones(4))],
    ids=["sparse", "two"],
)
def test_what_has_no_storage_of_its_own_counts_nothing(without: Callable[[], Tensor]) -> None:
    made = without()
    call = Recorded(torch.ops.aten.clone.default, (made,), (), (made, 3, None), (made,), {})
    assert new_storages([call], [made], id, 0) == ()


def test_a_view_of_a_tensor_that_was_never_an_input_allocates_nothing() -> None:
    """A graph within a higher-order operation holds such tensors; they are first seen where they are read."""
    held = torch.ones(4, 4)
    call = Recorded(torch.ops.aten.view.default, (held,), (), (held.view(16),), (held, [16]), {})
    assert new_storages([call], [held.view(16)], lambda tensor: tensor.data_ptr(), 0) == ()
