"""What the docs name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tests_that_catch_mutants_exist() -> None:
    """A renamed test would leave its row of docs/mutants.md behind."""
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/mutants.md").read_text()))
    assert named
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing
