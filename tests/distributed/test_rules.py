"""Rules for ranks: each one fires on what it names, for choices and defaults alike, and on nothing else."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from bcg_compiler.distributed.rules import PARALLEL_RULES, Parallel, evaluate
from bcg_compiler.errors import RankError

#: What breaks no rule, with several ranks of each kind.
FINE = Parallel(
    dp=2,
    pp=2,
    cp=4,
    tp=4,
    ep=8,
    attention_does_cp=True,
    all_to_all="deepep",
    all_to_all_declared=True,
    dense_mla=True,
    prefix_captured=True,
)


def codes(**changes: Any) -> list[str]:
    return [rule.code for rule in evaluate(replace(FINE, **changes))]


def test_layouts_that_are_fine_break_no_rule() -> None:
    assert evaluate(FINE) == () == evaluate(Parallel())
    assert codes(tp=None) == codes(cp=1, tp=2, cp_strategy="ring", attention_does_cp=False) == []
    assert codes(dual_stream=True, all_to_all="none") == codes(prefix_captured=False, prefixes=False) == []


@pytest.mark.parametrize(
    ("code", "changes", "seen"),
    [
        ("cp_strategy", {"cp_strategy": "ring"}, "'ring'"),
        ("cp_size", {"tp": 8}, "cp is 4, and tp is 8"),
        ("cp_size", {"tp": 1}, "cp is 4, and tp is 1"),
        ("cp_attention", {"attention_does_cp": False}, "cp is 4"),
        ("all_to_all_undeclared", {"all_to_all_declared": False}, "'deepep'"),
        ("two_batch_overlap", {"two_batch_overlap": True}, "Two halves"),
        ("dense_mla_prefix", {"prefix_captured": False}, "no prefix"),
        ("index_adapter", {"index_adapter": True}, "adapter"),
        ("dual_stream_experts", {"dual_stream": True}, "all_to_all is 'deepep'"),
        ("dual_stream_experts", {"dual_stream": True, "all_to_all": "none", "expert_rebalancing": True}, "is True"),
    ],
)
def test_each_rule_fires_alone_and_says_what_it_saw(code: str, changes: dict[str, Any], seen: str) -> None:
    (found,) = evaluate(replace(FINE, **changes))
    assert found.code == code and found.severity == "eager" and seen in found.text
    assert str(found) == f"{found.text} {found.remedy}" and found.remedy


def test_what_nobody_said_is_no_yes() -> None:
    """A layout with ranks and no word on attention or the all-to-all backend."""
    assert [rule.code for rule in evaluate(Parallel(cp=2, all_to_all="mine", dense_mla=True))] == [
        "cp_attention",
        "all_to_all_undeclared",
        "dense_mla_prefix",
    ]


def test_all_broken_rules_are_told_in_the_order_of_the_table() -> None:
    worst = dict(cp_strategy="ring", tp=2, attention_does_cp=False, all_to_all_declared=False, prefix_captured=False)
    found = codes(**worst, two_batch_overlap=True, index_adapter=True, dual_stream=True)
    assert found == [rule.code for rule in PARALLEL_RULES]


def test_a_digest_is_of_every_field() -> None:
    other = {bool: lambda v: not v, int: lambda v: v + 1, str: lambda v: f"{v}'"}
    layouts = [FINE, Parallel()]
    for field in fields(FINE):
        value = getattr(FINE, field.name)
        layouts.append(replace(FINE, **{field.name: other[type(value)](value)}))
    digests = [layout.digest() for layout in layouts]
    assert all(a != b for a, b in itertools.combinations(digests, 2))
    assert replace(FINE).digest() == digests[0] and len(digests[0]) == 16


def test_layouts_from_a_command_line() -> None:
    assert Parallel.parse({"cp": 2, "tp": 2, "two_batch_overlap": True}) == Parallel(cp=2, tp=2, two_batch_overlap=True)
    with pytest.raises(RankError, match=r"'cp_stratgy'\. Did you mean 'cp_strategy'"):
        Parallel.parse({"cp_stratgy": "ring"})
    for wrong in ({"cp": "2"}, {"cp": True}, {"dual_stream": 1}, {"tp": 1.0}, {"all_to_all": 1}):
        with pytest.raises(RankError, match="it is of type"):
            Parallel.parse(wrong)
    with pytest.raises(RankError, match="pp is 0; it is a number of ranks, at least 1"):
        Parallel(pp=0)
