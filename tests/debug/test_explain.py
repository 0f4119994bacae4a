"""Plans made of fakes are the plans of the real models, and deep models stay readable."""

import io
from typing import cast

import pytest
import torch
from rich.console import Console

import bcg_compiler as bcg
from bcg_compiler.debug import screen
from bcg_compiler.debug.explain import Explanation, plan_model
from bcg_compiler.debug.reasons import BREAKS, meaning
from bcg_compiler.debug.words import common_text
from bcg_compiler.models import zoo
from bcg_compiler.plan import Plan, plan_text
from bcg_compiler.plan.plan import PassSummary
from bcg_compiler.runtime import programs_of


def real_texts(name: str, length: int, dtype: torch.dtype) -> list[str]:
    bcg.reset()
    built = zoo.build(name, dtype=dtype)
    compiled = torch.compile(built.model, backend="bcg")
    with torch.inference_mode():
        compiled(**built.make_inputs(length, torch.Generator().manual_seed(0)))
    return [plan_text(program.plan) for program in programs_of(compiled) if program.plan]


@pytest.mark.parametrize(
    ("name", "length", "dtype"),
    [
        ("llama", 128, torch.float32),
        ("deepseek_v3", 128, torch.float32),
        ("glm5", 70, torch.float32),
        ("t5", 12, torch.float32),  # its encoder and decoder share one embedding
    ],
)
def test_the_plan_of_fakes_is_the_plan_of_the_real_model(name: str, length: int, dtype: torch.dtype) -> None:
    found = plan_model(name, length=length, dtype=dtype)
    assert not found.note
    assert [plan_text(plan) for plan in found.plans if plan] == real_texts(name, length, dtype)


def test_no_weights_are_made() -> None:
    """A model of 46 billion parameters is planned as fast as a small one."""
    full_size = dict(hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256, intermediate_size=18432)
    found = plan_model("deepseek_v3", layers=5, config=full_size)
    (plan,) = found.plans
    assert plan is not None
    assert len(plan.breaks) == 8
    assert any("7168" in dim for value in plan.values for spec in value.specs for dim in spec.shape)


def test_a_model_of_fakes_breaks_no_rule_that_the_real_one_keeps() -> None:
    """Capture is off for fakes, and the plan then said that a ladder has no effect: the user had not turned it off."""
    found = plan_model("llama", layers=1, options={"ladder": [64]})
    assert [plan.broken_rules for plan in found.plans if plan] == [()]
    found = plan_model("llama", layers=1, options={"ladder": [64], "capture": "off"})
    assert [[rule.code for rule in plan.broken_rules] for plan in found.plans if plan] == [["ladder_off"]]


def test_deep_models_are_folded_and_their_layers_are_one_unit() -> None:
    found = plan_model("deepseek_v3", layers=6)
    (plan,) = found.plans
    assert plan is not None
    assert (len(plan.segments), plan.unique_units, len(plan.breaks)) == (11, 4, 10)
    text = printed(found)
    assert "these 4 steps 4 times, up to step 16" in text
    assert "model.layers.{1…4}.mlp.experts" in text
    assert screen.steps_table(plan).row_count == 10


@pytest.mark.nightly
def test_61_layers() -> None:
    found = plan_model("deepseek_v3", layers=61)
    (plan,) = found.plans
    assert plan is not None
    assert (len(plan.segments), plan.unique_units, len(plan.breaks)) == (121, 4, 120)
    assert screen.steps_table(plan).row_count == 10


def printed(found: Explanation) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(screen.plans_view(found.plans))
    return cast(io.StringIO, console.file).getvalue()


def test_what_passes_have_to_say_is_shown_once_for_all_layers() -> None:
    """A refusal of a pass was in the plan's text only: who reads the screen took it for granted."""
    summary = PassSummary("fuse_mla_bmm", 0, tuple(f"not_alone: bmm in layers.{i}.attn: a segment" for i in range(9)))
    plan = Plan((), (), (), (), (), (), (), "cpu", passes=(PassSummary("mark_rules", 0), summary))
    console = Console(width=200, file=io.StringIO())
    console.print(screen.plans_view([plan]))
    text = cast(io.StringIO, console.file).getvalue()
    assert "pass fuse_mla_bmm: not_alone: bmm in layers.{0…8}.attn: a segment (9 times)" in text
    assert "mark_rules" not in text


# -- the parts of the screen


@pytest.mark.parametrize(
    ("keys", "blocks"),
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("aab", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),  # twice is shown in full
        ("xaaay", [(0, 1, 1), (1, 1, 3), (4, 1, 1)]),
        ("xabababy", [(0, 1, 1), (1, 2, 3), (7, 1, 1)]),
        ("abcabcabcab", [(0, 3, 3), (9, 1, 1), (10, 1, 1)]),
        ("aabaabaab", [(0, 3, 3)]),
        ("aaabbbb", [(0, 1, 3), (3, 1, 4)]),
    ],
)
def test_fold(keys: str, blocks: list[tuple[int, int, int]]) -> None:
    assert [tuple(block) for block in screen.fold(keys)] == blocks


def test_common_text_shows_the_range_of_the_numbers() -> None:
    assert common_text(["a.3.b", "a.4.b", "a.5.b"]) == "a.{3…5}.b"
    assert common_text(["a.3.b1 → a.4.c", "a.4.b1 → a.5.c"]) == "a.{3…4}.b1 → a.{4…5}.c"
    assert common_text(["a.3.b", "head"]) == "a.3.b"


def test_every_break_code_has_a_meaning_and_an_unknown_one_is_shown_as_it_is() -> None:
    assert all(found.why and found.remedy for found in BREAKS.values())
    assert meaning("a_new_code").why == "a new code"
