"""docs/walk-through.md shows what its commands print, in their order; of numbers only that they are there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from bcg_compiler.cli import app

ROOT = Path(__file__).resolve().parent.parent

#: Those that take more than some seconds run nightly.
QUICK = ("explain docs/walk-through/models.py:limited", "explain docs/walk-through/models.py:centred")


def shown() -> Iterator[tuple[str, list[str]]]:
    """Each command of the page, with the lines under it."""
    for block in re.findall(r"^```\n\$ bcg (.*?)^```", (ROOT / "docs/walk-through.md").read_text(), re.M | re.S):
        command, *lines = block.splitlines()
        yield command, lines


COMMANDS = [
    pytest.param(command, lines, id=command, marks=() if command.startswith(QUICK) else pytest.mark.nightly)
    for command, lines in shown()
]


def looked_at(text: str) -> str:
    """Without what differs between terminals, machines and versions of libraries."""
    return re.sub(r"\d[\d,.]*", "#", re.sub(r"\s+", "", text.replace(str(ROOT), "/…")))


@pytest.mark.parametrize(("command", "lines"), COMMANDS)
def test_a_command_prints_what_the_page_shows(command: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "200"})
    printed = looked_at(result.output)
    parts = [looked_at(part) for part in "\n".join(lines).split("…\n")]
    at = 0
    for part in filter(None, parts):
        assert part in printed[at:], result.output
        at = printed.index(part, at) + len(part)


def test_each_fault_is_found_in_at_most_three_commands() -> None:
    _, *faults = (ROOT / "docs/walk-through.md").read_text().split("\n## ")
    assert [text.count("\n$ bcg ") for text in faults] == [1, 2, 3]
