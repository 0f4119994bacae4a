"""Prompt lengths from a file, and the bundled sample."""

import csv
from collections.abc import Iterator
from importlib import resources
from itertools import chain
from pathlib import Path

from bcg_compiler.buckets.ladder import LARGEST
from bcg_compiler.errors import BcgError, nearest

#: Names of the column that holds the lengths; upper and lower case are the same.
COLUMNS = ("ContextTokens", "lengths")

#: Where the bundled lengths come from; see ``data/README.md``.
SAMPLE = "Azure LLM inference trace 2023"


class LengthsError(BcgError, ValueError):
    """A file of prompt lengths that cannot be used."""


def sample_lengths() -> list[int]:
    """The bundled prompt lengths, in tokens: 199 requests to a production service, each of at most 2048 tokens."""
    with resources.as_file(resources.files("bcg_compiler") / "data" / "prompt_lengths.csv") as path:
        return read_lengths(path)


def read_lengths(path: Path) -> list[int]:
    """All lengths of a file, in its order; see ``iterate_lengths``."""
    return list(iterate_lengths(path))


def iterate_lengths(path: Path) -> Iterator[int]:
    """Read prompt lengths, in tokens, row by row: a CSV with a column ``ContextTokens`` or ``lengths``, or one number
    a line.

    Raises ``LengthsError`` with the line for a file that is missing, empty, or holds anything but positive integers.
    """
    rows = _rows(path)
    line, first = next(rows, (0, None))
    if first is None:
        raise LengthsError(f"{path} is empty: it has no lengths.")
    column = _column(path, line, first)
    if column is None:
        column, rows = 0, chain([(line, first)], rows)
    none = True
    for line, row in rows:
        yield _length(path, line, row, column)
        none = False
    if none:
        raise LengthsError(f"{path} has a header and no lengths below it.")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
    except UnicodeDecodeError:
        raise LengthsError(f"{path} is not a text file.") from None
    except csv.Error as error:
        raise LengthsError(f"{path} is not a CSV file: {error}.") from None
    except OSError as error:
        raise LengthsError(f"Cannot read the lengths from {path}: {error.strerror}.") from None


def _column(path: Path, line: int, row: list[str]) -> int | None:
    """Which column the header names; ``None`` if there is no header."""
    known = [name.lower() for name in COLUMNS]
    names = [cell.strip().lower() for cell in row]
    for name in known:
        if name in names:
            return names.index(name)
    if len(row) == 1 and _as_integer(row[0]) is not None:
        return None
    if len(row) == 1:
        raise LengthsError(
            f"{path}, line {line}: {row[0].strip()!r} is neither a number nor a header. Give one number a line, or a "
            f"CSV with a column named {' or '.join(map(repr, COLUMNS))}."
        )
    near = "" if any(map(_as_integer, row)) else f" {nearest(COLUMNS[0], [cell.strip() for cell in row])}"
    raise LengthsError(
        f"{path}, line {line}: no column is named {' or '.join(map(repr, COLUMNS))}; the first line is "
        f"{','.join(row)!r}.{near}"
    )


def _length(path: Path, line: int, row: list[str], column: int) -> int:
    cell = row[column].strip() if column < len(row) else ""
    value = _as_integer(cell)
    if value is None:
        raise LengthsError(f"{path}, line {line}: {cell!r} is not a whole number.")
    if value < 1:
        raise LengthsError(f"{path}, line {line}: {value} is not a length: a prompt has at least 1 token.")
    if value > LARGEST:
        raise LengthsError(f"{path}, line {line}: {value} is not a length: it is above {LARGEST}, the largest int32.")
    return value


def _as_integer(cell: str) -> int | None:
    try:
        return int(cell)
    except ValueError:
        return None
