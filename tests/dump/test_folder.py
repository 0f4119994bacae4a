"""The folder of a process: harmless, bounded, nobody else's."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.dump import GraphDump
from bcg_compiler.dump import folder as folders
from bcg_compiler.dump.folder import Folder, LeftOut, folder_of
from bcg_compiler.errors import OptionError
from bcg_compiler.options import Options


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("BCG_DUMP", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with torch.no_grad():
        yield
    bcg.reset()


def calls(dump: Path) -> Any:
    """A function that is compiled, called until it replays, and compared with eager."""
    bcg.reset()

    def fn(x: Tensor) -> Tensor:
        return x.sin() + 1

    compiled = torch.compile(fn, backend="bcg", options={"dump": dump, "capture": "emulated"})
    for value in (1.0, 2.0, 3.0):
        x = torch.full((4,), value)
        assert torch.equal(compiled(x), fn(x))
    (program,) = bcg.programs_of(compiled)
    assert program.replays == 2
    return program


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of a dump."""
    return [r.getMessage() for r in caplog.records if r.name == "bcg_compiler" and "dump" in r.getMessage()]


@pytest.mark.parametrize("where", ["/proc/bcg_dump", "{tmp}/file/dump"], ids=["read_only", "below_a_file"])
def test_a_folder_that_cannot_be_made_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    (tmp_path / "file").write_text("")
    dump = Path(where.format(tmp=tmp_path))
    assert all(code.filename.startswith("<bcg ") for code in calls(dump)._compiled.lowered.codes)
    calls(dump)
    (told,) = warnings_of(caplog)
    assert str(dump) in told and "The program goes on without it." in told


def test_a_full_disk_ends_the_dump_and_leaves_no_half_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No file may grow beyond a size that the plan's JSON exceeds: the write fails when a part of it is there."""
    calls(tmp_path / "whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        program = calls(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (told,) = warnings_of(caplog)
    assert os.strerror(errno.EFBIG) in told
    whole, full = ({p.name for p in (tmp_path / name / "000_fn").rglob("*")} for name in ("whole", "full"))
    assert {"plan.json", "replay.py"} <= whole and "plan.txt" in full
    assert not {"plan.json", "program.py", "replay.py"} & full
    assert program.source  # compiled from memory


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "no more"), ValueError("a fault of the dump's own")], ids=["disk", "own"]
)
def test_an_error_in_the_middle_is_told_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write = Folder.write

    def failing(self: Folder, name: str, text: str) -> Path:
        if name.endswith("replay.py"):
            raise error
        return write(self, name, text)

    monkeypatch.setattr(Folder, "write", failing)
    program = calls(tmp_path)
    (told,) = warnings_of(caplog)
    assert f"{type(error).__name__}: {error}" in told
    assert Path(program._compiled.lowered.codes[0].filename).read_text() == program.source
    (capture,) = program._places.captures()
    assert capture.code.filename.startswith("<bcg replay")
    calls(tmp_path)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MAX_FILES", 4, "left out: a dump has 4 files at most"),
        ("MAX_BYTES", 2000, "left out: a dump has 2,000 bytes at most"),
        ("MAX_FILE_BYTES", 1000, "are more than the 1,000 of a file"),
    ],
)
def test_what_is_left_out_is_told_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, said: str
) -> None:
    monkeypatch.setattr(folders, limit, value)
    calls(tmp_path)
    graph = tmp_path / "000_fn"
    files = [path for path in graph.rglob("*") if path.is_file() and path.name != "index.txt"]
    index = (graph / "index.txt").read_text()
    assert "plan.json" not in {path.name for path in files}
    (line,) = (line for line in index.splitlines() if line.startswith("  plan.json"))
    assert said in line
    assert sum(path.stat().st_size for path in files) <= folders.MAX_BYTES
    assert all(path.stat().st_size <= folders.MAX_FILE_BYTES for path in files)
    assert 0 < len(files) < folders.MAX_FILES


def test_many_graphs_and_files_leave_an_index_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_FILES", 4)
    folder = Folder(tmp_path)
    assert [folder.begin(f"graph {i}") for i in range(100)] == [f"{i:03d}_graph_{i}" for i in range(4)] + [None] * 96
    assert len((tmp_path / "index.txt").read_text().splitlines()) == 1 + 4 + 1


def test_files_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_BYTES", 1000)
    folder = Folder(tmp_path)
    folder.write("one", "x" * 600)
    with pytest.raises(LeftOut, match="1,000 bytes at most, and 600 more were too many"):
        folder.write("two", "x" * 600)
    folder.write("three", "x" * 400)


def test_files_are_known_by_their_full_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger that runs in another folder would not find them else."""
    monkeypatch.chdir(tmp_path)
    program = calls(Path("below"))
    assert program._compiled.lowered.codes[0].filename == str(tmp_path / "below/000_fn/program.py")


def test_another_text_of_the_same_name_is_another_file(tmp_path: Path) -> None:
    dump = GraphDump(Options(dump=str(tmp_path)))
    names = [dump.file("replay_s0_4", text) for text in ("a = 1\n", "a = 2\n", "a = 1\n", "a = 2\n")]
    files = [str(tmp_path / f"000_graph/replay_s0_4{end}.py") for end in ("", "_2")]
    assert names == files * 2
    assert [Path(file).read_text() for file in files] == ["a = 1\n", "a = 2\n"]


def test_an_earlier_run_goes_and_what_is_not_a_dump_stays(tmp_path: Path) -> None:
    calls(tmp_path)
    (tmp_path / "001_mine").mkdir()
    (tmp_path / "001_mine/index.txt").write_text("my own\n")
    (tmp_path / "notes.txt").write_text("my own\n")
    folders._folder.cache_clear()  # as if this process began now; locks of one process do not exclude it
    folder = folder_of(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "001_mine", "index.txt", "notes.txt"]
    assert folder.begin("fn") == "000_fn"


def test_each_rank_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["rank_1"] and (tmp_path / "rank_1/000_fn").is_dir()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert folder_of(str(tmp_path / "alone")).path == tmp_path / "alone"


def test_a_forked_process_has_a_folder_of_its_own_and_leaves_this_one_alone(tmp_path: Path) -> None:
    folder = folder_of(str(tmp_path))

    def child() -> bool:
        return not folder.usable and folder_of(str(tmp_path)).path == tmp_path / "process_2"

    assert in_child(child)
    assert folder.usable and folder_of(str(tmp_path)) is folder


def in_child(check: Callable[[], bool]) -> bool:
    """What ``check`` says in a forked process."""
    pid = os.fork()
    if pid == 0:
        said = 1
        try:
            said = 0 if check() else 1
        finally:
            os._exit(said)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_only_a_folder_is_taken() -> None:
    assert Options.parse({"dump": Path("somewhere")}).dump == "somewhere"
    with pytest.raises(OptionError, match=r"Option 'dump' is True \(bool\); it must be a folder"):
        Options.parse({"dump": True})


@pytest.mark.parametrize("dump", ["relative", "nul\0byte"])
def test_a_name_that_is_no_folder_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, dump: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert not GraphDump(Options(dump=dump)).wanted
    (told,) = warnings_of(caplog)
    assert "Error" in told
    monkeypatch.chdir(tmp_path)
