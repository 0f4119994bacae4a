"""What a prefill of the published models is compiled to, from fakes: the steps of each layer, as golden text.

A text is for one version of torch, the pinned one: other versions trace a norm, say, as other operations.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

from bcg_compiler.debug import screen
from bcg_compiler.debug.explain import plan_model
from bcg_compiler.models import full_size
from bcg_compiler.plan import Plan

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="golden texts are for torch 2.13")

Golden = Callable[[str, str], None]

#: How a prefill is compiled, by the name of the part of the text.
VARIANTS: dict[str, dict[str, Any]] = {
    "512 tokens": {},
    "any number of tokens, padded": {"ladder": [512, 1024, 2048]},
    "512 tokens, without fusion": {"disable_passes": ["fuse_mla_bmm"]},
}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> Iterator[None]:
    yield


def plan_of(name: str, options: dict[str, Any]) -> Plan:
    found = plan_model(f"bcg_compiler.models.full_size:{name}", length=512, options=options)
    (plan,) = found.plans
    assert plan is not None and not found.note and not found.uncompiled.graph_breaks
    return plan


def text_of(plan: Plan) -> str:
    """The steps with the layers that are alike shown once, and what passes have to say."""
    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(screen.plan_summary(plan))
    if plan.padding is not None:
        console.print(f"{plan.padding.proof}, padded to {', '.join(map(str, plan.padding.buckets))}")
    console.print(", ".join(f"{p.name} {p.changes}" for p in plan.passes if p.changes))
    console.print(screen.steps_table(plan))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def texts_of(name: str) -> str:
    return "\n".join(f"== {label}\n{text_of(plan_of(name, options))}" for label, options in VARIANTS.items())


@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=pytest.mark.nightly), "deepseek_v32"])
def test_the_first_layers(name: str, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three dense and four sparse layers, of full width: the plan of all layers repeats these."""
    monkeypatch.setattr(full_size, "cut", lambda: getattr(full_size, name)(layers=7), raising=False)
    golden(f"{name}_7_layers", text_of(plan_of("cut", {})))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm5", "gpt_oss"])
def test_all_layers(name: str, golden: Golden) -> None:
    golden(name, texts_of(name))


@pytest.mark.parametrize("options", [{}, {"ladder": [512, 1024]}], ids=["512 tokens", "any number of tokens"])
@pytest.mark.parametrize("hoisted", [True, False])
def test_steps_of_a_layer_with_one_plan_for_all(
    hoisted: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense MLA where FlashInfer does it: of a sparse layer's two breaks one is left, of a dense one's none."""
    from bcg_compiler.models.layers import flashinfer, planned

    monkeypatch.setattr(flashinfer, "unavailable", lambda device: "")
    monkeypatch.setattr(flashinfer.LatentShape, "refuses", lambda shape: "")
    monkeypatch.setattr(planned.Planner, "prepare", lambda planner: None)  # of no batch: nothing is run
    monkeypatch.setattr(full_size, "cut", lambda: full_size.deepseek_v3(layers=6), raising=False)
    plan = plan_of("cut", options if hoisted else {**options, "disable_passes": ["hoist_plans"]})
    assert len(plan.hoisted) == hoisted
    assert dict(plan.reasons()) == ({"a2a_moe": 3} if hoisted else {"attention": 6, "a2a_moe": 3})
    assert (len(plan.segments), len(plan.breaks)) == ((4, 3) if hoisted else (10, 9))
