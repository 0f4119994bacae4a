"""From numbers that are not eager's to the operation that makes them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bcg_compiler.cli import app
from bcg_compiler.debug.bisect import Bisection, bisect_model
from bcg_compiler.models import zoo
from bcg_compiler.passes import PassResult, pipeline
from bcg_compiler.runtime.capture import EmulatedCapture

MODELS = Path(__file__).parent / "bisect_models.py"
LINES = MODELS.read_text().splitlines()
PADDED = {"ladder": [16, 32], "assume_rows_independent": True}


def find(name: str, length: int = 16, **options: Any) -> Bisection:
    """Bisect one of the models."""
    return bisect_model(f"{MODELS}:{name}", length=length, options={"min_segment_kernels": 1, **options})


def line_of(found: Bisection) -> str:
    """The line of the file that the culprit's operation is in."""
    assert found.culprit is not None and found.culprit.fault is not None and found.culprit.fault.source is not None
    assert found.culprit.fault.source.file == str(MODELS)
    return LINES[found.culprit.fault.source.line - 1].strip()


@pytest.mark.parametrize("name", ["Right", "BreakMean"])
def test_a_right_model_has_no_culprit(name: str) -> None:
    found = find(name)
    assert found.equal and not found.trials
    assert found.seen.replays == 3 and found.seen.tensors == 4 * 2 and not found.seen.faults


@pytest.mark.parametrize("name", ["Sorts", "SortsOverBreak"])
def test_rows_that_are_sorted_and_sorted_back_are_no_culprit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Live rows of what is sorted differ in a bucket, and those of the results do not."""
    found = find(name, length=32, **PADDED)
    assert found.equal and not found.seen.faults and found.seen.replays == 3
    assert "is not checked" not in caplog.text


def test_what_an_operation_reads_on_the_host() -> None:
    found = find("Host", capturable=["bisect_models::scale"])
    assert found.culprit is not None and found.culprit.fault is not None
    assert (found.culprit.kind, found.culprit.fault.kind) == ("operation", "capture")
    assert (
        found.culprit.fault.op == "bisect_models::scale" and line_of(found) == "return torch.ops.bisect_models.scale(h)"
    )
    assert [(trial.changed, trial.equal) for trial in found.trials] == [("segment 0 run eagerly", True)]
    assert found.seen.call == 2  # warmed up, captured, and replayed with what it read then


def test_padded_rows_that_reach_live_ones() -> None:
    found = find("Mean", length=32, **PADDED)
    assert found.culprit is not None and found.culprit.fault is not None
    assert found.culprit.fault.kind == "padding" and found.culprit.fault.rows == (31, 32)
    assert line_of(found) == "return h - h.mean(1, keepdim=True)" and found.trials[0].equal


def test_live_rows_that_stand_where_a_break_clears_padded_ones() -> None:
    found = find("SortsAndLosesRows", length=32, **PADDED)
    assert found.culprit is not None and found.culprit.fault is not None
    assert found.culprit.fault.kind == "padding" and "gather" in line_of(found)
    assert [(trial.changed, trial.equal) for trial in found.trials] == [
        ("segment 0 run eagerly", False),  # the next one still scatters padded rows
        ("all segments run eagerly", True),
    ]


def test_a_segment_compiler_that_computes_something_else() -> None:
    import bisect_models  # type: ignore[import-not-found]

    found = find("Right", segment_compiler=bisect_models.wrong_relu)
    assert found.culprit is not None and found.culprit.fault is not None
    assert (found.culprit.fault.kind, found.culprit.fault.op) == ("compiler", ".relu")
    assert line_of(found) == "h = layer(h).relu() + h"
    assert [(trial.changed, trial.equal) for trial in found.trials] == [("no segment compiled", True)]


def test_a_break_whose_body_reads_padded_rows() -> None:
    found = find("BreakMean", length=32, **PADDED)
    assert found.culprit is not None and found.culprit.kind == "break"
    assert "bisect_models.centre" in found.culprit.text and "what it is given is eager's" in found.culprit.text
    gaps = [(b.step_kind, b.difference is None or b.difference.close) for b in found.seen.boundaries]
    assert gaps == [("segment", True), ("break", False), ("segment", False)]


def test_a_model_that_differs_from_itself() -> None:
    """Dynamo was the culprit, whose graphs were merely the next to be called."""
    found = find("OtherEachTime")
    assert found.culprit is not None and found.culprit.kind == "model"
    assert "Eager code differs from itself: ['result']" in found.culprit.text


def test_a_break_that_writes_what_it_does_not_declare() -> None:
    found = find("Sly")
    assert found.culprit is not None and found.culprit.fault is not None
    assert (found.culprit.kind, found.culprit.fault.kind) == ("break", "write")
    assert "It writes its argument 'x'" in found.culprit.fault.what
    assert found.seen.difference is not None and found.seen.difference.where == "['inputs']['noise']"


def test_a_pass_that_rewrites_to_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Any) -> PassResult:
        relu = next(node for node in graph.nodes if node.target == "relu")
        relu.target = "abs"
        return PassResult("fuse_mla_bmm", 1, ())

    monkeypatch.setattr(pipeline, "fuse_mla_bmm", wrong)
    found = find("Right")
    assert found.culprit is not None and (found.culprit.kind, found.seen.call) == ("pass", 0)
    assert found.culprit.text.startswith("fuse_mla_bmm: ")
    assert {trial.changed: trial.equal for trial in found.trials} == {
        "nothing captured, no segment compiled": False,
        "without pass fuse_mla_bmm": True,
    }


def test_a_replay_that_spoils_the_result_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment gives the right numbers for what it is given, and yet the results are wrong."""
    made: list[Any] = []
    capture = EmulatedCapture.capture

    def spoiling(self: EmulatedCapture, segment: Any, args: tuple[Any, ...]) -> Any:
        result, replay = capture(self, segment, args)
        made.append(result)

        def replay_and_spoil() -> None:
            replay()
            if result is made[-1] and len(made) == 2:
                made[0][0].zero_()

        return result, replay_and_spoil

    class Twice(torch.nn.Module):
        def example_inputs(self, length: int) -> dict[str, Any]:
            made.clear()
            return {"x": torch.randn(1, length)}

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = x.sin()
            return first, torch.ops.bisect_models.scale(x + 1).cos()

    monkeypatch.setattr(EmulatedCapture, "capture", spoiling)
    monkeypatch.setitem(vars(zoo), "_build_factory", lambda name: (model := Twice(), _inputs_of(model)))
    found = bisect_model("any:model", length=4, options={"min_segment_kernels": 1})
    assert found.culprit is not None and found.culprit.kind == "segment"
    assert found.culprit.text.startswith("segment 2: ") and not found.seen.faults


def _inputs_of(model: Any) -> Any:
    return lambda length, generator: model.example_inputs(length)


def run(*arguments: str) -> Any:
    """``bcg bisect``."""
    return CliRunner().invoke(app, ["bisect", *arguments])


def test_the_command_says_what_was_compared() -> None:
    result = run(f"{MODELS}:Right", "--length", "8")
    assert result.exit_code == 0
    assert "EQUAL 4 calls (8 tensors of results, inputs and buffers), 3 replays" in " ".join(result.stdout.split())
    assert run("nothing.py:Right").exit_code == 2
    lost = run(f"{MODELS}:Mean", "--out", "no such folder/repro.py")
    assert lost.exit_code == 2 and "the folder no such folder does not exist" in lost.stderr


def test_the_command_writes_the_operation_alone(tmp_path: Path) -> None:
    out = tmp_path / "repro.py"
    padded = ("--ladder", "16,32", "--assume-rows-independent", "--length", "32")
    result = run(f"{MODELS}:Mean", *padded, "--out", str(out))
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1 and "CULPRIT operation: segment 0" in said and "(the operation alone)" in said
    assert re.search(r"AssertionError: call 1: 16 of 16 numbers differ", said)
    assert "mean(1, keepdim = True)" in out.read_text() and "Linear" not in out.read_text()


@pytest.mark.nightly
def test_the_command_writes_the_model_where_the_operation_alone_is_right(tmp_path: Path) -> None:
    out = tmp_path / "repro.py"
    option = 'capturable=["bisect_models::scale"]'
    result = run(f"{MODELS}:Host", "--option", option, "--length", "8", "--out", str(out))
    assert result.exit_code == 1 and "(the model)" in result.stdout
    assert f"zoo.build('{MODELS}:Host'" in out.read_text()
