"""A folder that one process writes its dump to: it is nobody else's, bounded, and no error of it reaches the caller."""

import errno
import fcntl
import functools
import logging
import os
import re
import shutil
from pathlib import Path

log = logging.getLogger("bcg_compiler")

#: What one process writes at most, in all and in one file.
MAX_FILES = 5_000
MAX_BYTES = 512 << 20
MAX_FILE_BYTES = 32 << 20

#: The first line of the index of a graph, by which folders of an earlier run are known.
HEADER = "bcg dump of graph"
INDEX = "index.txt"
_GRAPH_FOLDER = re.compile(r"\d{3,}_\w+")


class LeftOut(Exception):
    """A file that is one too many, or too large. The text says so; it is empty where that has been said."""


class Folder:
    """A folder that this process writes to, until something fails: then it warns, once, and writes no more.

    Folders of graphs that an earlier run has left in it are removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._graphs = self._files = self._bytes = 0
        self._process = os.getpid()
        self._failed = False
        try:
            self.path, self._lock = _claim(path)
            _remove_graphs(self.path)
            (self.path / INDEX).write_text("bcg dump: a folder for each graph, in the order they were compiled\n")
        except (OSError, ValueError) as error:
            self.fail(error)

    @property
    def usable(self) -> bool:
        """Whether files can be written: not any more after an error, nor in a process that was forked."""
        return not self._failed and self._process == os.getpid()

    def begin(self, name: str) -> str | None:
        """Begin the folder of another graph, and return its name, which starts with a number; ``None`` if full."""
        folder = f"{self._graphs:03d}_{re.sub(r'[^A-Za-z0-9_]+', '_', name).strip('_')[:80] or 'graph'}"
        self._graphs += 1
        try:
            self._count(0)
        except LeftOut as left_out:
            if str(left_out):
                self.say("", f"{folder} and later graphs are {left_out}")
            return None
        self.say("", f"{folder}/")
        return folder

    def write(self, name: str, text: str) -> Path:
        """Write a file. Raises ``LeftOut`` and ``OSError``."""
        data = text.encode()
        self._count(len(data))
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes(data)
        except OSError:
            path.unlink(missing_ok=True)  # half a text is worse than none
            raise
        return path

    def say(self, folder: str, text: str) -> None:
        """Add lines to the index of a graph, or with ``""`` to that of all."""
        path = self.path / folder / INDEX
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", newline="\n") as index:
            index.write(text + "\n")

    def fail(self, error: Exception) -> None:
        """Write no more, and say so."""
        if not self._failed:
            self._failed = True
            log.warning(
                "bcg: the dump to %s ends here: %s: %s. The program goes on without it. Give the option 'dump', or "
                "BCG_DUMP, a folder on a disk with room, in which this process may write.",
                self.path,
                type(error).__name__,
                error,
            )

    def _count(self, size: int) -> None:
        self._files += 1
        if self._files > MAX_FILES:
            first = self._files == MAX_FILES + 1
            raise LeftOut(f"left out: a dump has {MAX_FILES:,} files at most" if first else "")
        if size > MAX_FILE_BYTES:
            raise LeftOut(f"left out: its {size:,} bytes are more than the {MAX_FILE_BYTES:,} of a file of a dump")
        if self._bytes + size > MAX_BYTES:
            raise LeftOut(f"left out: a dump has {MAX_BYTES:,} bytes at most, and {size:,} more were too many")
        self._bytes += size


def folder_of(directory: str) -> Folder:
    """The folder of this process, and of this rank where a launcher has started several, below ``directory``."""
    path = Path(os.path.abspath(directory))  # debuggers know files by their full names
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and ranks.isdigit() and int(ranks) > 1:
        path /= f"rank_{rank}"
    return _folder(path, os.getpid())


@functools.cache
def _folder(path: Path, process: int) -> Folder:
    return Folder(path)


def _claim(path: Path) -> tuple[Path, int]:
    """The first of ``path``, ``path/process_2``, … that no other process has, and what holds it while this one lives.

    By a lock of the kind that a forked process does not have, so that it gets a folder of its own.
    """
    number, candidate = 1, path
    while True:
        candidate.mkdir(parents=True, exist_ok=True)
        lock = os.open(candidate / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return candidate, lock
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        number += 1
        candidate = path / f"process_{number}"


def _remove_graphs(path: Path) -> None:
    for found in sorted(path.iterdir()):
        index = found / INDEX
        if not (_GRAPH_FOLDER.fullmatch(found.name) and index.is_file()) or found.is_symlink():
            continue
        with index.open(encoding="utf-8", errors="replace") as text:
            ours = text.readline().startswith(HEADER)
        if ours:
            shutil.rmtree(found)
