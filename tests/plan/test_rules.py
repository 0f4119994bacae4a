"""Rules of configuration: each one fires on what it names, says the values it saw, and on nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from bcg_compiler.errors import OptionError
from bcg_compiler.plan.rules import POLICIES, RULES, Configuration, evaluate

#: What breaks no rule, with a slot of each policy.
FINE = Configuration(
    capture="auto",
    has_ladder=True,
    assume_rows_independent=False,
    padding="row_wise",
    slot_policies=(
        ("input_ids", "ZERO", "int64"),
        ("positions", "SENTINEL", "int32"),
        ("hidden", "KEEP", "bfloat16"),
        ("scale", "ONCE", "float32"),
    ),
)


def codes(**changes: Any) -> list[str]:
    return [rule.code for rule in evaluate(replace(FINE, **changes))]


def test_what_goes_together_breaks_no_rule() -> None:
    assert evaluate(FINE) == ()


@pytest.mark.parametrize(
    ("code", "severity", "changes", "seen"),
    [
        ("keep_causal", "error", {"padding": "causal"}, "in hidden."),
        ("keep_index", "error", {"slot_policies": (("a", "ZERO", "int8"), ("b", "KEEP", "int64"))}, "of b (int64):"),
        ("ladder_off", "note", {"capture": "off"}, "capture is 'off'"),
        (
            "assumption_unused",
            "note",
            {"assume_rows_independent": True, "has_ladder": False, "padding": "", "slot_policies": ()},
            "assume_rows_independent is True",
        ),
    ],
)
def test_a_broken_rule_tells_the_values_and_the_remedy(
    code: str, severity: str, changes: dict[str, Any], seen: str
) -> None:
    (found,) = evaluate(replace(FINE, **changes))
    assert (found.code, found.severity) == (code, severity)
    assert seen in found.text
    assert str(found) == f"{found.text} {found.remedy}" and found.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"padding": "causal", "slot_policies": (("x", "ZERO", "float32"), ("y", "SENTINEL", "float32"))},
        {"padding": "assumed"},
        {"capture": "off", "has_ladder": False, "padding": "", "slot_policies": ()},
        {"capture": "emulated"},
        {"assume_rows_independent": True, "padding": "assumed"},
        {"slot_policies": (("ids", "ZERO", "int64"), ("mask", "SENTINEL", "bool"), ("table", "ONCE", "int32"))},
    ],
)
def test_what_is_near_a_rule_does_not_break_it(changes: dict[str, Any]) -> None:
    assert codes(**changes) == []


@pytest.mark.parametrize("prefix", ["", "torch."])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "bool", "a_new_one"])
def test_dtypes_that_may_be_an_index_must_not_be_kept(prefix: str, dtype: str) -> None:
    """One that nobody has heard of may be an index, too."""
    assert codes(slot_policies=(("x", "KEEP", prefix + dtype),)) == ["keep_index"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn", "bfloat16", "complex64", "torch.float64"])
def test_dtypes_that_are_no_index_may_be_kept(dtype: str) -> None:
    assert codes(slot_policies=(("x", "KEEP", dtype),)) == []


def test_several_broken_rules_are_told_in_the_order_of_the_table() -> None:
    everything = {
        "capture": "off",
        "padding": "causal",
        "slot_policies": (("a", "KEEP", "int64"), ("b", "KEEP", "float32"), ("c", "KEEP", "bool")),
    }
    assert codes(**everything) == ["keep_causal", "keep_index", "ladder_off"]
    first, second, _ = evaluate(replace(FINE, **everything))
    assert "in a, b, c." in first.text
    assert "of a (int64), c (bool):" in second.text


def test_a_policy_that_does_not_exist_is_refused_with_the_nearest() -> None:
    """A misspelled ``KEEP`` would have broken no rule."""
    with pytest.raises(OptionError, match=r"The policy of slot hidden is 'KEPT'. Did you mean 'KEEP'"):
        replace(FINE, slot_policies=(("hidden", "KEPT", "int64"),))
    assert replace(FINE, slot_policies=tuple(("x", policy, "float32") for policy in POLICIES))


def test_each_code_stands_once() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)
