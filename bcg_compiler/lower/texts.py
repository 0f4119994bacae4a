"""Where generated texts lie, for those who look for a file behind a code object."""

import itertools
from typing import Protocol

#: What generated code has as ``__name__``: by it a frame of such code is known, whatever file it is in.
GENERATED = "bcg_compiler.generated"

_numbers = itertools.count()


class Texts(Protocol):
    """Keeps generated texts as files."""

    def file(self, name: str, source: str) -> str | None:
        """Write a text that is about to be compiled, and return the file; ``None`` where it could not be kept.

        ``name`` is that of the file, without its suffix. The text is compiled under the file's name, so that
        breakpoints in the file stop what runs.
        """

    def compiled(self, name: str, code: str) -> None:
        """Inductor has made this code of the text ``name``."""


def file_name(name: str, source: str, texts: Texts | None) -> str:
    """The file name to compile a text under; without a file one of its own in angle brackets."""
    file = texts.file(name, source) if texts is not None else None
    return file or f"<bcg {name} {next(_numbers)}>"
