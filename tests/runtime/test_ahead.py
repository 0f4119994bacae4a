"""Capture before the first request."""

from typing import Any

import pytest
import torch

import bcg_compiler as bcg


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("capture_mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_mode_of_the_caller_of_capture_does_not_matter(mode: Any, capture_mode: Any) -> None:
    """Captured ahead under grad mode, a program that is called without raised at its trial replay: a product with
    weights that require grad was written to the base of a view that had been made without.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4, bias=False))
    model.requires_grad_(mode is not torch.enable_grad)
    compiled = torch.compile(model, backend="bcg", options={"ladder": [4, 8]})
    x = torch.rand(1, 3, 4)
    torch._dynamo.mark_dynamic(x, 1)
    with mode():
        compiled(x)
    with capture_mode():
        report = bcg.capture(compiled, progress=False)
    assert [(rung.rows, rung.error) for rung in report.rungs] == [(8, ""), (4, "")]
    for length in (3, 7, 2):
        x = torch.rand(1, length, 4)
        with mode(), bcg.counters.expect(replays=1, captures=0):
            got = compiled(x)
            torch.testing.assert_close(got, model(x))


def test_captured_ahead_a_program_has_the_autocast_of_its_calls() -> None:
    """``bcg.capture`` outside of the autocast region of the calls captured without it: results of another dtype."""
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    compiled = torch.compile(model, backend="bcg", options={"ladder": [4, 8], "min_segment_kernels": 1}, dynamic=True)
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    with region:
        compiled(torch.rand(3, 4))
    bcg.capture(compiled, progress=False)
    for length in (3, 7):
        x = torch.rand(length, 4)
        with region, bcg.counters.expect(replays=1, captures=0):
            got = compiled(x)
            assert got.dtype == torch.bfloat16
            assert torch.equal(got, model(x))
