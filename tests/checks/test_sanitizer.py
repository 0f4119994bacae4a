"""Each replay beside eager operations."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.checks import SanitizerError, sanitizer


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The models of the tests of ``bcg bisect``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "debug"))
    import bisect_models  # type: ignore[import-not-found]

    return sys.modules["bisect_models"] or bisect_models


def calls(fn: Callable[..., Any], *given: Tensor, **options: Any) -> int:
    """Call a function compiled under the sanitizer with each of ``given``; how many segments were checked."""
    with sanitizer() as checks:
        compiled = torch.compile(fn, backend="bcg", options={"min_segment_kernels": 1, **options})
        for x in given:
            compiled(x)
    return checks.checked


def test_what_is_right_passes_and_was_looked_at() -> None:
    def fn(x: Tensor) -> Tensor:
        written = torch.zeros_like(x)
        written[1:] = x[1:].sin()
        return written.cumsum(0) + torch.rand_like(x)

    torch.manual_seed(3)
    want = [fn(torch.full((4, 4), float(i))) for i in range(3)]
    torch.manual_seed(3)
    compiled = torch.compile(fn, backend="bcg", options={"min_segment_kernels": 1})
    with sanitizer() as checks:
        got = [compiled(torch.full((4, 4), float(i))) for i in range(3)]
    assert checks.checked == 2  # random numbers are drawn once: those of eager code follow
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_what_a_segment_writes_is_written_once() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.calls[:1].add_(1)
            x.mul_(2)
            return x * self.calls[0]

    model = Counts()
    given = [torch.full((2, 2), float(i)) for i in range(4)]
    assert calls(model, *given) == 3
    assert model.calls.tolist() == [4, 0] and [x[0, 0].item() for x in given] == [0, 2, 4, 6]


def test_a_break_body_runs_once_for_each_call() -> None:
    seen: list[float] = []

    @bcg.eager_break(fake=torch.empty_like)
    def body(x: Tensor) -> Tensor:
        seen.append(float(x[0, 0]))
        return x + 1

    given = [torch.full((2, 2), float(i)) for i in range(4)]
    assert calls(lambda x: body(x * 1).sin(), *given) == 3 * 2
    assert seen == [0, 1, 2, 3]


def test_a_body_that_keeps_what_the_next_call_fills_is_shown_rubbish() -> None:
    kept: list[Tensor] = []

    @bcg.eager_break
    def keep(x: Tensor) -> None:
        kept.append(x)

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        keep(h)
        return h.cos()

    with sanitizer():
        compiled = torch.compile(fn, backend="bcg", options={"min_segment_kernels": 1})
        for _ in range(2):
            compiled(torch.ones(2, 2))
        first = kept[-1].clone()

        @bcg.eager_break
        def look(x: Tensor) -> None: ...

        compiled(torch.ones(2, 2) * 2)
    assert torch.equal(kept[-2], kept[-1]) and not torch.equal(first, kept[-2])


def test_memory_that_nothing_has_written_is_rubbish_at_each_replay() -> None:
    """Unwritten rows of an ``empty`` buffer hold what an earlier replay left there, if nobody spoils them."""

    def fn(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        buffer[:1] = x[:1]
        return buffer

    compiled = torch.compile(fn, backend="bcg", options={"min_segment_kernels": 1})
    with sanitizer():
        results = [compiled(torch.ones(2, 2)) for _ in range(3)]
    assert results[-1][:1].eq(1).all() and results[-1][1:].isnan().all()


def test_a_fake_of_another_dtype(models: Any) -> None:
    with pytest.raises(SanitizerError, match=r"result: break 1, %\d+ bisect_models::half") as raised:
        calls(lambda x: torch.ops.bisect_models.half(x.sin()).cos(), *[torch.ones(2, 2)] * 2)
    assert "It gives float64[2, 2], and float32[2, 2] by its fake." in str(raised.value)
    assert not getattr(raised.value, "__notes__", [])  # the message says where, and no note says another place


def test_a_line_of_the_users_is_named(models: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        models.FACTOR[0] = 3.0
        return torch.ops.bisect_models.scale(h)

    models.FACTOR[0] = 1.0
    given = [torch.ones(2, 2)] * 2
    calls(lambda x: torch.ops.bisect_models.scale(x.sin()), *given, capturable=["bisect_models::scale"])
    bcg.reset()
    with sanitizer():
        compiled = torch.compile(
            lambda x: torch.ops.bisect_models.scale(x.sin()),  # this line
            backend="bcg",
            options={"capturable": ["bisect_models::scale"]},
        )
        compiled(*given[:1]), compiled(*given[:1])
        models.FACTOR[0] = 2.0
        with pytest.raises(SanitizerError, match=r"capture: segment 0, %\d+ bisect_models::scale") as raised:
            compiled(*given[:1])
    assert "# this line" in str(raised.value) and "at most by 0.841" in str(raised.value)


@pytest.mark.parametrize("name", ["Right", "Sorts", "BreakMean"])
def test_padding_that_reaches_no_live_row_passes(models: Any, name: str) -> None:
    model = getattr(models, name)()
    with sanitizer() as checks:
        compiled = torch.compile(model, backend="bcg", options={"ladder": [8, 16], "assume_rows_independent": True})
        for length in (16, 16, 16) if name == "BreakMean" else (9, 12, 16, 5):
            ids = torch.randint(0, 64, (1, length))
            torch._dynamo.mark_dynamic(ids, 1)
            compiled(ids)
    assert checks.checked


def test_padded_rows_that_reach_live_ones_are_named(models: Any) -> None:
    compiled = torch.compile(models.Mean(), backend="bcg", options={"ladder": [16], "assume_rows_independent": True})
    with sanitizer(), pytest.raises(SanitizerError, match="live rows in a bucket of 16") as raised:
        for length in (16, 12, 12):
            ids = torch.randint(0, 64, (1, length))
            torch._dynamo.mark_dynamic(ids, 1)
            compiled(ids)
    assert raised.value.fault.kind == "padding" and raised.value.fault.op == ".mean"


def test_nothing_of_it_is_in_the_code_without_it() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="bcg", options={"min_segment_kernels": 1})
    compiled(torch.ones(2)), compiled(torch.ones(2))
    (program,) = bcg.programs_of(compiled)
    assert "note" not in program.replay_sources[0]
    bcg.reset()
    with sanitizer():
        compiled(torch.ones(2)), compiled(torch.ones(2))
    assert "note" in bcg.programs_of(compiled)[0].replay_sources[0]
