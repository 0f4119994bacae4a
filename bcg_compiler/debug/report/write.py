"""The page as one file: nothing in it is loaded from anywhere else."""

import html
import json
import os
from importlib import resources
from pathlib import Path

from bcg_compiler.debug.report.content import Report, content
from bcg_compiler.debug.words import unwritable
from bcg_compiler.errors import BcgError


class ReportError(BcgError):
    """A report that cannot be written."""


def page(report: Report) -> str:
    """The HTML of a report."""
    # No name of a model or line of code may end the element that holds it.
    data = json.dumps(content(report), separators=(",", ":")).replace("<", "\\u003c")
    text = _part("report.html")
    for name, part in (
        ("title", html.escape(report.label)),
        ("style", _part("report.css")),
        ("data", data),
        ("script", _part("report.js")),
    ):
        before, _, after = text.partition(f"<!-- {name} -->")
        text = before + part + after
    return text


def check_report(path: Path) -> None:
    """Raise ``ReportError`` before the work is done rather than after it."""
    if why := unwritable(path, "bcg.html"):
        raise ReportError(f"Cannot write the report to {path}: {why}")


def write_report(report: Report, path: str | os.PathLike[str]) -> int:
    """Write the page of a report to ``path``, and return how many bytes it has.

    Raises ``ReportError`` where the file cannot be written.
    """
    try:
        return Path(path).write_bytes(page(report).encode())
    except OSError as error:
        raise ReportError(f"Cannot write the report to {path}: {error.strerror}.") from None


def _part(name: str) -> str:
    return (resources.files("bcg_compiler.debug.report") / "page" / name).read_text(encoding="utf-8")
