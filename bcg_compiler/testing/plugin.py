"""The plugin of pytest: fixtures ``bcg_plan`` and ``bcg_counters``, marker ``bcg_sanitizer``, option ``--bcg-update``.

Everything that needs torch is imported by the test that asks for it.
"""

import os
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bcg_compiler.testing.snapshots import Session, Snapshots

if TYPE_CHECKING:
    from bcg_compiler.testing.count import CounterFixture
    from bcg_compiler.testing.plans import PlanFixture

MARKER = "bcg_sanitizer"

_session = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--bcg-update``."""
    group = parser.getgroup("bcg_compiler")
    group.addoption("--bcg-update", action="store_true", help="write the snapshots of plans that tests ask for")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; begin to note which snapshots are used."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}: run with all that is compiled captured on the emulated device, and each replay compared with eager",
    )
    config.stash[_session] = Session()


@pytest.fixture
def bcg_plan(request: pytest.FixtureRequest) -> "PlanFixture":
    """What a model compiles to: see ``PlanFixture``."""
    from bcg_compiler.testing.plans import PlanFixture

    config = request.config
    update = bool(config.getoption("--bcg-update"))
    return PlanFixture(Snapshots(request.path, _key(request.node), request.node.nodeid, update, config.stash[_session]))


@pytest.fixture
def bcg_counters() -> "CounterFixture":
    """``with bcg_counters.expect(graphs=1, breaks=2): …``: what happens in the block, in numbers.

    Drops all compiled code of the process: what an earlier test has compiled would not be compiled again.
    """
    from bcg_compiler.testing.count import CounterFixture

    _reset()
    return CounterFixture()


# -- the sanitizer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fixtures of a marked test may compile, too; nothing that was compiled without checks is left."""
    if item.get_closest_marker(MARKER) is None:
        return (yield)
    _reset()
    with _checked(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a marked test under the sanitizer."""
    if item.get_closest_marker(MARKER) is None:
        return (yield)
    try:
        with _checked(item):
            result = yield
    except Exception as error:
        if getattr(error, "says_where", False):
            _cut(error)
        raise
    for checks in item.stash[_checks]:
        if checks.first is not None:  # by a server's loop, say; or by pytest.raises
            warnings.warn(
                pytest.PytestWarning(f"{item.nodeid}: a fault was seen, and its error was caught: {checks.first}"),
                stacklevel=2,
            )
    if not any(checks.checked for checks in item.stash[_checks]):
        warnings.warn(
            pytest.PytestWarning(
                f"{item.nodeid} is marked {MARKER}, and no segment was replayed in it: the first call of a shape runs "
                "eagerly, the second one is captured. Call the model more often."
            ),
            stacklevel=2,
        )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Leave nothing with checks to other tests."""
    try:
        return (yield)
    finally:
        if item.get_closest_marker(MARKER) is not None:
            _reset()


def _reset() -> None:
    """Drop all compiled code."""
    from bcg_compiler.runtime import reset

    reset()


def _cut(error: Exception) -> None:
    """Let the traceback of a fault end at the call in the test: what is behind it is torch, and generated code."""
    inside = os.path.dirname(str(sys.modules["torch"].__file__))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code.co_filename.startswith(inside):
            trace.tb_next = None
        trace = trace.tb_next


_checks = pytest.StashKey[list[Any]]()


@contextmanager
def _checked(item: pytest.Item) -> Iterator[None]:
    from bcg_compiler.checks import sanitizer

    with sanitizer() as checks:
        item.stash.setdefault(_checks, []).append(checks)
        yield


# -- snapshots that no test uses


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests of the files that are run, those that are then deselected, too."""
    config.stash[_session].tests |= {(str(item.path), _key(item)) for item in items}


def pytest_deselected(items: list[pytest.Item]) -> None:
    """What is deselected is there all the same."""
    for item in items:
        item.config.stash[_session].tests.add((str(item.path), _key(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Note which tests have passed: only these have used all of their snapshots."""
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_session].passed.add((str(item.path), _key(item)))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the controller what it has seen."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["bcg_snapshots"] = session.config.stash[_session].sent()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist is done."""
    if (sent := getattr(node, "workeroutput", {}).get("bcg_snapshots")) is not None:
        node.config.stash[_session].receive(sent)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With ``--bcg-update``, tell which snapshots were written, and which no test uses."""
    if not config.getoption("--bcg-update"):
        return
    seen = config.stash[_session]
    whole = not any("::" in str(argument) for argument in config.args)
    root = config.rootpath
    for path in sorted(seen.written):
        terminalreporter.write_line(f"bcg: wrote {_relative(path, root)}")
    for path in seen.unused() if whole else ():
        terminalreporter.write_line(f"bcg: no test uses {_relative(path, root)}; delete it")


def _relative(path: str, root: Path) -> str:
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def _key(item: pytest.Item) -> str:
    """The name of a test in its file: class and function, with its parameters."""
    return item.nodeid.partition("::")[2].replace("::", ".")
