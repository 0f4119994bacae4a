"""What a pass changed, as a difference of two texts that is short even where the texts are long."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from bcg_compiler.plan import Plan, plan_text

#: Lines of one difference that a page shows, and unchanged lines around each change.
MOST_LINES = 2000
AROUND = 2


@dataclass(frozen=True)
class PassDiff:
    """What pass ``name`` made of one graph: the graph as text ``before`` it and ``after`` it."""

    name: str
    before: str
    after: str


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    """The lines that differ with some around them, as (``-``, ``+``, blank, or ``@`` for a gap; the line).

    The last one says how many more there are, if there are more than a page shows.
    """
    old, new = before.splitlines(), after.splitlines()
    found: list[tuple[str, str]] = []
    # Graphs repeat lines; by default those that come often count for nothing, and every change looks large.
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(AROUND):
        found.append(("@", f"line {group[0][3] + 1}"))
        for kind, first, last, start, end in group:
            if kind == "equal":
                found += [(" ", line) for line in old[first:last]]
                continue
            found += [("-", line) for line in old[first:last]]
            found += [("+", line) for line in new[start:end]]
    if (rest := len(found) - MOST_LINES) > 0:
        found = [*found[:MOST_LINES], ("@", f"{rest} more lines")]
    return found


def read_passes(dump: Path, plans: Sequence[Plan | None]) -> dict[int, tuple[PassDiff, ...]]:
    """What passes changed, from the dump of the compilation that gave ``plans``, by the position of the plan.

    A folder of a dump belongs to the plan whose text it holds; Dynamo may have asked for graphs that it then dropped.
    """
    folders = {file.parent: file.read_text(encoding="utf-8") for file in sorted(dump.glob("*/plan.txt"))}
    found = {}
    for number, plan in enumerate(plans):
        text = None if plan is None else plan_text(plan)
        folder = next((folder for folder, other in folders.items() if other == text), None)
        if folder is not None:
            del folders[folder]
            found[number] = tuple(_passes(folder / "passes"))
    return found


def _passes(folder: Path) -> Iterator[PassDiff]:
    """The texts lie in the order of the passes: ``00_dynamo.txt``, and one for each pass that changed anything."""
    before = ""
    for position, file in enumerate(sorted(folder.glob("*.txt"))):
        after = file.read_text(encoding="utf-8")
        if position:
            yield PassDiff(file.stem.partition("_")[2], before, after)
        before = after
