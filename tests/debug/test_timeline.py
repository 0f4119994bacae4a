"""Timelines of replays on the emulated device: what they name, in which order, and that they leave nothing behind."""

import gc
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.debug import timeline as module
from bcg_compiler.debug.timeline import StepTime, measure
from bcg_compiler.errors import TraceError

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True, writes_every_row=True)
def middle(x: Tensor) -> Tensor:
    return x * 2


@bcg.eager_break(mutates_args=("state",))
def store(state: Tensor, x: Tensor) -> None:
    state.add_(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(middle(self.first(x))).relu()


def writes_its_input(x: Tensor, state: Tensor) -> Tensor:
    state.mul_(2)
    store(state, x)
    store(state, x)
    return x + state


def compiled(fn: Any, *args: Any, **options: Any) -> Any:
    made = torch.compile(fn, backend="bcg", options={**OPTIONS, **options})
    for _ in range(2):
        made(*args)
    return made


def kinds(steps: tuple[StepTime, ...]) -> list[tuple[str, int, str]]:
    return [(step.kind, step.index, step.name) for step in steps]


def test_parts_of_a_replay_in_their_order() -> None:
    model, x = Model(), torch.randn(3, 4)
    run = compiled(model, x)
    with bcg.trace(run) as timeline:
        result = run(x)
    assert torch.equal(result, model(x))
    (replay,) = timeline.replays
    (bridge,) = replay.plan.bridges
    assert kinds(replay.steps) == [
        ("fill", 0, "x"),
        ("segment", 0, "first"),
        ("break", 1, "tests.debug.test_timeline.middle in the model itself"),
        ("fill", 1, f"bridge %{bridge}"),
        ("segment", 2, "last → the model itself"),
        ("copy_back", 2, "results"),
    ]
    ends = [step.start_us + step.host_us for step in replay.steps]
    assert all(end <= then.start_us for end, then in zip(ends, replay.steps[1:], strict=False))
    assert replay.steps[0].start_us >= 0 and ends[-1] <= replay.host_us
    assert all(step.device_us is None for step in replay.steps)


def test_copies_to_the_caller_are_parts_of_their_own() -> None:
    """Within a break, too: a body may know the caller's tensor by another way."""
    x, state = torch.randn(3, 4), torch.randn(3, 4)
    run = compiled(writes_its_input, x, state)
    expected = state.clone()
    wanted = writes_its_input(x, expected)
    with bcg.trace(run) as timeline:
        assert torch.equal(run(x, state), wanted)
    assert torch.equal(state, expected)
    found = [(step.kind, step.name) for step in timeline.steps()]
    slots = [at for at, part in enumerate(found) if part == ("copy_back", "slots")]
    around = [(found[at - 1][0], found[at + 1][0]) for at in slots]
    assert around == [("fill", "break"), ("break", "break"), ("segment", "copy_back")], found


def test_a_trace_leaves_the_program_as_it_was() -> None:
    """Nothing is asked on a call's way when nobody traces: the methods are the class's, the functions the same."""
    x = torch.randn(3, 4)
    run = compiled(Model(), x)
    (program,) = bcg.programs_of(run)

    def state() -> tuple[Any, ...]:
        captures = [capture for capture in program._places.captures()]
        return dict(vars(program)), [(c, c.run, c.code, c.run.__code__) for c in captures], program.replay_sources

    before = state()
    assert "mark" not in program.replay_sources[0]
    for _ in range(2):
        with bcg.trace(run):
            assert set(vars(program)) - set(before[0]) == {"_replay", "_eagerly", "_warm_up", "_capture"}
            run(x)
        after = state()
        assert set(after[0]) == set(before[0]) and after[2] == before[2]
        assert all(
            a is b for one, other in zip(after[1], before[1], strict=True) for a, b in zip(one, other, strict=True)
        )
    for name in ("_replay", "_eagerly", "_warm_up", "_capture"):
        assert getattr(program, name).__func__ is getattr(type(program), name)


def test_a_body_that_raises_is_located_while_it_is_traced() -> None:
    fails = False

    @bcg.eager_break(fake=torch.empty_like)
    def breaks(x: Tensor) -> Tensor:
        if fails:
            raise ValueError("on purpose")
        return x + 1

    def fn(x: Tensor) -> Tensor:
        return breaks(x * 2) + 1

    x = torch.ones(3)
    run = compiled(fn, x)
    fails = True
    with bcg.trace(run) as timeline, pytest.raises(ValueError, match="on purpose") as raised:
        run(x)
    assert any("bcg: break 1" in note and "breaks" in note for note in raised.value.__notes__)
    fails = False
    assert [step.kind for step in timeline.replays[0].steps] == ["fill", "segment", "break"]
    assert torch.equal(run(x), fn(x))


def test_calls_captures_and_eager_runs_are_shown_around_replays() -> None:
    """A graph that is compiled within the trace is seen from the next call on."""
    run = compiled(Model(), torch.randn(3, 4))
    with bcg.trace(run) as timeline:
        for rows in (3, 5, 5, 5):
            with timeline.call(f"{rows} rows"):
                run(torch.randn(rows, 4))
    assert [span.name for span in timeline.spans if span.kind == "call"] == ["3 rows", "5 rows", "5 rows", "5 rows"]
    assert [span.name for span in timeline.spans if span.kind == "other"] == ["graph 2 capture"]
    assert [replay.graph for replay in timeline.replays] == [1, 2, 2]


def test_buckets_are_told_apart(padded_run: Callable[[int], Any]) -> None:
    with bcg.trace(padded_run.compiled) as timeline:  # type: ignore[attr-defined]
        for rows in (3, 7, 4, 5, 40):
            padded_run(rows)
    assert [replay.rows for replay in timeline.replays] == [4, 8, 4, 8]
    assert [replay.capture for replay in timeline.replays] == [0, 1, 0, 1]
    assert timeline.steps(rows=8) and not timeline.steps(rows=16) and not timeline.steps(graph=2)
    assert [span.name for span in timeline.spans] == ["graph 1 capture", "graph 1 eager run: too_long"]


@pytest.fixture
def padded_run() -> Any:
    class Run:
        def __init__(self) -> None:
            self.compiled = torch.compile(
                lambda x: middle(x + 1) * 2, backend="bcg", options={**OPTIONS, "ladder": [4, 8]}
            )
            self(3)
            self(3)

        def __call__(self, rows: int) -> None:
            x = torch.ones(rows, 2)
            torch._dynamo.mark_dynamic(x, 0)
            self.compiled(x)

    return Run()


def test_measure_gives_medians_of_a_program_that_was_never_called() -> None:
    x = torch.randn(3, 4)
    run: Any = torch.compile(lambda x: middle(x + 1) * 2, backend="bcg", options=OPTIONS)
    run(x)
    (program,) = bcg.programs_of(run)
    steps = measure(program, (x,), calls=3)
    assert [step.kind for step in steps] == ["fill", "segment", "break", "fill", "segment", "copy_back"]
    assert program.replays == 4 and "_replay" not in vars(program)


def test_measure_says_why_nothing_replays() -> None:
    run: Any = torch.compile(lambda x: x + 1, backend="bcg", options={**OPTIONS, "capture": "off"})
    run(torch.ones(3))
    (program,) = bcg.programs_of(run)
    with pytest.raises(TraceError, match="capture_off"):
        measure(program, (torch.ones(3),))


def test_one_trace_at_a_time() -> None:
    run = compiled(Model(), torch.randn(3, 4))
    with bcg.trace(run):
        with pytest.raises(TraceError, match="traced already"), bcg.trace(run):
            pass
        run(torch.randn(3, 4))
    with bcg.trace(run) as timeline:
        run(torch.randn(3, 4))
    assert len(timeline.replays) == 1


def test_a_full_timeline_counts_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PARTS", 13)
    x = torch.randn(3, 4)
    run = compiled(Model(), x)
    with bcg.trace(run) as timeline:
        for _ in range(5):
            run(x)
    assert (len(timeline.replays), timeline.missed) == (2, 3)


def test_a_timeline_keeps_neither_model_nor_program_alive() -> None:
    model, x = Model(), torch.randn(3, 4)
    run = compiled(model, x)
    with bcg.trace(run) as timeline:
        run(x)
    gone = weakref.ref(model), weakref.ref(bcg.programs_of(run)[0])
    del model, run
    bcg.reset()
    gc.collect()
    assert [ref() for ref in gone] == [None, None] and timeline.json()


def test_the_file_is_chrome_s_format_and_slices_lie_within_their_replay() -> None:
    x = torch.randn(3, 4)
    run = compiled(Model(), x)
    with bcg.trace(run) as timeline:
        for number in range(2):
            with timeline.call(f"call {number}"):
                run(x)
    events = json.loads(timeline.json())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all({"name", "cat", "ts", "dur", "pid", "tid", "args"} <= set(event) for event in slices)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"host"}
    assert [e["name"] for e in slices if e["cat"] == "call"] == ["call 0", "call 1"]
    assert [e["name"] for e in slices if e["cat"] == "segment"][:2] == [
        "segment 0 first",
        "segment 2 last → the model itself",
    ]
    (seen,) = {e["args"]["reason"] for e in slices if e["cat"] == "break"}
    assert seen.startswith("eager_break: ")

    def within(inner: Any, outer: Any) -> bool:
        rounded = 0.002
        ends = [event["ts"] + event["dur"] for event in (inner, outer)]
        return outer["ts"] <= inner["ts"] + rounded and ends[0] <= ends[1] + rounded

    outer = {kind: [e for e in slices if e["cat"] == kind] for kind in ("call", "replay")}
    assert all(any(within(r, c) for c in outer["call"]) for r in outer["replay"])
    for event in slices:
        if event["cat"] in ("segment", "break", "fill", "copy_back"):
            assert any(within(event, replay) for replay in outer["replay"])
        if event["cat"] == "gap":
            assert any(within(event, call) for call in outer["call"])
            assert not any(
                event["ts"] + 0.002 < r["ts"] + r["dur"] and r["ts"] + 0.002 < event["ts"] + event["dur"]
                for r in outer["replay"]
            )


def test_threads_have_tracks_of_their_own() -> None:
    x = torch.randn(3, 4)
    run = compiled(Model(), x)
    with bcg.trace(run) as timeline:
        run(x)
        thread = threading.Thread(target=torch.no_grad()(run), args=(x,))
        thread.start()
        thread.join()
    assert len({replay.thread for replay in timeline.replays}) == len(timeline.replays) == 2
    names = [e["args"]["name"] for e in json.loads(timeline.json())["traceEvents"] if e["name"] == "thread_name"]
    assert len(names) == len(timeline.replays)


class Ranges:
    """In place of torch.cuda.nvtx."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[int, str]] = []

    def mark(self, text: str) -> None: ...

    def range_push(self, text: str) -> None:
        self.seen.append((len(self.open), text))
        self.open.append(text)

    def range_pop(self) -> None:
        self.open.pop()


def test_nvtx_has_a_range_for_each_part_and_none_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    run = compiled(Model(), x)
    ranges = Ranges()
    monkeypatch.setattr(torch.cuda, "nvtx", ranges)
    with bcg.trace(run):
        run(x)
    assert ranges.seen == []
    with bcg.trace(run, nvtx=True) as timeline:
        run(x)
    assert ranges.seen[0] == (0, "replay graph 1") and ranges.open == []
    assert [name for depth, name in ranges.seen if depth == 1] == [
        f"{step.kind} {step.index} {step.name}" for step in timeline.steps()
    ]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_nvtx_without_cuda_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TraceError, match="Trace without it"), bcg.trace(nvtx=True):
        pass
