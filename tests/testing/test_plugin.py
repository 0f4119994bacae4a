"""The plugin of pytest, in test runs of its own."""

import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "bcg_compiler.testing.plugin", "-p", "no:cacheprovider")

MODEL = """
import torch
from torch import nn
import bcg_compiler as bcg

@bcg.eager_break(fake=torch.empty_like)
def apart(x):
    return x * 2

def model(x):
    return apart(x.sin() @ x).cos() @ x
"""

PLAN_TEST = """
from model import model
import torch

def test_plan(bcg_plan):
    assert bcg_plan(model, torch.ones(4, 4), options={"min_segment_kernels": 1}).matches_snapshot()
"""


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Runs in this process forget the modules that they were the first to import: registries would exist twice."""
    import torch

    import bcg_compiler.testing.count
    import bcg_compiler.testing.plans  # noqa: F401
    from bcg_compiler.checks import sanitizer

    with torch.no_grad(), sanitizer():
        compiled = torch.compile(lambda x: x.sin(), backend="bcg")
        compiled(torch.ones(2)), compiled(torch.ones(2))


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a model in ``model.py``."""
    pytester.makepyfile(model=MODEL)
    pytester.syspathinsert()
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """One run of pytest with the plugin."""
    sys.modules.pop("model", None)
    return project.runpytest_inprocess(*PLUGIN, *arguments)


def snapshot(project: pytest.Pytester, name: str = "test_plan") -> Path:
    """The file of a snapshot."""
    return project.path / "__bcg_snapshots__/test_it" / f"{name}.txt"


def test_a_missing_snapshot_fails_and_an_update_writes_it(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=PLAN_TEST)
    missing = run(project)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(['*There is no snapshot *test_plan.txt. To write it: pytest "test_it.py::test_plan"*'])
    assert not snapshot(project).exists()
    updated = run(project, "--bcg-update")
    updated.assert_outcomes(passed=1)
    updated.stdout.fnmatch_lines(["bcg: wrote __bcg_snapshots__/test_it/test_plan.txt"])
    text = snapshot(project).read_text()
    assert "eager_break" in text and str(project.path) not in text
    run(project).assert_outcomes(passed=1)


def test_a_difference_names_the_new_break_and_its_step(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=PLAN_TEST)
    run(project, "--bcg-update")
    project.makepyfile(model=MODEL.replace("cos() @ x", "cos() @ apart(x + 1)"))
    changed = run(project)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "E *2 segments (2 different), 1 break  →  *",
            "E *new break  eager_break: *",
            "E *@@ step * @@",
            "E *+*eager_break: %*",
            'E *If it is meant to change: pytest "test_it.py::test_plan" --bcg-update*',
        ]
    )


def test_an_old_version_of_torch_is_told(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=PLAN_TEST)
    run(project, "--bcg-update")
    text = snapshot(project).read_text()
    first, _, rest = text.partition("\n")
    snapshot(project).write_text(f"# torch 2.0\n{rest}")
    run(project).assert_outcomes(passed=1)  # the version alone is no difference
    snapshot(project).write_text(f"# torch 2.0\n{rest.replace('2 segments', '3 segments')}")
    run(project).stdout.fnmatch_lines(["E *The snapshot was taken with torch 2.0, and this is torch *"])
    assert first.startswith("# torch ")


def test_calls_are_numbered_or_named_and_unused_snapshots_told(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="""
        from model import model
        import pytest, torch

        @pytest.mark.parametrize("rows", [4, 8])
        def test_plan(bcg_plan, rows):
            assert bcg_plan(model, torch.ones(rows, rows)).matches_snapshot()
            assert bcg_plan(model, torch.ones(rows, rows)).matches_snapshot()
            taken = bcg_plan(model, torch.ones(rows, rows), options={"breaks": ["op:aten::sin"]})
            assert taken.plans[0].reasons()["user_rule"] == 1
            assert taken.matches_snapshot(name="sin")
        """
    )
    old = snapshot(project, "test_gone")
    old.parent.mkdir(parents=True)
    old.write_text("")
    updated = run(project, "--bcg-update")
    updated.assert_outcomes(passed=2)
    updated.stdout.fnmatch_lines(["bcg: no test uses __bcg_snapshots__/test_it/test_gone.txt; delete it"])
    names = {path.name.partition("-")[2].partition(".")[2] for path in old.parent.glob("test_plan*")}
    assert names == {"txt", "2.txt", "sin.txt"} and len(list(old.parent.glob("test_plan*"))) == 6
    run(project).assert_outcomes(passed=2)
    partly = run(project, "--bcg-update", "test_it.py::test_plan[4]")
    assert "no test uses" not in partly.stdout.str()


def test_fakes_give_the_plan_of_real_tensors(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="""
        from model import model
        import torch
        from torch._subclasses import FakeTensorMode

        def test_plan(bcg_plan):
            with FakeTensorMode():
                fake = torch.ones(4, 4)
            assert bcg_plan(model, fake).text == bcg_plan(model, torch.ones(4, 4)).text
        """
    )
    run(project).assert_outcomes(passed=1)


def test_counters_know_nothing_of_earlier_tests(project: pytest.Pytester) -> None:
    """Of a class that an earlier test has compiled nothing was compiled: counts depended on the order of tests."""
    project.makepyfile(
        test_it="""
        from model import model
        import pytest, torch

        @pytest.mark.parametrize("again", [0, 1])
        def test_counts(again, bcg_counters):
            with torch.no_grad(), bcg_counters.expect(graphs=1, eager_runs={"warm_up": 1}):
                torch.compile(model, backend="bcg", options={"min_segment_kernels": 1})(torch.ones(4, 4))
        """
    )
    run(project).assert_outcomes(passed=2)


def test_counters_say_all_that_changed(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_it="""
        from model import model
        import torch

        def test_counts(bcg_counters):
            with torch.no_grad(), bcg_counters.expect(graphs=1, breaks=3, eager_runs={"padding": 1}):
                torch.compile(model, backend="bcg", options={"min_segment_kernels": 1})(torch.ones(4, 4))

        def test_own_assertion(bcg_counters):
            with bcg_counters.expect(graphs=1):
                assert 1 == 2, "mine"
        """
    )
    result = run(project)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E *Counters:",
            "E *breaks: expected 3, saw 1",
            "E *eager_runs: expected {'padding': 1}, saw {'warm_up': 1}",
            "E *All that changed: graphs 1, segments 2, breaks 1, eager_runs {'warm_up': 1}.",
        ]
    )
    result.stdout.fnmatch_lines(["E *AssertionError: mine"])


SANITIZED = """
import pytest, torch
import bcg_compiler as bcg

FACTOR = [1.0]

@torch.library.custom_op("plugin_test::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR[0]

@scale.register_fake
def _(x):
    return torch.empty_like(x)

def model(x):
    return torch.ops.plugin_test.scale(x.sin()).cos()

def call(times):
    compiled = torch.compile(model, backend="bcg", options={"capturable": ["plugin_test::scale"]})
    with torch.no_grad():
        for factor in times:
            FACTOR[0] = factor
            compiled(torch.ones(4, 4))

def test_before():
    call([1.0, 1.0, 2.0])

@pytest.mark.bcg_sanitizer
def test_marked():
    call([1.0, 1.0, 2.0])

@pytest.mark.bcg_sanitizer
def test_right():
    call([1.0, 1.0, 1.0])

@pytest.mark.bcg_sanitizer
def test_once():
    call([1.0])

def test_after():
    call([1.0, 1.0, 2.0])
"""


def test_the_marker_shows_what_is_frozen_in_marked_tests_only(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=SANITIZED)
    result = run(project, "--strict-markers")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_marked _*",
            "E *SanitizerError: capture: segment 0, %* plugin_test::scale (*test_it.py:15)",
            "E *return torch.ops.plugin_test.scale(x.sin()).cos()",
        ]
    )
    result.stdout.fnmatch_lines(["*test_once is marked bcg_sanitizer, and no segment was replayed in it*"])


def test_the_plugin_is_not_loaded_twice_where_it_is_installed_and_named() -> None:
    """Pytest looks for a plugin of ``-p`` among the entry points by its name first."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert declared["project"]["entry-points"]["pytest11"] == {PLUGIN[1]: PLUGIN[1]}


def test_a_run_that_asks_for_nothing_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing(request):
            assert request.config.pluginmanager.has_plugin("bcg_compiler.testing.plugin")
            assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "rich")]
        """
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)


@pytest.mark.nightly
def test_workers_of_xdist_write_and_tell(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    project.makepyfile(test_it=PLAN_TEST.replace("def test_plan", "def test_other(): pass\n\ndef test_plan"))
    gone = snapshot(project, "test_gone")
    gone.parent.mkdir(parents=True)
    gone.write_text("")
    result = project.runpytest_subprocess(*PLUGIN, "-n", "1", "--bcg-update")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "bcg: wrote __bcg_snapshots__/test_it/test_plan.txt",
            "bcg: no test uses __bcg_snapshots__/test_it/test_gone.txt; delete it",
        ]
    )
