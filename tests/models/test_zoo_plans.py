"""What the models of the zoo are compiled to, as golden text: transformers' own architectures, small.

A text is for one version of torch, the pinned one: other versions trace a norm, say, as other operations.
"""

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from rich.console import Console

from bcg_compiler.debug import screen
from bcg_compiler.debug.explain import plan_model
from bcg_compiler.models import zoo

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="golden texts are for torch 2.13")

#: Those of every run; all others are planned nightly.
QUICK = ("llama", "mixtral")


@pytest.fixture(autouse=True)
def _clean(clean: None) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in zoo.names()]
)
def test_steps_and_reasons(name: str, golden: Callable[[str, str], None]) -> None:
    found = plan_model(name, length=32)
    written = Console(file=io.StringIO(), width=200)
    for plan in found.plans:
        if plan is None:
            written.print("unsplit")
            continue
        written.print(screen.plan_summary(plan), screen.steps_table(plan))
        written.print(*(f"{code} {count}" for code, count in sorted(plan.reasons().items())), sep="\n")
    written.print(*(f"Dynamo: {cut.reason}, {cut.count} times" for cut in found.uncompiled.graph_breaks), sep="\n")
    text = written.file.getvalue()  # type: ignore[attr-defined]
    golden(f"zoo/{name}", "\n".join(line.rstrip() for line in text.splitlines()) + "\n")
