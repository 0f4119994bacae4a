"""Timelines of CUDA graphs: times of the device, in order, on one clock with the host's."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.debug.self_test import self_test
from bcg_compiler.debug.timeline import measure

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    bcg.reset()
    torch.manual_seed(0)


@bcg.eager_break(fake=torch.empty_like)
def middle(x: Tensor) -> Tensor:
    return (x * 2).sin()


def model(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).relu()
    return (middle(h) @ w).sin() + h


def compiled(*args: Tensor) -> Any:
    made = torch.compile(model, backend="bcg", options={"min_segment_kernels": 1, "segment_compiler": "eager"})
    for _ in range(3):
        made(*args)
    return made


@torch.inference_mode()
def test_each_part_has_a_time_on_the_device_and_the_sum_is_within_the_wall() -> None:
    x, w = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    run, want = compiled(x, w), model(x, w)
    with bcg.trace(run) as timeline:
        torch.cuda.synchronize()
        began = timeline.clock.now()
        for _ in range(4):
            assert torch.equal(run(x, w), want)
        torch.cuda.synchronize()
        wall = timeline.clock.now() - began
    assert [step.kind for step in timeline.steps()] == ["fill", "segment", "break", "fill", "segment", "copy_back"]
    assert len(timeline.replays) == 4
    total = 0.0
    for replay in timeline.replays:
        assert all(step.device_us is not None and step.device_us > 0 for step in replay.steps)
        total += sum(step.device_us or 0.0 for step in replay.steps)
    assert 0 < total <= wall
    # How far the two clocks are apart is not known where other processes use the device, too.
    starts = [replay.device_start_us or 0.0 for replay in timeline.replays]
    assert starts == sorted(starts)


@torch.inference_mode()
def test_a_slow_segment_is_the_slowest_part() -> None:
    """By the clock of the device, while the host is done with launching long before."""
    x, w = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    run = compiled(x, w)
    with bcg.trace(run) as timeline:
        for _ in range(4):
            run(x, w)
    slowest = max(timeline.steps(), key=lambda step: step.device_us or 0.0)
    assert slowest.kind == "segment"


@torch.inference_mode()
def test_the_device_has_a_track_whose_slices_do_not_overlap() -> None:
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    run = compiled(x, w)
    with bcg.trace(run, nvtx=True) as timeline:
        for _ in range(3):
            with timeline.call("call"):
                run(x, w)
    events = json.loads(timeline.json())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    device = next(name for name in tracks if name.startswith("device cuda"))
    slices = sorted((e for e in events if e["ph"] == "X" and e["tid"] == tracks[device]), key=lambda e: e["ts"])
    assert sum(e["cat"] == "segment" for e in slices) == 6
    for one, other in pairwise(slices):
        assert one["ts"] + one["dur"] <= other["ts"] + 0.01, (one, other)


@torch.inference_mode()
def test_a_trace_leaves_replays_as_they_were_and_measure_does_too() -> None:
    x, w = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    run = compiled(x, w)
    (program,) = bcg.programs_of(run)
    before = [(c.run, c.code.source) for c in program._places.captures()]
    steps = measure(program, (x, w))
    assert all(step.device_us for step in steps)
    assert [(c.run, c.code.source) for c in program._places.captures()] == before
    assert not {"_replay", "_eagerly"} & set(vars(program))
    assert torch.equal(run(x, w), model(x, w))


def test_the_self_test_of_doctor_passes() -> None:
    checks = self_test(torch.device("cuda"))
    assert all(check.state != "failed" for check in checks), checks
    assert [check.state for check in checks[:3]] == ["ok"] * 3, checks
