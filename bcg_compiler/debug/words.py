"""Small parts of what is printed: numbers with their nouns, paths, lists that end."""

import os
import re
import site
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding

#: How many are listed: lines of code for one sentence, inputs of one graph.
MOST_LINES = 6
MOST_INPUTS = 5


def common_text(texts: Sequence[str]) -> str:
    """One text for several that differ in their numbers: ``layers.3.mlp`` to ``layers.60.mlp`` is
    ``layers.{3…60}.mlp``.
    """
    parts = [re.split(r"(\d+)", text) for text in texts]
    if len({tuple(part[::2]) for part in parts}) > 1:
        return texts[0]
    merged = []
    for column in zip(*parts, strict=True):
        merged.append(column[0] if len(set(column)) == 1 else f"{{{column[0]}…{column[-1]}}}")
    return "".join(merged)


def short_path(file: str) -> str:
    """The path from the folder of packages or from the current folder on, if the file is in one of them."""
    roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), os.getcwd()]
    for root in roots:
        if file.startswith(root.rstrip(os.sep) + os.sep):
            return os.path.relpath(file, root)
    return file


def some(names: list[str], most: int) -> list[str]:
    """At most so many names, the last of which says how many more there are."""
    return names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]


def indented(columns: int, text: RenderableType) -> Padding:
    """Text, or a table, that is moved to the right by so many columns."""
    return Padding(text, (0, 0, 0, columns), expand=False)


def count(number: int, name: str) -> str:
    """``1 break``, ``2 breaks``."""
    return f"{number:,} {name}" + ("" if number == 1 else "s")


def unwritable(path: Path, example: str) -> str:
    """Why a file cannot be written, before the work is done rather than after it; "" if it may be. ``example``: a name
    for it, where it is a folder.
    """
    if path.is_dir():
        return f"it is a folder. Name a file, such as {path / example}."
    if not path.absolute().parent.is_dir():
        return f"the folder {path.parent} does not exist."
    return ""
