"""Capture and replay on real CUDA graphs."""

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.models import zoo
from bcg_compiler.runtime import Stats

pytestmark = pytest.mark.gpu

#: These graphs are small: what launches cost would join their segments to breaks.
ONE_KERNEL: dict[str, Any] = {"min_segment_kernels": 1}


@pytest.fixture(autouse=True)
def fresh() -> None:
    bcg.reset()
    torch.manual_seed(0)


@bcg.eager_break(mutates_args=("out",))
def store(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def fresh_result(x: Tensor) -> Tensor:
    return x + 1


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def body(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).relu()
    out = torch.empty_like(h)
    store(h, out)
    y = fresh_result((out + h) @ w)
    return y.sin() * 2 + y


@torch.inference_mode()
def check(fn: Callable[..., Any], calls: list[tuple[Any, ...]], **options: Any) -> Stats:
    compiled = torch.compile(fn, backend="bcg", options={**ONE_KERNEL, **options})
    for args in calls:
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0)
    return bcg.stats(compiled)


def test_replays_follow_values_and_addresses() -> None:
    w = rand(8, 8)
    stats = check(body, [(rand(4, 8), w) for _ in range(6)])
    assert (stats.captures, stats.replays) == (1, 5)


def test_memory_allocated_between_calls_does_not_reach_the_pool() -> None:
    w = rand(64, 64)
    compiled = torch.compile(body, backend="bcg", options=ONE_KERNEL)
    held = []
    with torch.inference_mode():
        for _ in range(20):
            x = rand(64, 64)
            assert torch.equal(compiled(x, w), body(x, w))
            held = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(200)][::2]
    assert held


def test_results_stay_after_later_replays() -> None:
    w = rand(8, 8)
    compiled = torch.compile(body, backend="bcg", options=ONE_KERNEL)
    with torch.inference_mode():
        kept = [(compiled(x, w), body(x, w)) for x in (rand(4, 8) for _ in range(6))]
    for got, want in kept:
        assert torch.equal(got, want)


def test_random_numbers_are_those_of_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x.sin() + 1, 0.5)
        return fresh_result(y) * torch.rand_like(x) + torch.randn_like(x)

    compiled = torch.compile(fn, backend="bcg", options=ONE_KERNEL)
    x = rand(33, 7)
    with torch.inference_mode():
        for seed in range(5):
            torch.manual_seed(seed)
            want = fn(x), torch.cuda.get_rng_state()
            torch.manual_seed(seed)
            got = compiled(x), torch.cuda.get_rng_state()
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_a_replay_without_breaks_never_synchronises() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    compiled = torch.compile(model, backend="bcg", options=ONE_KERNEL)
    x = rand(4, 8)
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            compiled(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bcg.stats(compiled).replays == 3


def test_an_operation_that_synchronises_unseen_becomes_a_break_of_its_own() -> None:
    @torch.library.custom_op("bcggpu::peek", mutates_args=())
    def peek(x: Tensor) -> Tensor:
        return x * x.sum().item()

    peek.register_fake(torch.empty_like)

    def fn(x: Tensor) -> Tensor:
        return peek((x + 1).sin()).cos() * 2

    stats = check(fn, [(rand(4),) for _ in range(6)], capturable=["bcggpu::peek"])
    assert stats.reasons == {"capture_failed": 1}
    assert stats.replays >= 2 and not torch.cuda.is_current_stream_capturing()


def spoiling(name: str, act: Callable[[Tensor], Any]) -> Any:
    """A custom op that does something no capture allows, and swallows the error."""

    def body(x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            act(x)
        return x + 1

    op = torch.library.custom_op(f"bcggpu::{name}", body, mutates_args=())
    op.register_fake(torch.empty_like)
    return op


swallow = spoiling("swallow", lambda x: x.sum().item())


def test_an_operation_that_swallows_its_error_is_the_one_that_breaks() -> None:
    """The next operation, which is innocent, raises instead."""
    compiled = torch.compile(
        lambda x: swallow((x + 1).sin()).cos() * 2, backend="bcg", options={"capturable": NAMES, **ONE_KERNEL}
    )
    x = rand(4)
    with torch.inference_mode():
        for _ in range(5):
            assert torch.equal(compiled(x), swallow((x + 1).sin()).cos() * 2)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and program.replays >= 2
    failed = [r.op for step in program.plan.breaks for r in step.reasons if r.code == "capture_failed"]
    assert failed == ["bcggpu::swallow.default"]


NAMES = ["bcggpu::swallow", "bcggpu::fork", "bcggpu::fork_and_join"]


def test_a_failed_capture_leaves_nothing_behind() -> None:
    """Torch 2.11 does: every random operation fails from there on, and memory used on two streams never comes back."""
    side = torch.cuda.Stream()

    def comes_back() -> bool:
        torch.cuda.synchronize()
        value = torch.empty(1 << 20, device="cuda")
        address = value.data_ptr()
        with torch.cuda.stream(side):
            value.zero_()
        value.record_stream(side)
        del value
        torch.cuda.synchronize()
        return torch.empty(1 << 20, device="cuda").data_ptr() == address

    compiled = torch.compile(
        lambda x: swallow((x + torch.rand_like(x)).sin()).cos() * 2,
        backend="bcg",
        options={"capturable": NAMES, **ONE_KERNEL},
    )
    reserved = []
    for _ in range(3):
        bcg.reset()
        with torch.inference_mode():
            for _ in range(4):
                compiled(rand(1 << 20))
        assert bcg.stats(compiled).reasons == {"capture_failed": 1}
        torch.randn(3, device="cuda")
        assert comes_back()
        assert not torch.cuda.is_current_stream_capturing() and gc.isenabled()
        bcg.reset()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1] == reserved[2]


side = torch.cuda.Stream() if torch.cuda.is_available() else None


@torch.library.custom_op("bcggpu::fork", mutates_args=())
def fork(x: Tensor) -> Tensor:
    """Leaves work on a side stream that nothing waits for."""
    assert side is not None
    side.wait_stream(torch.cuda.current_stream())
    out = torch.empty_like(x)
    with torch.cuda.stream(side):
        torch.sin(x, out=out)
    return out


fork.register_fake(torch.empty_like)


@torch.library.custom_op("bcggpu::fork_and_join", mutates_args=())
def fork_and_join(x: Tensor) -> Tensor:
    out = fork(x)
    torch.cuda.current_stream().wait_stream(side)
    return out


fork_and_join.register_fake(torch.empty_like)


def test_a_side_stream_that_is_joined_is_captured() -> None:
    stats = check(lambda x: fork_and_join(x + 1).cos() * 2, [(rand(64),) for _ in range(5)], capturable=NAMES)
    assert (stats.reasons, stats.captures, stats.replays) == ({}, 1, 4)


def test_a_side_stream_that_is_not_joined_is_refused_by_name() -> None:
    compiled = torch.compile(lambda x: fork(x + 1), backend="bcg", options={"capturable": NAMES, **ONE_KERNEL})
    with torch.inference_mode():
        for _ in range(4):
            x = rand(64)
            got = compiled(x)
            torch.cuda.synchronize()
            assert torch.equal(got, (x + 1).sin())
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None
    (reason,) = [r for step in program.plan.breaks for r in step.reasons]
    assert (reason.code, reason.op) == ("capture_failed", "bcggpu::fork.default")
    assert str(side) in reason.text and "not joined" in reason.text
    torch.randn(3, device="cuda")


def test_streams_of_the_model_give_the_numbers_of_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)  # type: ignore[union-attr]
        with torch.cuda.stream(side):
            a = (x * 2).sin()
        b = (x + 1).cos()
        current.wait_stream(side)  # type: ignore[arg-type]
        return (a + b) * 2

    stats = check(fn, [(rand(64),) for _ in range(5)])
    assert set(stats.reasons) >= {"side_stream"} and stats.replays == 4


def test_a_wait_for_the_caller_s_stream_is_done_at_each_replay() -> None:
    """Recorded once, it would wait for nothing: the values come late from a stream outside of the model."""

    def fn(x: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_stream(side)  # type: ignore[arg-type]
        return (x.sin() + 1) * 2

    compiled = torch.compile(fn, backend="bcg", options=ONE_KERNEL)
    x = torch.zeros(1 << 20, device="cuda")
    with torch.inference_mode():
        for _ in range(5):
            value = rand(1 << 20)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                x.copy_(value)
            assert torch.equal(compiled(x), (value.sin() + 1) * 2)
    assert bcg.stats(compiled).replays >= 3


def test_a_call_inside_of_the_caller_s_own_capture_becomes_part_of_it() -> None:
    """No capture can start there, and a graph that holds memory of ours would outlive it."""
    w = rand(8, 8)
    compiled = torch.compile(body, backend="bcg", options=ONE_KERNEL)
    with torch.inference_mode():
        x = rand(4, 8)
        for _ in range(3):
            compiled(x, w)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = compiled(x, w)
            x.copy_(rand(4, 8))
            graph.replay()
            assert torch.equal(out, body(x, w))
    assert bcg.stats(compiled).eager_runs == {"warm_up": 1, "outer_capture": 3}
    torch.randn(3, device="cuda")


def test_a_call_on_another_stream_waits_for_the_last_replay() -> None:
    w = rand(512, 512)
    compiled = torch.compile(body, backend="bcg", options=ONE_KERNEL)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.inference_mode():
        inputs = [rand(512, 512) for _ in range(30)]
        want = [body(x, w) for x in inputs]
        compiled(inputs[0], w)
        compiled(inputs[0], w)
        torch.cuda.synchronize()
        got = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 3]):
                got.append(compiled(x, w))
        torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_another_thread_may_allocate_while_a_capture_runs() -> None:
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(1 << 16, device="cuda").fill_(1)
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for n in range(4, 12):
            bcg.reset()
            w = rand(8, 8)
            check(body, [(rand(n, 8), w) for _ in range(3)])
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("how", ["reset", "death"])
def test_reset_and_the_death_of_the_model_free_memory(how: str) -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            return fresh_result(self.linear(x).relu() @ x.T).sin() + 1

    def live() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    x = rand(4096, 1024)
    for round_ in range(2):  # libraries allocate in the first
        before = live()
        model = Big().cuda()
        compiled = torch.compile(model, backend="bcg", options=ONE_KERNEL)
        with torch.inference_mode():
            for _ in range(3):
                compiled(x)
        assert bcg.stats(compiled).captures == (1 if how == "reset" else 1 + round_)
        assert live() - before > 4096 * 4096 * 4
        reserved = torch.cuda.memory_reserved()
        if how == "reset":
            bcg.reset()
        del model, compiled
        gc.collect()  # Dynamo's entry of a dead model stands in a cycle
        assert round_ == 0 or live() - before < 1 << 20
        if how == "reset":
            assert reserved - torch.cuda.memory_reserved() > 4096 * 4096 * 4


def test_out_of_memory_in_a_capture_runs_eagerly_with_the_reason() -> None:
    w = rand(8, 8)
    compiled = torch.compile(body, backend="bcg", options=ONE_KERNEL)
    with torch.inference_mode():
        x = rand(4, 8)
        compiled(x, w)
        (program,) = bcg.programs_of(compiled)

        def fail(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no more")

        program._compiled.lowered.segments[0] = fail  # type: ignore[union-attr]
        assert torch.equal(compiled(x, w), body(x, w))
        assert bcg.stats(compiled).eager_runs == {"warm_up": 1, "out_of_memory": 1}
        assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "mamba2", "gpt_oss", "whisper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_architectures_give_the_bits_of_their_graph(name: str, dtype: torch.dtype) -> None:
    """Under Dynamo transformers builds other masks than without, and another attention kernel adds in another order:
    the bits to match are those of Dynamo's graph run as it is.
    """
    model = zoo.build(name, device="cuda", dtype=dtype)
    compiled = torch.compile(model.model, backend="bcg", options=ONE_KERNEL)
    reference = torch.compile(model.model, backend="eager")
    generator = torch.Generator().manual_seed(1)
    for length in (24, 24, 24, 70, 70, 24):
        inputs = model.make_inputs(length, generator)
        assert torch.equal(compiled(**inputs)[0], reference(**inputs)[0]), length
    assert bcg.stats(compiled).replays >= 2
