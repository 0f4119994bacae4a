"""The package in each form it is used: wheel, sdist, editable install, entry points, and the two links."""

import configparser
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "models")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DIST_INFO = f"bcg_compiler-{VERSION}.dist-info"


def run(args: list[str], cwd: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH may name the root and hide that the project is not installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, input=stdin, capture_output=True, text=True)


def run_code(code: str, cwd: Path) -> str:
    done = run(["-c", textwrap.dedent(code)], cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(target: str, tree: Path, folder: Path) -> Path:
    """Build with the installed hatchling: no build environment of its own, hence no network."""
    done = run(["-m", "hatchling", "build", "-t", target, "-d", str(folder)], tree)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files_below(folder: Path) -> set[str]:
    """All files of a folder relative to it, less the byte code that git ignores."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name: str) -> None:
    """An absolute link works on the machine it was made on only."""
    link = ROOT / "bcg_compiler" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_wheel_has_the_linked_folders(wheel: Path, name: str) -> None:
    expected = {f"bcg_compiler/{name}/{file}" for file in files_below(ROOT / name)}
    assert f"bcg_compiler/{name}/__init__.py" in expected
    assert expected <= names_in_wheel(wheel)


def test_wheel_has_the_page_of_reports(wheel: Path) -> None:
    page = {f"bcg_compiler/debug/report/page/report.{kind}" for kind in ("html", "css", "js")}
    assert page <= names_in_wheel(wheel)


def test_wheel_has_nothing_at_the_top_but_the_package(wheel: Path) -> None:
    """A wheel with a top-level `passes` or `models` would put those names on everyone's path."""
    assert {name.split("/")[0] for name in names_in_wheel(wheel)} == {"bcg_compiler", DIST_INFO}


def test_wheel_has_the_package_data(wheel: Path) -> None:
    data = {f"bcg_compiler/data/{file}" for file in files_below(ROOT / "bcg_compiler" / "data")}
    assert data | {"bcg_compiler/py.typed"} <= names_in_wheel(wheel)


def test_wheel_has_the_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
    entry_points = configparser.ConfigParser()
    entry_points.read_string(text)
    assert dict(entry_points["torch_dynamo_backends"]) == {"bcg": "bcg_compiler.backend:bcg_backend"}
    assert dict(entry_points["console_scripts"]) == {"bcg": "bcg_compiler.cli:main"}


def test_wheel_built_from_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "tree", filter="data")
    (tree,) = (tmp_path / "tree").iterdir()
    assert names_in_wheel(build("wheel", tree, tmp_path / "wheel")) == names_in_wheel(wheel)


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("where", ["root", "tests", "elsewhere"])
def test_a_linked_folder_is_one_module_wherever_python_starts(name: str, where: str, tmp_path: Path) -> None:
    """From the root, `passes/` lies on sys.path too; it must not be loaded a second time by that name."""
    cwd = {"root": ROOT, "tests": ROOT / "tests", "elsewhere": tmp_path}[where]
    out = run_code(
        f"""
        import importlib, json, os, sys
        first = importlib.import_module("bcg_compiler.{name}")
        os.chdir("/")
        assert importlib.import_module("bcg_compiler.{name}") is first
        file = os.path.realpath(first.__file__)
        loaded = [key for key, module in list(sys.modules.items())
                  if getattr(module, "__file__", None) and os.path.realpath(module.__file__) == file]
        print(json.dumps([first.__file__, loaded]))
        """,
        cwd,
    )
    file, loaded = json.loads(out)
    assert Path(file) == ROOT / "bcg_compiler" / name / "__init__.py"
    assert loaded == [f"bcg_compiler.{name}"]


def test_backend_is_listed_without_an_import(tmp_path: Path) -> None:
    out = run_code(
        """
        import sys
        import torch._dynamo
        print("bcg" in torch._dynamo.list_backends(), "bcg_compiler" in sys.modules)
        """,
        tmp_path,
    )
    assert out.split() == ["True", "False"]


def lint(snippet: str, filename: str) -> str:
    done = run(["-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", filename, "-"], ROOT, snippet)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("filename", ["bcg_compiler/backend.py", "passes/mark_breaks.py", "tests/test_x.py"])
@pytest.mark.parametrize(
    "snippet",
    [
        "import passes\n\nprint(passes)\n",
        "import passes.mark_breaks as p\n\nprint(p)\n",
        "from passes import mark_breaks\n\nprint(mark_breaks)\n",
        "def f():\n    import models\n\n    return models\n",
        "from models.layers import norm\n\nprint(norm)\n",
    ],
)
def test_linter_refuses_the_top_level_names(snippet: str, filename: str) -> None:
    """`import passes` from the root is a second copy of the package, with registries of its own."""
    assert "TID251" in lint(snippet, filename)


@pytest.mark.parametrize("filename", ["bcg_compiler/backend.py", "passes/mark_breaks.py", "tests/test_x.py"])
def test_linter_takes_the_names_inside_the_package(filename: str) -> None:
    snippet = (
        "from bcg_compiler import models, passes\nfrom bcg_compiler.passes import mark\n\nprint(models, passes, mark)\n"
    )
    assert "TID" not in lint(snippet, filename)


def test_linter_sees_each_file_once() -> None:
    """Seen through the links as well, each finding in passes/ and models/ would be told twice."""
    done = run(["-m", "ruff", "check", "--show-files", "."], ROOT)
    files = [Path(line) for line in done.stdout.split()]
    assert ROOT / "passes" / "__init__.py" in files
    assert len({file.resolve() for file in files}) == len(files)
