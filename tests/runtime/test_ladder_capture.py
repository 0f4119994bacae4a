"""``bcg.capture``: all buckets before the first request, without effects; and calls that need another capture."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bcg_compiler as bcg
from bcg_compiler.errors import LateCaptureError, ReleasedError
from bcg_compiler.runtime.capture import EmulatedCapture

#: How often each body ran.
_ran: list[int] = []


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    _ran.clear()


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def into(x: Tensor, out: Tensor) -> None:
    n = bcg.current_context().live_rows
    _ran.append(n)
    out[:n].copy_(x[:n] + 1)


@bcg.eager_break(fake=lambda x: x.new_empty(x.shape[0], dtype=torch.int64), reads_live_rows=True)
def index(x: Tensor) -> Tensor:
    _ran.append(x.shape[0])
    return x.argmax(-1)


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def fresh(x: Tensor) -> Tensor:
    _ran.append(x.shape[0])
    return x * 2


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def index_into(x: Tensor, out: Tensor) -> None:
    n = bcg.current_context().live_rows
    out[:n].copy_(x[:n].argmax(-1))


TABLE = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("keys", torch.zeros(64, 4))

    @bcg.eager_break(mutates_args=("keys",), reads_live_rows=True)
    def remember(self, x: Tensor, keys: Tensor) -> None:
        n = bcg.current_context().live_rows
        _ran.append(n)
        keys[:n] += x[:n]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = torch.empty_like(x)
        into(x @ self.weight, out)
        self.remember(out, self.keys)
        return out * 2 + self.calls


@pytest.fixture
def model(padded: Any) -> Callable[..., Any]:
    """``model(**options)``: a pair that has run once."""

    def make(length: int = 5, **options: Any) -> Any:
        pair = padded(Model(), close=True, max_padding_factor=8, **options)
        pair(rows(length))
        return pair

    return make


def capture(pair: Any, *ladder: Any) -> Any:
    return bcg.capture(pair.compiled, *ladder, progress=False)


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, *buckets: int, text: str = "no memory left") -> None:
    """Let a capture fail in some buckets."""
    real = EmulatedCapture.capture

    def refuse(self: EmulatedCapture, segment: Any, args: tuple[Any, ...]) -> Any:
        if any(isinstance(arg, Tensor) and arg.dim() and arg.shape[0] in buckets for arg in args):
            raise torch.OutOfMemoryError(text)
        return real(self, segment, args)

    monkeypatch.setattr(EmulatedCapture, "capture", refuse)


def test_all_buckets_are_captured_the_largest_first(model: Any) -> None:
    pair = model()
    report = capture(pair)
    assert [rung.rows for rung in report.rungs] == [32, 16, 8] and not report.dropped
    assert [rung.bytes for rung in report.rungs] == sorted(rung.bytes for rung in report.rungs)
    assert report.measured_bytes == pair.stats.measured_bytes and "3 of 3 buckets" in str(report)
    with bcg.counters.expect(captures=0, replays=5, eager_runs=1):
        for n in (30, 12, 3, 16, 8, 33):
            pair(rows(n))
    assert bcg.admission(pair.compiled, rows=20).bucket == 32
    assert bcg.admission(pair.compiled, rows=33).reason == "too_long"


@pytest.mark.parametrize("late", ["capture", "eager", "error"])
def test_after_other_parameters_were_put_in_place_all_is_captured_with_them(model: Any, late: str) -> None:
    """The first call's were asked for, for ever: "call the compiled model, then capture again" did not help."""
    pair = model(on_late_capture=late)
    capture(pair)
    for module in (pair.module, pair.eager):
        module.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    gc.collect()
    with pytest.raises(ReleasedError, match="Call the compiled model, then capture again"):
        capture(pair)
    if late == "error":
        with pytest.raises(LateCaptureError, match="Its parameters have moved"):
            pair.compiled(rows(5))
    else:
        pair(rows(5))
    assert len(capture(pair).rungs) == 3
    with bcg.counters.expect(captures=0, replays=3, eager_runs=0):
        for n in (30, 12, 3):
            pair(rows(n))


def test_an_instance_that_is_gone_takes_nothing_from_the_others() -> None:
    """All instances of a class have one program, whose first call may have been that of any."""

    def make() -> Any:
        layer = nn.Linear(4, 4)
        return layer, torch.compile(layer, backend="bcg", options={"capture": "emulated", "ladder": [8, 16]})

    (first, compiled_first), (second, compiled) = make(), make()
    for each in (compiled_first, compiled):
        x = rows(5)
        torch._dynamo.mark_dynamic(x, 0)
        each(x)
        each(x)
    del first, compiled_first, each
    gc.collect()
    assert len(bcg.capture(compiled, progress=False).rungs) == 2
    with bcg.counters.expect(captures=0, replays=1, eager_runs=0):
        x = rows(11)
        assert torch.equal(compiled(x), second(x))


def test_another_ladder_needs_no_eager_run(model: Any) -> None:
    """What breaks make, which a call had shown, was forgotten: a capture behind it waited for another such call."""
    pair = model()
    capture(pair, [8, 24])
    for module in (pair.module, pair.eager):
        module.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    with bcg.counters.expect(captures=1, replays=1, eager_runs=0):
        pair(rows(20))


def test_nothing_of_the_model_is_done(model: Any) -> None:
    pair = model()
    ran, random = list(_ran), torch.get_rng_state()
    before = {name: value.clone() for name, value in pair.module.state_dict().items()}
    for _ in range(2):
        capture(pair)
    assert _ran == ran and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in pair.module.state_dict().items())
    for n in (7, 30, 12):
        pair(rows(n))


def indices(x: Tensor) -> Tensor:
    return TABLE[index(fresh(x.sin()).sin())] * 2


def indices_in_a_buffer(x: Tensor) -> Tensor:
    at = torch.empty(x.shape[0], dtype=torch.long)
    index_into(x.sin(), at)
    return TABLE[at] * 2


@pytest.mark.parametrize("fn", [indices, indices_in_a_buffer])
def test_a_smoke_run_reads_no_index_that_nobody_has_written(padded: Any, poisoned: None, fn: Any) -> None:
    """What breaks fill holds anything before a call: taken for an index, it is an illegal access."""
    pair = padded(fn)
    for n in (5, 12):
        pair(rows(n))
    report = capture(pair)
    assert len(report.rungs) == 3 and not report.dropped
    for n in (5, 12, 30):
        pair(rows(n))


def test_a_rehearsal_reads_no_index_that_nobody_has_written(
    padded: Any, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments run once in a bucket whose capture failed: on whatever stood in the memory that breaks fill."""
    pair = padded(indices_in_a_buffer)
    for n in (5, 6):
        pair(rows(n))
    real, failed = EmulatedCapture.capture, []

    def fail_once(self: EmulatedCapture, segment: Any, args: tuple[Any, ...]) -> Any:
        if not failed:
            failed.append(segment)
            raise RuntimeError("a kernel must be chosen first")
        return real(self, segment, args)

    monkeypatch.setattr(EmulatedCapture, "capture", fail_once)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is the largest number, or NaN
    try:
        pair(rows(12))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert failed and not pair.plan.breaks[1:] and pair.stats.captures == 2


def test_before_any_call_there_is_nothing_to_capture(padded: Any) -> None:
    with pytest.raises(bcg.LadderError, match="has not run yet"):
        capture(padded(Model()))
    assert bcg.admission(padded(Model()).compiled, rows=5).reason == "not_compiled"


def test_what_cannot_be_padded_is_told_with_the_reason(padded: Any) -> None:
    pair = padded(lambda x: x - x.mean(0))
    pair(rows(5))
    with pytest.raises(bcg.LadderError, match="mean runs over all rows"):
        capture(pair)
    bare = padded(lambda x: x * 2 + 1, ladder=None)
    bare(rows(5))
    with pytest.raises(bcg.LadderError, match="without options"):
        capture(bare)
    assert bcg.admission(bare.compiled, rows=5).reason == "no_ladder"


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def given_back(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("options", "reason"), [({"capture": "off"}, "capture_off"), ({}, "break_alias")], ids=["off", "alias"]
)
def test_what_always_runs_eagerly_is_not_captured(padded: Any, options: dict[str, Any], reason: str) -> None:
    """The report told of buckets that no call was to use, or asked for a call that there had been."""
    pair = padded(lambda x: given_back(x.sin()) * 2 + 1, **options)
    for n in (5, 6):
        pair(rows(n))
    with pytest.raises(bcg.LadderError, match=reason):
        capture(pair)
    assert bcg.admission(pair.compiled, rows=5).reason == reason


def test_another_ladder(model: Any) -> None:
    pair = model()
    report = capture(pair, [10, 20])
    assert [rung.rows for rung in report.rungs] == [20, 10]
    with bcg.counters.expect(captures=0, replays=3):
        for n in (5, 15, 20):
            pair(rows(n))
    assert bcg.admission(pair.compiled, rows=21).reason == "too_long"
    with pytest.raises(bcg.LadderError, match="20"):
        capture(pair, [20, 10])


def test_a_ladder_where_there_was_none(padded: Any) -> None:
    """What the calls so far were like is not known: one more is needed."""
    pair = padded(Model(), ladder=None, close=True)
    with bcg.forward_context(live_rows=5):
        pair(rows(5))
    with pytest.raises(bcg.LadderError, match="Call it once, and capture then"):
        capture(pair, [8, 16])
    pair(rows(5))
    assert [rung.rows for rung in capture(pair, [8, 16]).rungs] == [16, 8]
    for n in (7, 12):
        pair(rows(n))


def test_other_sizes_are_captured_as_they_were_called(padded: Any) -> None:
    pair = padded(lambda x: x * 2 + 1, open=(1, 0), token_dim=1, max_padding_factor=8, on_late_capture="error")
    for b in (2, 3):
        pair(torch.randn(b, 5, 4))
    report = capture(pair)
    assert sorted((rung.rows, rung.others[0]) for rung in report.rungs) == [
        (rows, b) for rows in (8, 16, 32) for b in (2, 3)
    ]
    for b, n in ((2, 30), (3, 12), (2, 12)):
        pair(torch.randn(b, n, 4))
    with pytest.raises(LateCaptureError, match="other sizes"):
        pair(torch.randn(4, 5, 4))


@pytest.mark.parametrize("policy", ["capture", "eager", "error"])
def test_a_call_that_needs_another_capture(model: Any, policy: str) -> None:
    pair = model(on_late_capture=policy)
    capture(pair)
    for each in (pair.module, pair.eager):
        each.weight = nn.Parameter(each.weight.clone() * 2, requires_grad=False)
    if policy == "error":
        ran = list(_ran)
        with pytest.raises(LateCaptureError, match="bucket 16"):
            pair.compiled(rows(12))
        assert _ran == ran and pair.stats.captures == 4
        return
    with bcg.counters.expect(captures=int(policy == "capture"), replays=int(policy == "capture")):
        pair(rows(12))
    assert pair.stats.eager_runs.get("late_capture", 0) == int(policy == "eager")


def test_before_everything_is_captured_no_capture_is_late(model: Any) -> None:
    pair = model(on_late_capture="error")
    for n in (12, 30, 5):
        pair(rows(n))
    assert pair.stats.captures == 3


@pytest.mark.parametrize("text", ["no memory left", ""])
def test_a_bucket_without_memory_is_dropped_and_the_next_larger_one_serves(
    model: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """One whose error had no text counted as captured."""
    pair = model()
    run_out_of_memory(monkeypatch, 16, text=text)
    report = capture(pair)
    assert [rung.rows for rung in report.dropped] == [16] and "16 is dropped" in str(report)
    assert text in report.dropped[0].error
    assert bcg.admission(pair.compiled, rows=12).bucket == 32
    with bcg.counters.expect(captures=0, replays=3):
        for n in (12, 5, 30):
            pair(rows(n))


def test_another_ladder_tries_again_what_was_dropped(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = model()
    run_out_of_memory(monkeypatch, 16)
    assert len(capture(pair).dropped) == 1
    monkeypatch.undo()
    assert [rung.rows for rung in capture(pair).rungs] == [32, 8]
    assert [rung.rows for rung in capture(pair, [8, 16]).rungs] == [16, 8]


def test_without_the_largest_bucket_its_lengths_are_too_long(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = model()
    run_out_of_memory(monkeypatch, 32)
    assert [rung.rows for rung in capture(pair).dropped] == [32]
    assert bcg.admission(pair.compiled, rows=20).reason == "too_long"
    for n in (20, 12, 5):
        pair(rows(n))


def test_a_bucket_is_dropped_by_a_call_too(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = model()
    run_out_of_memory(monkeypatch, 16)
    for n in (12, 12, 5, 30):
        pair(rows(n))
    assert pair.stats.captures == 2 and bcg.admission(pair.compiled, rows=12).bucket == 32


def test_no_bucket_at_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_out_of_memory(monkeypatch, 8, 16, 32)
    pair = model()
    assert len(capture(pair).dropped) == 2  # the call has dropped the first
    assert bcg.admission(pair.compiled, rows=5).reason == "no_bucket"
    for n in (5, 12):
        pair(rows(n))


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_as_before(model: Any, monkeypatch: pytest.MonkeyPatch, collecting: bool) -> None:
    pair = model()
    was = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        capture(pair)
        assert gc.isenabled() is collecting

        def fail(*_: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(EmulatedCapture, "capture", fail)
        with pytest.raises(KeyboardInterrupt):
            capture(pair)
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if was else gc.disable)()
    monkeypatch.undo()
    pair(rows(12))  # and the program is free again
    assert pair.stats.eager_runs.get("busy") is None


def test_an_operation_that_fails_in_one_bucket_is_told(padded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing ahead then ended after one bucket, as if that were all, and calls ran eagerly from there on."""
    pair = padded(lambda x: (x.sin() + 1).cos() * 2, max_padding_factor=8, on_late_capture="error")
    pair(rows(5))
    real = EmulatedCapture.capture

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cos.default and args[0].shape[0] == 32:
                raise RuntimeError("cos is not for so many")
            return func(*args, **(kwargs or {}))

    def refuse(self: EmulatedCapture, segment: Any, args: tuple[Any, ...]) -> Any:
        def watched(*given: Any) -> Any:
            with Refuses():
                return segment(*given)

        return real(self, watched, args)

    monkeypatch.setattr(EmulatedCapture, "capture", refuse)
    report = capture(pair)
    assert [rung.rows for rung in report.dropped] == [32] and "capture again" in report.dropped[0].error
    for n in (30, 12):
        pair(rows(n))
    assert len(pair.plan.breaks) == 1
    report = capture(pair)
    assert len(report.rungs) == 3 and not report.dropped
    with bcg.counters.expect(captures=0, replays=3):
        for n in (30, 12, 5):
            pair(rows(n))


def test_calls_of_other_threads_while_it_captures_run_eagerly(model: Any) -> None:
    pair = model()
    program = pair.program
    rungs = program.capture_ladder()
    next(rungs)
    x = rows(5)
    pair.compiled(x)
    assert pair.stats.eager_runs["busy"] == 1
    rungs.close()
    pair.compiled(x)
    assert pair.stats.eager_runs["busy"] == 1


def test_several_graphs_are_captured_together(padded: Any) -> None:
    def with_a_graph_break(x: Tensor) -> Tensor:
        y = x * 2 + 1
        torch._dynamo.graph_break()
        return y.sin() * 3 + 1

    pair = padded(with_a_graph_break, fullgraph=False, token_dim=0, max_padding_factor=8)
    for n in (5, 6):
        pair(rows(n))
    report = capture(pair)
    assert {rung.rows for rung in report.rungs} == {8, 16, 32}
    for n in (5, 30, 12):
        pair(rows(n))


def test_a_capture_inside_of_a_call_is_an_error_and_waits_for_nobody(padded: Any) -> None:
    """It waited for the call that it was made from."""

    @bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
    def capturing(x: Tensor) -> Tensor:
        capture(pair)
        return x * 2

    pair = padded(lambda x: capturing(x.sin()) + 1)
    pair.eager = lambda x: x.sin() * 2 + 1
    with pytest.raises(bcg.LadderError, match="not in a break's body"):
        pair(rows(5))
