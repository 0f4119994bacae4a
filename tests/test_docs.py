"""What the docs name exists, and what they say is so."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import bcg_compiler as bcg
from bcg_compiler.buckets.admission import Refusal
from bcg_compiler.debug.reasons import BREAKS, EAGER_RUNS, EAGER_UNITS, UNPADDED
from bcg_compiler.distributed.rules import PARALLEL_RULES
from bcg_compiler.distributed.votes import VoteReason
from bcg_compiler.passes import fuse_mla_bmm, join_side_streams, names
from bcg_compiler.plan.rules import RULES

ROOT = Path(__file__).resolve().parent.parent


def test_tests_that_catch_mutants_exist() -> None:
    """A renamed test would leave its row of docs/mutants.md behind."""
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/mutants.md").read_text()))
    assert named
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing


def test_every_reason_code_is_in_the_docs_and_no_other_one() -> None:
    """A code that is shown and not explained, or explained and never shown, leaves its reader alone."""
    text = (ROOT / "docs/reasons.md").read_text()
    in_docs = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    of_segments = {"capturable", "moved"}
    codes = {*BREAKS, *EAGER_RUNS, *EAGER_UNITS, *UNPADDED, *of_segments}
    assert set(in_docs) == {*codes, *(rule.code for rule in RULES)}
    assert {*get_args(Refusal), *get_args(VoteReason), *(rule.code for rule in PARALLEL_RULES)} <= set(EAGER_RUNS)
    assert all(f"| `{rule.code}` | {rule.severity} |" in text for rule in (*RULES, *PARALLEL_RULES))


PAGES = (
    "admission",
    "units",
    "dumps",
    "aot",
    "context-parallel",
    "expert-parallel",
    "hoisting",
    "pipeline",
    "serving-models",
    "paged-transformers",
    "ranks",
    "trace",
)
PASSES = [f"passes/{page.stem}" for page in sorted((ROOT / "docs/passes").glob("*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *PASSES])
def test_examples_print_what_they_say(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for example in re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL):
        exec(example, {})
        said = " ".join(re.findall(r"^# (.*)$", example, re.MULTILINE))
        assert " ".join(capsys.readouterr().out.split()) == said


@pytest.mark.parametrize("module", [fuse_mla_bmm, join_side_streams], ids=lambda m: m.__name__.rpartition(".")[2])
def test_every_refusal_of_a_pass_is_on_its_page_and_no_other_one(module: ModuleType) -> None:
    text = (ROOT / f"docs/passes/{module.__name__.rpartition('.')[2]}.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(get_args(module.Refusal))


def test_every_pass_has_a_page() -> None:
    assert {page.stem for page in (ROOT / "docs/passes").glob("*.md")} == set(names())


@pytest.mark.parametrize("page", ["README.md", "docs/ladders.md"])
def test_the_example_of_a_ladder_replays_every_prompt(page: str) -> None:
    pytest.importorskip("transformers")
    (example,) = (e for e in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if "zoo" in e)
    bcg.reset()
    made: dict[str, Any] = {}
    exec(example, made)
    stats = bcg.stats(made["compiled"])
    assert (stats.graphs, stats.replays, stats.eager_runs) == (1, len(made["prompts"]), {"warm_up": 1})
