"""``bcg check`` and ``bcg diff`` on the command line: what grows fails, what shrinks is said, what lacks is told."""

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bcg_compiler as bcg
from bcg_compiler.cli import app
from bcg_compiler.debug.golden import NUMBERS, Golden, GoldenError, compare

FACTORIES = """
    import torch
    import bcg_compiler as bcg


    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def example_inputs(self, length):
            return {"x": torch.rand(1, length, 4)}

        def between(self, x):
            return x

        def forward(self, x):
            for layer in self.layers:
                x = self.between(layer(x).relu())
            return x


    class WithBreaks(Model):
        @bcg.eager_break(mutates_args=("out",))
        def attention(self, x, out):
            out.copy_(x.cumsum(1))

        def between(self, x):
            out = torch.empty_like(x)
            self.attention(x, out)
            return out


    class CompiledForEachParity(Model):
        def between(self, x):
            return x + 1 if x.shape[1] % 2 else x - 1


    class ReadsItem(Model):
        def between(self, x):
            return x + 1 if x.sum().item() > 0 else x - 1


    class Mixes(Model):
        def between(self, x):
            return x - x.mean(1, keepdim=True)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a module of models, as the current one."""
    (tmp_path / "user_models.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "user_models", raising=False)
    bcg.reset()
    return tmp_path


def call(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def check(name: str, *more: str) -> Any:
    return call("check", f"user_models:{name}", "--golden", "golden.json", *more)


def numbers(name: str, *more: str) -> dict[str, int | None]:
    assert check(name, "--update", *more).exit_code == 0
    return json.loads(Path("golden.json").read_text())["numbers"]


def as_if_for(name: str) -> None:
    """Let the golden numbers of one model stand for another one, as if its code had changed."""
    golden = json.loads(Path("golden.json").read_text())
    golden["given"]["model"] = f"user_models:{name}"
    Path("golden.json").write_text(json.dumps(golden))


def test_what_is_as_it_was_passes() -> None:
    numbers("WithBreaks")
    done = check("WithBreaks")
    assert done.exit_code == 0 and "AS THE GOLDEN FILE SAYS" in done.stdout


def test_new_breaks_fail_with_the_line_and_what_would_remove_them() -> None:
    numbers("Model")
    as_if_for("WithBreaks")
    done = check("WithBreaks")
    assert done.exit_code == 1
    assert "GROWN  " in done.stdout and "breaks" in done.stdout.split("GROWN")[1]
    assert "self.attention(x, out)" in done.stdout and "user_models.py" in done.stdout
    assert "To change it: Nothing needs to be done" in done.stdout


def test_what_is_better_passes_and_asks_for_new_numbers() -> None:
    numbers("WithBreaks")
    golden = json.loads(Path("golden.json").read_text())
    golden["numbers"]["breaks"] += 1
    Path("golden.json").write_text(json.dumps(golden))
    done = check("WithBreaks")
    assert done.exit_code == 0 and "BETTER  breaks. Keep it: --update." in done.stdout


def test_each_number_that_grows_fails() -> None:
    assert numbers("WithBreaks", "--ladder", "64,256").keys() == NUMBERS.keys()
    now = Golden.read(Path("golden.json"))
    assert not compare(now, now).grown
    for name, said in NUMBERS.items():
        value = now.numbers[name]
        assert value is not None
        fewer = replace(now, numbers={**now.numbers, name: value - 1})
        assert [number.name for number in compare(fewer, now).grown] == [said]
        assert [number.name for number in compare(now, fewer).shrunk] == [said]


def test_captures_are_buckets_or_the_lengths_that_were_called() -> None:
    exact, padded = numbers("Model"), numbers("Model", "--ladder", "64,128,192,256,512")
    # Dynamo leaves the length open once it has seen a second one.
    assert (exact["graphs"], exact["recompiles"], exact["captures"]) == (2, 1, 3)
    assert (padded["graphs"], padded["recompiles"], padded["captures"]) == (1, 0, 5)
    assert exact["forecast_bytes"] and padded["forecast_bytes"] and padded["forecast_bytes"] > 0


def test_a_ladder_that_is_lost_fails_with_the_line_that_speaks_against_it() -> None:
    """Three exact shapes are as many captures as three buckets: nothing else would have told."""
    numbers("Model", "--ladder", "64,128,256")
    as_if_for("Mixes")
    done = check("Mixes", "--ladder", "64,128,256")
    assert done.exit_code == 1 and "graphs that are not padded to the ladder" in done.stdout.split("GROWN")[1]
    assert "+ mixing_rows: " in done.stdout and "return x - x.mean(1, keepdim=True)" in done.stdout
    assert "To change it: If you know that none does" in done.stdout


def test_graph_breaks_of_dynamos_own_count() -> None:
    assert numbers("Model")["dynamo_graph_breaks"] == 0
    found = numbers("ReadsItem")
    assert found["dynamo_graph_breaks"] and found["graphs"] and found["graphs"] > 2


def test_a_guard_on_the_length_is_a_recompile() -> None:
    assert numbers("Model", "--ladder", "64,256")["recompiles"] == 0
    found = numbers("CompiledForEachParity", "--ladder", "64,256")
    assert found["recompiles"] == 1 and found["graphs"] == 2


def test_a_missing_golden_file_is_told_before_anything_is_compiled() -> None:
    done = check("NoSuchModel")
    assert done.exit_code == 2
    assert "There is no golden.json" in done.stderr and done.stderr.strip().endswith("--update")


def test_numbers_for_something_else_are_not_compared() -> None:
    numbers("Model")
    done = check("Model", "--length", "64")
    assert done.exit_code == 2 and "lengths: [128, 129, 256] there, [64, 65, 128] here" in done.stderr
    Path("golden.json").write_text('{"numbers": 1}')
    done = check("Model")
    assert done.exit_code == 2 and "no file of golden numbers" in done.stderr


def test_explain_writes_a_report_and_keeps_json_clean() -> None:
    done = call("explain", "user_models:WithBreaks", "--ladder", "64,256", "--html", "report.html", "--json")
    assert done.exit_code == 0 and len(json.loads(done.stdout)) == 1
    assert "attention" in Path("report.html").read_text()
    done = call("explain", "user_models:WithBreaks", "--html", "no/such/folder/report.html")
    assert done.exit_code == 2 and "no/such/folder does not exist" in done.stderr
    done = call("explain", "user_models:WithBreaks", "--html", ".")
    assert done.exit_code == 2 and "is a folder" in done.stderr


def test_diff_of_models_and_files() -> None:
    Path("before.json").write_text(call("explain", "user_models:Model", "--json").stdout)
    same = call("diff", "before.json", "user_models:Model")
    assert same.exit_code == 0 and "THE SAME" in same.stdout
    other = call("diff", "before.json", "user_models:WithBreaks")
    assert other.exit_code == 1 and "+ eager_break: " in other.stdout and "DIFFERENT" in other.stdout
    missing = call("diff", "before.json", "after.json")
    assert missing.exit_code == 2 and "Cannot read plans from after.json" in missing.stderr


@pytest.mark.parametrize("damage", [{"breaks": None}, {"breaks": "one"}, {"segments": True}, {}])
def test_a_damaged_file_is_no_file_of_golden_numbers(damage: dict[str, Any], tmp_path: Path) -> None:
    """A number that was lost, in a merge, say, would never grow: the check passed whatever became of the model."""
    numbers = {name: 1 for name in NUMBERS} | damage if damage else {}
    file = tmp_path / "golden.json"
    file.write_text(json.dumps({"given": {}, "numbers": numbers, "reasons": {}, "torch": ""}))
    with pytest.raises(GoldenError, match="is no file of golden numbers"):
        Golden.read(file)
