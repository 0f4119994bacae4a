"""The self-test of ``bcg doctor``: what works is ok, what is broken fails, and what is not there is not tried."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bcg_compiler as bcg
from bcg_compiler import cli
from bcg_compiler.debug import self_test as module
from bcg_compiler.debug.self_test import Check, self_test
from bcg_compiler.runtime.capture import EmulatedCapture

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It takes seconds."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_inductor", lambda device: "left out")
        yield


def states(checks: tuple[Check, ...]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_all_is_well_on_this_machine() -> None:
    checks = self_test(CPU)
    found = states(checks)
    compiled = found.pop("Inductor")
    assert compiled == "ok" or "nothing to compile with" in checks[-1].said
    assert found == {"backend": "ok", "capture and replay": "ok", "ladder": "ok", "Triton": "not tried"}
    assert bcg.programs_of() == []


def test_replays_that_give_other_numbers_fail(no_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that records and replays nothing."""
    record = EmulatedCapture.capture
    monkeypatch.setattr(EmulatedCapture, "capture", lambda *args: (record(*args)[0], lambda: None))
    found = {check.name: check for check in self_test(CPU)}
    for name in ("capture and replay", "ladder"):
        assert found[name].state == "failed" and "other numbers than eager" in found[name].said
    assert 'options={"capture": "off"}' in found["capture and replay"].said
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "other numbers than eager" in " ".join(result.output.split())


def test_calls_that_do_not_replay_fail_with_the_reason(no_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*args: Any) -> Any:
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(EmulatedCapture, "capture", cannot)
    (check,) = (check for check in self_test(CPU) if check.name == "capture and replay")
    assert check.state == "failed" and "0 of 3 calls replayed" in check.said


def test_a_backend_that_torch_does_not_know_fails(no_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    check = self_test(CPU)[0]
    assert (check.name, check.state) == ("backend", "failed") and "with pip" in check.said


@pytest.mark.parametrize(("error", "state"), [(RuntimeError("a bug of it"), "failed"), (None, "not tried")])
def test_inductor_that_fails_and_one_without_a_compiler(
    error: Exception | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    from bcg_compiler.lower import units

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        raise error or InvalidCxxCompiler()

    monkeypatch.setattr(units, "compile_graph", compile_graph)
    monkeypatch.setattr(units, "start_workers", lambda: None)
    check = self_test(CPU)[-1]
    assert (check.name, check.state) == ("Inductor", state), check
    assert ("compile_failed" if error else "g++") in check.said


def test_the_command_exits_with_0_and_prints_each_check(no_inductor: None) -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    words = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    assert "capture and replay ok 2 segments and 1 break on the emulated device" in words
    assert "Triton not tried there is no CUDA device" in words


def test_triton_that_is_missing_on_a_gpu_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    check = module._try("Triton", module._triton, "Install it.", torch.device("cuda"))
    assert check.state == "not tried" and "not installed" in check.said
