"""What a dump holds, that it is what runs, and that nothing else changes by it."""

import bdb
import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.aot import aot_compile
from bcg_compiler.dump.folder import Folder
from bcg_compiler.plan import plan_from_json, plan_hash, plan_text
from bcg_compiler.runtime.capture import EmulatedCapture

SMALL = Path(__file__).with_name("small.py")
_spec = importlib.util.spec_from_file_location("bcg_tests_small", SMALL)
assert _spec is not None and _spec.loader is not None
small: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = small  # Dynamo imports what a frame's globals are named
_spec.loader.exec_module(small)


@pytest.fixture(autouse=True)
def _no_dump_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("BCG_DUMP", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with torch.no_grad():
        yield
    bcg.reset()


class Debugger(bdb.Bdb):
    """Stops at breakpoints, and notes the places."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[tuple[str, int]] = []

    def user_line(self, frame: types.FrameType) -> None:
        """A line is about to run."""
        if self.break_here(frame):
            self.stops.append((frame.f_code.co_filename, frame.f_lineno))
        self.set_continue()

    def stopped_at(self, path: Path, containing: str, call: Callable[[], Any]) -> list[str]:
        """The texts of the lines that ``call`` stops at, with a breakpoint at each line with ``containing``."""
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if containing in line:
                assert self.set_break(str(path), number) is None
        self.stops.clear()
        self.runcall(call)
        self.clear_all_breaks()
        assert {file for file, _ in self.stops} <= {str(path)}
        return [lines[number - 1].strip() for _, number in self.stops]


def only_graph(folder: Path) -> Path:
    """The folder of the one graph there is."""
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_index_names_every_file_and_no_other(tmp_path: Path) -> None:
    small.run(dump=tmp_path, segment_compiler=lambda module, fakes: module, specialized_buckets=[8])
    graph = only_graph(tmp_path)
    assert graph.name == "000_Small"
    assert (tmp_path / "index.txt").read_text().splitlines()[1:] == ["000_Small/"]
    files = files_of(graph)
    index = files.pop("index.txt").decode()
    assert set(re.findall(r"^  (\S+\.\w+) +\w", index, re.MULTILINE)) == files.keys()
    of_passes = [
        "passes/00_dynamo.txt",
        "passes/03_mark_break_functions.diff",
        "passes/03_mark_break_functions.txt",
    ]
    code = ["program.py", "program_s0_8.py", "replay_s0_4.py", "replay_s0_8.py"]
    units = [name for name in files if name.startswith("units/")]
    assert sorted(files) == sorted([*of_passes, "graph.txt", "plan.dot", "plan.json", "plan.txt", *code, *units])
    assert len(units) == 1  # that in the region of autocast is not compiled
    assert "mark_break_functions: 1 change\n" in index and "mark_uncapturable: 0 changes\n" in index
    assert "ladder=Ladder(buckets=(4, 8))" in index


def test_plans_are_the_program_s(tmp_path: Path) -> None:
    compiled = small.run(dump=tmp_path)
    (program,) = bcg.programs_of(compiled)
    graph = only_graph(tmp_path)
    assert (graph / "plan.txt").read_text() == plan_text(program.plan)
    assert plan_from_json((graph / "plan.json").read_text()) == program.plan
    edges = re.findall(r"^  (\w+) -> (\w+) \[label", (graph / "plan.dot").read_text(), re.MULTILINE)
    assert edges == [("given", "step_0"), ("step_0", "step_1"), ("step_1", "step_2"), ("step_2", "returned")]


def test_the_diff_of_a_pass_shows_what_it_did(tmp_path: Path) -> None:
    small.run(dump=tmp_path)
    diff = (only_graph(tmp_path) / "passes/03_mark_break_functions.diff").read_text().splitlines()
    assert diff[:2] == ["--- passes/00_dynamo.txt", "+++ passes/03_mark_break_functions.txt"]
    assert [line for line in diff[3:] if line[0] in "+-"] == [
        "+       break: eager_break: bcg_tests_small.double is declared a break"
    ]
    line = inspect.getsource(small.Small.forward).splitlines().index("        h = double(h)")
    line += small.Small.forward.__code__.co_firstlineno
    assert any(text.endswith(f"# {SMALL}:{line}") for text in diff if "= bcg_tests_small.double(" in text)


def test_breakpoints_stop_replays_and_the_code_that_a_capture_records(tmp_path: Path) -> None:
    compiled = small.run(dump=tmp_path, lengths=(3,))  # whose capture comes with the first call
    graph, debugger, x, larger = only_graph(tmp_path), Debugger(), torch.randn(2, 4), torch.randn(7, 4)
    assert debugger.stopped_at(graph / "replay_s0_4.py", "replay_0()", lambda: compiled(x)) == ["replay_0()"]
    assert debugger.stopped_at(graph / "program.py", " = linear(", lambda: compiled(x)) == []  # recorded before
    (stop,) = debugger.stopped_at(graph / "program.py", " = linear(", lambda: compiled(larger))
    assert stop.startswith("v6 = linear(v3, v0, v1)")


@pytest.mark.parametrize("specialized", [(), (8,)])
def test_breakpoints_stop_the_units_that_a_compiler_leaves_as_they_are(
    tmp_path: Path, specialized: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {"segment_compiler": lambda module, fakes: module, "specialized_buckets": specialized}
    compiled = small.run(dump=tmp_path, lengths=(3,), **options)
    (unit,) = (only_graph(tmp_path) / "units").iterdir()
    stops = Debugger().stopped_at(unit, "= torch.nn.functional.softmax(", lambda: compiled(torch.randn(7, 4)))
    assert stops and all(stop.startswith("softmax: ") for stop in stops)
    assert "code: return torch.nn.functional.softmax(" in unit.read_text()  # the user's line above it


def test_what_runs_has_the_text_of_its_file(tmp_path: Path) -> None:
    compiled = small.run(dump=tmp_path)
    (program,) = bcg.programs_of(compiled)
    captures = list(program._places.captures())
    codes = [*program._compiled.lowered.codes, *(capture.code for capture in captures)]
    assert len(codes) == 3
    for code in codes:
        assert Path(code.filename).read_text() == code.source
    assert {capture.run.__code__.co_filename for capture in captures} == {c.filename for c in codes[1:]}
    run_by_captures = program._compiled.lowered.segments.values()
    assert {segment.__code__.co_filename for segment in run_by_captures} == {codes[0].filename}


def test_two_processes_write_the_same_bytes_and_not_into_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is this process's; another one at the same time gets a folder of its own, with the same names."""
    folder = tmp_path / "dump"
    seed = {"PYTHONHASHSEED": "7", "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": os.getcwd()}
    monkeypatch.setattr(sys, "argv", [str(SMALL), str(folder)])
    runpy.run_path(str(SMALL), run_name="__main__")
    done = subprocess.run(
        [sys.executable, str(SMALL), str(folder)],
        env={**os.environ, **seed},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = (files_of(path) for path in (folder / "000_Small", folder / "process_2/000_Small"))
    assert "replay_s0_8.py" in first
    assert first == second
    traced = artifacts(tmp_path / "trace")
    assert traced["bcg_plan string"] == first["plan.txt"].decode()
    assert json.loads(traced["bcg_plan json"]) == json.loads(first["plan.json"])
    assert traced["bcg_replay_s0_8_py string"] == first["replay_s0_8.py"].decode()
    assert "mark_break_functions: 1 change\n" in traced["bcg_index string"]
    names = {"bcg_" + re.sub(r"[/.]", "_", re.sub(r"\.(txt|json)$", "", name)) for name in first}
    assert {name.partition(" ")[0] for name in traced} == names


def artifacts(folder: Path) -> dict[str, str]:
    """The artifacts of bcg in the one log of a structured trace, by name and encoding: all of one compile."""
    (log,) = folder.iterdir()
    lines = log.read_text().splitlines()
    found: dict[str, str] = {}
    compiles = set()
    for number, line in enumerate(lines):
        record = json.loads(line[line.index("{") :]) if line[:1] == "V" else {}
        artifact = record.get("artifact", {})
        if artifact.get("name", "").startswith("bcg_"):
            payload = []
            for text in lines[number + 1 :]:
                if not text.startswith("\t"):
                    break
                payload.append(text[1:])
            found[f"{artifact['name']} {artifact['encoding']}"] = "\n".join(payload)
            compiles.add((record["frame_id"], record["frame_compile_id"], record["attempt"]))
    assert len(compiles) == 1
    return found


def test_a_graph_that_is_planned_again_has_a_folder_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that cannot be captured becomes a break: files of the code before stay as they are."""
    record = EmulatedCapture.capture

    def capture(self: EmulatedCapture, segment: Any, args: Any) -> Any:
        if "sin" in segment.__code__.co_names:
            raise RuntimeError("sin is not captured here")
        return record(self, segment, args)

    monkeypatch.setattr(EmulatedCapture, "capture", capture)
    compiled = small.run(dump=tmp_path)
    (program,) = bcg.programs_of(compiled)
    graph = only_graph(tmp_path)
    before, now = ((graph / name).read_text() for name in ("plan.txt", "again_1/plan.txt"))
    assert before != now == plan_text(program.plan)
    assert not list(graph.glob("replay*")) and (graph / "again_1/replay_s0_4.py").is_file()
    diff = (graph / "again_1/graph.diff").read_text()
    assert re.findall(r"^\+  +break: (\w+)", diff, re.MULTILINE) == ["capture_failed"]
    assert diff.startswith("--- passes/03_mark_break_functions.txt\n+++ again_1/graph.txt\n")
    assert f"again_1/plan {plan_hash(program.plan)}" in (graph / "index.txt").read_text()


def test_replays_write_nothing_and_run_the_same_text_as_without_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = small.run()
    (off,) = bcg.programs_of(compiled)
    sources = [off.source, *off.replay_sources]
    assert off._compiled.texts is None
    compiled = small.run(dump=tmp_path)
    (on,) = bcg.programs_of(compiled)
    assert [on.source, *on.replay_sources] == sources

    def refuse(*args: Any) -> None:
        raise AssertionError("a replay has written to the dump")

    for name in ("write", "say", "fail"):
        monkeypatch.setattr(Folder, name, refuse)
    monkeypatch.setattr(Folder, "usable", property(refuse))
    before = on.replays
    for length in (2, 3, 7, 8):
        compiled(torch.randn(length, 4))
    assert on.replays == before + 4


def test_the_option_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCG_DUMP", str(tmp_path / "environment"))
    small.run(lengths=(3,), dump=tmp_path / "option")
    small.run(lengths=(3,), dump="")
    assert not (tmp_path / "environment").exists() and (tmp_path / "option/000_Small").is_dir()
    small.run(lengths=(3,))
    assert (tmp_path / "environment/000_Small").is_dir()


def test_names_are_those_of_what_was_compiled(tmp_path: Path) -> None:
    class Heir(small.Small):  # type: ignore[name-defined, misc]
        pass

    def function(x: Tensor) -> Tensor:
        return x.sin()

    x, options = torch.randn(2, 4), {"dump": tmp_path}
    for compiled in (
        torch.compile(Heir(), backend="bcg", options=options),
        torch.compile(function, backend="bcg", options=options),
    ):
        compiled(x)
    aot_compile(Heir(), (x,), options=options)
    aot_compile(function, (x,), options=options)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["000_Heir", "001_function", "002_Heir", "003_function"]


def test_a_program_compiled_ahead_replays_from_its_file(tmp_path: Path) -> None:
    model, x = small.Small(), torch.randn(3, 4)
    program = aot_compile(model, (x,), options={"dump": tmp_path, "capture": "emulated", "min_segment_kernels": 1})
    for _ in range(3):
        assert torch.equal(program(x), model(x))
    replay = only_graph(tmp_path) / "replay.py"
    assert Debugger().stopped_at(replay, "replay_2()", lambda: program(x)) == ["replay_2()"]


def test_a_graph_that_needs_gradients_says_why_it_is_not_split(tmp_path: Path) -> None:
    with torch.enable_grad(), pytest.warns(RuntimeWarning, match="runs? unsplit"):
        torch.compile(lambda x: x.sin(), backend="bcg", options={"dump": tmp_path})(torch.ones(2, requires_grad=True))
    graph = only_graph(tmp_path)
    assert "grad mode" in (graph / "index.txt").read_text() and ".sin()" in (graph / "graph.txt").read_text()


@pytest.mark.nightly
def test_units_compiled_by_inductor_name_the_file_that_runs(tmp_path: Path) -> None:
    @torch.no_grad()
    def fn(x: Tensor) -> Tensor:
        return (x.sin() + 1).cos()

    bcg.reset()
    compiled = torch.compile(
        fn, backend="bcg", options={"dump": tmp_path, "capture": "off", "segment_compiler": "inductor"}
    )
    x = torch.randn(4)
    compiled(x)
    graph = only_graph(tmp_path)
    assert "is compiled to" not in (graph / "index.txt").read_text()  # nothing is compiled where nothing is captured
    bcg.reset()
    compiled = torch.compile(
        fn, backend="bcg", options={"dump": tmp_path, "capture": "emulated", "segment_compiler": "inductor"}
    )
    compiled(x)
    (file,) = re.findall(r"units/\w+\.py is compiled to (\S+\.py):", (tmp_path / "001_fn/index.txt").read_text())
    assert Debugger().stopped_at(Path(file), "buf0 = empty", lambda: compiled(x)) != []
