"""``bcg trace`` and ``bcg stats`` over a model of the zoo."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bcg_compiler.cli import app
from bcg_compiler.debug.steps import Replay, StepTime
from bcg_compiler.debug.timeline import Timeline
from bcg_compiler.debug.trace_view import trace_view
from bcg_compiler.debug.watched import Watched

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


def bcg(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.stdout.split()), " ".join(result.stderr.split())


def test_trace_prints_shares_and_writes_a_timeline(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    code, out, _ = bcg("trace", "deepseek_v3", "--layers", "2", "--length", "16", "--calls", "3", "--out", str(file))
    assert code == 0
    assert "Graph 1: 3 replays. Medians in µs, the largest share first: step kind times host slowest share what" in out
    assert "break" in out and "breaks" in out and "of the host." in out and "The device is emulated" in out
    assert "A call that only replays takes the host" in out and f"wrote{file}" in "".join(out.split())
    events = json.loads(file.read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "call"] == ["16 tokens"] * 3
    assert sum(e.get("cat") == "replay" for e in events) == 3
    assert any(e.get("cat") == "gap" for e in events)


def test_a_model_that_does_not_replay_says_why() -> None:
    code, _, said = bcg("trace", "llama", "--layers", "1", "--length", "16", "--option", "capture=off")
    assert code == 2 and "Nothing replays." in said and "capture_off" in said


def test_stats_counts_replays_by_bucket_and_what_is_padded(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10\n12\n15\n16\n30\n12\n")
    arguments = ("llama", "--layers", "1", "--ladder", "12,16", "--lengths", str(lengths))
    code, out, _ = bcg("stats", *arguments)
    assert code == 0
    assert "6 calls, 1 graph, 2 captures, 4 replays, 2 runs without replay" in out
    assert "Padding: 1 row over 55 live ones of replays in buckets, 1.82%." in out
    assert "(too_long): more live rows than the last bucket holds" in out
    code, page, _ = bcg("stats", *arguments, "--prometheus")
    assert code == 0 and 'bcg_bucket_replays_total{model="llama",bucket="16"} 2' in page


def step(index: int, kind: Any, start: float, host: float, device: float) -> StepTime:
    return StepTime(index, kind, f"{kind} {index}", start, host, device)


def test_what_a_device_waits_for_is_found_from_both_clocks() -> None:
    """The device is idle at first, and then behind the host."""
    steps = (
        step(0, "fill", 0, 10, 12),
        step(0, "segment", 10, 20, 30),  # launched at 130, and the device was done with the fill at 112
        step(1, "segment", 30, 5, 50),  # launched at 135, and the device is busy until 142
        step(2, "break", 35, 100, 100),
    )
    plan: Any = type("Plan", (), {"steps": [type("Step", (), {"unit": unit}) for unit in ("one", "other", "")]})
    replay = Replay(1, plan, None, 0, 7, 100.0, 135.0, 100.0, steps)
    assert replay.waits() == [(1, 112.0, 130.0)]
    timeline = Timeline(list, nvtx=False)
    timeline.replays = [replay]
    stats: Any = type("Stats", (), {"eager_runs": {}})
    console = Console(width=120)
    with console.capture() as captured:
        console.print(trace_view(Watched(timeline, "cuda", print, stats)))
    out = " ".join(captured.get().split())
    assert "step kind times host device slowest share what 2 break 1 100.0 100.0 52.1% break 2" in out
    assert "segments 41.7%, breaks 52.1%, fills 6.2% of 192.0 µs of the device." in out
    assert "The device waits for the host to launch segments: 18.0 µs a replay." in out


def test_parts_that_do_the_same_in_several_layers_are_one_line() -> None:
    steps = [StepTime(i, "break", f"attention in layers.{i}", 0, 10.0 + i, None) for i in range(3)]
    steps += [StepTime(3, "segment", "head", 0, 67.0, None)]
    plan: Any = type("Plan", (), {"steps": [type("Step", (), {"unit": ""})] * 4})
    timeline = Timeline(list, nvtx=False)
    timeline.replays = [Replay(1, plan, None, 0, 7, 0.0, 100.0, None, tuple(steps))]
    console = Console(width=120)
    with console.capture() as captured:
        console.print(trace_view(Watched(timeline, "cuda", print, type("Stats", (), {"eager_runs": {}}))))  # type: ignore[arg-type]
    out = " ".join(captured.get().split())
    assert "3 segment 1 67.0 67.0% head 0 … break 3 11.0 12.0 in 2 33.0% attention in layers.{0…2}" in out
