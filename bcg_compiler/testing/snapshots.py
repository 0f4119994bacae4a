"""Texts of plans in files beside a test, ``__bcg_snapshots__/<test file>/<test>.txt``, and what differs."""

import difflib
import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "__bcg_snapshots__"

#: How many lines of a diff are shown.
MOST_LINES = 60

#: A reason of a step, as the text of a plan has it; the ordinal of the operation differs between plans.
_REASON = re.compile(r"^  (\w+): %\d+ (.*)$", re.MULTILINE)

#: The line with the counts of a plan.
_COUNTS = re.compile(r"^plan: (.*)$", re.MULTILINE)


@dataclass
class Session:
    """What one run of pytest sees: tests by (file, name), those that passed; snapshots that were used and written."""

    tests: set[tuple[str, str]] = field(default_factory=set)
    passed: set[tuple[str, str]] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def unused(self) -> list[str]:
        """Snapshots of the files that were run that belong to no test, or to one that passed without them."""
        found = []
        for file in {file for file, _ in self.tests}:
            names = {file_name(test): test for path, test in self.tests if path == file}
            for path in folder_of(Path(file)).glob("*.txt"):
                test = names.get(path.name.partition(".")[0])
                if str(path) not in self.used and (test is None or (file, test) in self.passed):
                    found.append(str(path))
        return sorted(found)

    def sent(self) -> dict[str, list[list[str]]]:
        """All of it as what one process can send to another."""
        pairs = {"tests": sorted(map(list, self.tests)), "passed": sorted(map(list, self.passed))}
        return {**pairs, "used": [sorted(self.used)], "written": [sorted(self.written)]}

    def receive(self, sent: dict[str, list[list[str]]]) -> None:
        """Add what another process has sent."""
        self.tests |= {(file, test) for file, test in sent["tests"]}
        self.passed |= {(file, test) for file, test in sent["passed"]}
        self.used |= set(sent["used"][0])
        self.written |= set(sent["written"][0])


@dataclass
class Snapshots:
    """The snapshots of one test."""

    file: Path
    test: str
    nodeid: str
    update: bool
    session: Session
    _taken: int = 0

    def check(self, text: str, version: str, name: str = "") -> None:
        """Compare ``text`` with the snapshot called ``name``, or else with the next one; with ``update`` write it.

        ``version`` is that of torch, which a text may depend on. Raises ``AssertionError`` that says what to do.
        """
        __tracebackhide__ = True
        if not name:
            self._taken += 1
            name = "" if self._taken == 1 else str(self._taken)
        elif not re.fullmatch(r"[\w-]+", name) or name.isdecimal():
            raise ValueError(f"{name!r} is no name of a snapshot: give letters, digits, - and _, and not only digits.")
        path = folder_of(self.file) / f"{file_name(self.test)}{f'.{name}' if name else ''}.txt"
        again = f'pytest "{self.nodeid}" --bcg-update'
        if str(path) in self.session.used:
            raise ValueError(f"The snapshot {path.name} was already compared in this test: give another name=.")
        self.session.used.add(str(path))
        header = f"# torch {version}\n"
        if self.update:
            if not path.is_file() or path.read_text() != header + text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(header + text)
                self.session.written.add(str(path))
            return
        if not path.is_file():
            raise AssertionError(f"There is no snapshot {path}. To write it: {again}")
        first, _, wanted = path.read_text().partition("\n")
        if wanted != text:
            raise AssertionError(_changed(wanted, text, path, first.removeprefix("# torch "), version, again))


def folder_of(file: Path) -> Path:
    """Where the snapshots of a test file are."""
    return file.parent / FOLDER / file.stem


def file_name(test: str) -> str:
    """What the snapshots of a test are called, up to the first dot: another one for each test."""
    plain = re.sub(r"[^\w-]+", "-", test).strip("-")
    return plain if re.fullmatch(r"[\w-]+", test) else f"{plain}-{hashlib.sha256(test.encode()).hexdigest()[:6]}"


def _changed(wanted: str, got: str, path: Path, taken_with: str, version: str, again: str) -> str:
    """What has changed: the counts, the reasons that came and went, the lines."""
    said = [f"Another plan than in {path}:"]
    counts = [" + ".join(_COUNTS.findall(text)) for text in (wanted, got)]
    if counts[0] != counts[1]:
        said.append(f"  {counts[0]}  →  {counts[1]}")
    before, after = (Counter(_REASON.findall(text)) for text in (wanted, got))
    for sign, reasons in (("new break ", after - before), ("gone      ", before - after)):
        said += [
            f"  {sign} {code}: {text}" + (f" ({times} times)" if times > 1 else "")
            for (code, text), times in reasons.items()
        ]
    diff = [line for line in difflib.unified_diff(wanted.splitlines(), got.splitlines(), n=2, lineterm="")][2:]
    diff = [f"@@ {_step_at(wanted, line)} @@" if line.startswith("@@") else line for line in diff]
    said += ["", *diff[:MOST_LINES]]
    if len(diff) > MOST_LINES:
        said.append(f"… {len(diff) - MOST_LINES} more lines")
    if taken_with != version:
        said += [
            "",
            f"The snapshot was taken with torch {taken_with}, and this is torch {version}: graphs of different "
            "versions may have other operations. Compare with that version before you accept the change.",
        ]
    return "\n".join([*said, "", f"If it is meant to change: {again}, then read the diff of the file."])


def _step_at(text: str, hunk: str) -> str:
    """The step that a hunk of a diff begins in."""
    start = re.match(r"@@ -(\d+)", hunk)
    lines = text.splitlines()[: int(start[1]) if start else 0]
    return next((line for line in reversed(lines) if line.startswith(("step ", "plan"))), "inputs")
