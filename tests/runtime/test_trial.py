"""Trial capture: the operation that cannot be captured is found by capturing parts, and all others are captured.

The device of these tests fails as CUDA does: an operation spoils the capture unseen, and a later operation, or only
the end of the capture, raises.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.runtime.capture import EmulatedCapture
from bcg_compiler.runtime.program import Program

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these faults for real")

spoiled: list[str] = []
computed: list[str] = []


library = torch.library.Library("bcg_tests_trial", "FRAGMENT")


def uncapturable(name: str) -> Callable[..., Any]:
    """A custom op, declared capturable by mistake. Its fake runs when it is recorded, its body when it computes: one of
    a library, whose body nobody looks into.
    """

    def body(x: Tensor) -> Tensor:
        computed.append(name)
        return x + 1

    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, body, "CompositeExplicitAutograd")

    def fake(x: Tensor) -> Tensor:
        spoiled.append(name)
        return torch.empty_like(x)

    torch.library.register_fake(f"bcg_tests_trial::{name}", fake)
    op: Callable[..., Any] = getattr(torch.ops.bcg_tests_trial, name).default
    return op


spoil, spoil_too = uncapturable("spoil"), uncapturable("spoil_too")
capturable = ["bcg_tests_trial::spoil", "bcg_tests_trial::spoil_too"]


@pytest.fixture(autouse=True)
def _spoilable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    record = EmulatedCapture.capture

    def capture(self: EmulatedCapture, segment: Any, args: Any) -> Any:
        spoiled.clear()
        result = record(self, segment, args)
        if spoiled:
            raise RuntimeError("operation failed due to a previous error during capture")
        return result

    monkeypatch.setattr(EmulatedCapture, "capture", capture)
    computed.clear()
    yield


def check(fn: Callable[..., Any], calls: int = 5) -> Program:
    """Compare calls with eager, each on new values, and give the program."""
    compiled = torch.compile(
        fn, backend="bcg", fullgraph=True, options={"capturable": capturable, "min_segment_kernels": 2}
    )
    for _ in range(calls):
        x = torch.randn(3, 4)
        want = fn(x)
        computed.clear()
        assert torch.equal(compiled(x), want)
        assert computed == ["spoil"] * computed.count("spoil") + ["spoil_too"] * computed.count("spoil_too")
        assert len(computed) == len(set(computed)), "an effect happened twice"
    (program,) = bcg.programs_of(compiled)
    assert isinstance(program, Program)
    return program


def failed(program: Program) -> list[str]:
    return [r.op for step in program.plan.breaks for r in step.reasons if r.code == "capture_failed"]


@pytest.mark.parametrize("before", [0, 1, 6])
@pytest.mark.parametrize("after", [0, 1, 6])
def test_the_operation_that_spoils_a_capture_is_found_wherever_it_stands(before: int, after: int) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(before):
            x = (x + 1).sin()
        x = spoil(x)
        for _ in range(after):
            x = (x + 1).cos()
        return x

    program = check(fn)
    assert failed(program) == ["bcg_tests_trial::spoil.default"]
    assert len(program.plan.segments) == (before > 0) + (after > 0)
    assert program.replays >= 2 if before + after else program.eager_runs["no_segment"] >= 2


def test_two_operations_that_spoil_one_capture_are_both_found() -> None:
    program = check(lambda x: spoil_too((spoil((x + 1).sin()) + 1).cos()).exp() * 2, 6)
    assert failed(program) == ["bcg_tests_trial::spoil.default", "bcg_tests_trial::spoil_too.default"]
    assert len(program.plan.segments) == 3 and program.replays >= 2


def test_an_error_that_names_an_innocent_operation_leads_to_the_guilty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cos`` raises, as it is the first to look at what ``spoil`` has done."""
    record = EmulatedCapture.capture

    def capture(self: EmulatedCapture, segment: Any, args: Any) -> Any:
        def watched(*given: Any) -> Any:
            return segment(*(Watching.of(t) for t in given))

        return record(self, watched, args)

    class Watching(Tensor):
        @staticmethod
        def of(value: Any) -> Any:
            return value.as_subclass(Watching) if isinstance(value, Tensor) else value

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if spoiled and func.__name__ == "cos":
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().__torch_function__(func, types, args, kwargs or {})

    monkeypatch.setattr(EmulatedCapture, "capture", capture)
    program = check(lambda x: spoil((x + 1).sin()).exp().cos() * 2)
    assert failed(program) == ["bcg_tests_trial::spoil.default"]
    assert program.replays >= 2


def test_a_segment_that_fails_as_a_whole_only_runs_eagerly_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of it fails when tried alone: there is nothing to break at. Compiled code is given up before that."""
    attempts: list[int] = []
    record = EmulatedCapture.capture

    def capture(self: EmulatedCapture, segment: Any, args: Any) -> Any:
        if not segment.__code__.co_filename.startswith("<bcg prefix"):
            attempts.append(1)
            raise RuntimeError("the driver was busy")
        return record(self, segment, args)

    monkeypatch.setattr(EmulatedCapture, "capture", capture)
    program = check(lambda x: (x + 1).sin() * 2)
    given_up = program.eager_units["unit_capture_failed"]
    assert program.eager_runs == {"warm_up": 1 + given_up, "capture_failed": 4 - given_up}
    assert len(attempts) == 1 + given_up


def test_out_of_memory_while_parts_are_tried_blames_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: EmulatedCapture, segment: Any, args: Any) -> Any:
        attempts.append(1)
        raise RuntimeError("spoiled") if len(attempts) == 1 else torch.OutOfMemoryError("no more")

    attempts: list[int] = []
    monkeypatch.setattr(EmulatedCapture, "capture", capture)
    program = check(lambda x: (x + 1).sin() * 2)
    assert program.eager_runs == {"warm_up": 1, "out_of_memory": 4}
