"""Capture and replay on real CUDA graphs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.models import zoo
from bcg_compiler.runtime import Stats

pytestmark = pytest.mark.gpu


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
    compiled = torch.compile(fn, backend="bcg", options=options or None)
    for args in calls:
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0)
    return bcg.stats(compiled)


def test_replays_follow_values_and_addresses() -> None:
    w = rand(8, 8)
    stats = check(body, [(rand(4, 8), w) for _ in range(6)])
    assert (stats.captures, stats.replays) == (1, 5)


def test_memory_allocated_between_calls_does_not_reach_the_pool() -> None:
    w = rand(64, 64)
    compiled = torch.compile(body, backend="bcg")
    held = []
    with torch.inference_mode():
        for _ in range(20):
            x = rand(64, 64)
            assert torch.equal(compiled(x, w), body(x, w))
            held = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(200)][::2]
    assert held


def test_results_stay_after_later_replays() -> None:
    w = rand(8, 8)
    compiled = torch.compile(body, backend="bcg")
    with torch.inference_mode():
        kept = [(compiled(x, w), body(x, w)) for x in (rand(4, 8) for _ in range(6))]
    for got, want in kept:
        assert torch.equal(got, want)


def test_random_numbers_are_those_of_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(x.sin() + 1, 0.5)
        return fresh_result(y) * torch.rand_like(x) + torch.randn_like(x)

    compiled = torch.compile(fn, backend="bcg")
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
    compiled = torch.compile(model, backend="bcg")
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


def test_a_call_on_another_stream_waits_for_the_last_replay() -> None:
    w = rand(512, 512)
    compiled = torch.compile(body, backend="bcg")
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


@pytest.mark.parametrize(
    "how",
    [
        "reset",
        pytest.param("death", marks=pytest.mark.xfail(strict=False, reason="16 MiB of 84 MiB stayed; not explained")),
    ],
)
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
        compiled = torch.compile(model, backend="bcg")
        with torch.inference_mode():
            for _ in range(3):
                compiled(x)
        assert bcg.stats(compiled).captures == 1
        assert live() - before > 4096 * 4096 * 4
        if how != "death":
            bcg.reset()
        del model, compiled
        assert round_ == 0 or live() - before < 1 << 20


def test_out_of_memory_in_a_capture_runs_eagerly_with_the_reason() -> None:
    w = rand(8, 8)
    compiled = torch.compile(body, backend="bcg")
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
    compiled = torch.compile(model.model, backend="bcg")
    reference = torch.compile(model.model, backend="eager")
    generator = torch.Generator().manual_seed(1)
    for length in (24, 24, 24, 70, 70, 24):
        inputs = model.make_inputs(length, generator)
        assert torch.equal(compiled(**inputs)[0], reference(**inputs)[0]), length
    assert bcg.stats(compiled).replays >= 2
