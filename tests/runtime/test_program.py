"""What a program keeps from call to call: its captures, how many, and for what."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bcg_compiler as bcg
from bcg_compiler.errors import BreakResultError

EMULATED = {"capture": "emulated", "min_segment_kernels": 1}


@bcg.eager_break(fake=torch.empty_like)
def as_published(x: Tensor) -> Tensor:
    return bcg.current_context().body(x)


def program(x: Tensor) -> Tensor:
    return as_published(x.sin()).cos()


def compiled(fn: Any = program, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(fn, backend="bcg", fullgraph=True, dynamic=True, options={**EMULATED, **options})


@torch.no_grad()
def test_shapes_beyond_the_limit_run_eagerly() -> None:
    model = compiled(max_captures=2)
    with bcg.forward_context(body=torch.neg):
        for rows in (2, 3, 4) * 2:
            x = torch.randn(rows, 4)
            assert torch.equal(model(x), program(x))
    assert bcg.stats(model).captures == 2
    assert bcg.stats(model).eager_runs == {"warm_up": 3, "capture_limit": 1}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x: x[:1], "float32[1, 4]"),  # a plain copy would be broadcast
        (lambda x: x.double(), "float64[3, 4]"),  # and this one converted
    ],
    ids=["shape", "dtype"],
)
@torch.no_grad()
def test_result_of_another_form_than_at_capture_is_an_error(body: Any, said: str) -> None:
    """What a break returns at a replay is copied to where the next segment reads it: it must fit there."""
    model, x = compiled(), torch.randn(3, 4)
    with bcg.forward_context(body=torch.neg):
        model(x)
        model(x)
    with bcg.forward_context(body=body), pytest.raises(BreakResultError) as seen:
        model(x)
    assert said in str(seen.value) and "float32[3, 4]" in str(seen.value)
    with bcg.forward_context(body=torch.neg):
        assert torch.equal(model(x), program(x))


@torch.no_grad()
def test_size_of_a_tensor_that_nobody_reads_is_part_of_the_key() -> None:
    """The graph takes the number of rows and not the tensor: two calls differ in nothing else."""

    def scaled(x: Tensor, unread: Tensor) -> Tensor:
        return x.sin() * unread.shape[0]

    model, x = compiled(scaled), torch.randn(4, 4)
    for rows in (2, 2, 3, 3, 2):
        assert torch.equal(model(x, torch.empty(rows, 5)), scaled(x, torch.empty(rows)))
    assert bcg.stats(model).replays == 3


def test_call_of_another_thread_in_between_runs_eagerly() -> None:
    """A replay would overwrite the buffers that the first call's steps still read; to wait may be to wait for ever."""
    model, x = compiled(), torch.randn(3, 4)
    results = []

    @torch.no_grad()
    def call(body: Any) -> None:
        with bcg.forward_context(body=body):
            results.append(model(x))

    def body_that_waits_for_a_thread(h: Tensor) -> Tensor:
        thread = threading.Thread(target=call, args=(torch.neg,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the second call waits for the first"
        return h.neg()

    call(torch.neg)
    call(torch.neg)
    call(body_that_waits_for_a_thread)
    assert len(results) == 4 and all(torch.equal(result, results[0]) for result in results)
    assert (bcg.stats(model).replays, bcg.stats(model).eager_runs) == (2, {"warm_up": 1, "busy": 1})


def test_two_programs_whose_breaks_call_each_other_end() -> None:
    """In two threads, each inside of one program, neither waits for the other."""
    inside = threading.Barrier(2)
    models: dict[str, Any] = {}
    x, results, depth = torch.randn(3, 4), [], threading.local()

    def body_of(other: str) -> Callable[[Tensor], Tensor]:
        def body(h: Tensor) -> Tensor:
            if getattr(depth, "now", 0):
                return h.neg()
            depth.now = 1
            try:
                inside.wait(60)
                return models[other](h)
            finally:
                depth.now = 0

        return body

    models["a"] = compiled(lambda h: as_published(h.sin()).cos())
    models["b"] = compiled(lambda h: as_published(h.exp()).tanh())

    @torch.no_grad()
    def call(name: str, other: str) -> None:
        with bcg.forward_context(body=body_of(other)):
            results.append(models[name](x))

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and len(results) == 2


_made: list[weakref.ref[Tensor]] = []
_alive: list[bool] = []


@bcg.eager_break(fake=lambda x: (torch.empty_like(x), torch.empty_like(x)))
def make_two(x: Tensor) -> tuple[Tensor, Tensor]:
    first = x.clone()
    _made.append(weakref.ref(first))
    return first, x + 1


@bcg.eager_break(fake=lambda x, y: torch.empty_like(x))
def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@bcg.eager_break(fake=torch.empty_like)
def look(x: Tensor) -> Tensor:
    _alive.append(_made[-1]() is not None)
    return x.clone()


@torch.no_grad()
def test_result_of_a_break_is_freed_behind_its_last_reader() -> None:
    """A value that crosses from break to break has no fixed address: a replay holds it no longer than eager code."""

    def crossing(x: Tensor) -> Tensor:
        first, second = make_two(x)
        return look(add(first, second.sin()).cos())

    model = compiled(crossing)
    for _ in range(3):
        model(torch.randn(3, 4))
    assert (bcg.stats(model).replays, _alive) == (2, [False] * 3)


# -- tensors that move -------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Binds a new state at each call, as a hand-written recurrent layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.state = (self.linear(x) + self.state).tanh()
        return self.state * 2


@torch.no_grad()
def test_tensor_that_is_replaced_at_each_call_becomes_a_slot() -> None:
    """It was captured anew at every call, 199 times in 200, and nothing said so."""
    eager, model = Recurrent(), Recurrent()
    model.load_state_dict(eager.state_dict())
    run = compiled(model)
    for _ in range(20):
        x = torch.randn(3, 4)
        assert torch.equal(run(x), eager(x))
    stats = bcg.stats(run)
    assert stats.captures < 8 and stats.replays >= 14
    (program,) = bcg.programs_of(run)
    assert program.plan is not None
    assert [slot.moving for slot in program.plan.slots].count(True) == 1


@torch.no_grad()
def test_weights_of_models_that_come_and_go_are_read_where_they_lie() -> None:
    """All tensors of a capture die with their model: none of them moves."""
    torch.compiler.reset()
    program = None
    for _ in range(8):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        run, x = torch.compile(model, backend="bcg", options=EMULATED), torch.randn(3, 4)
        for _ in range(3):
            assert torch.equal(run(x), model(x))
        (program,) = bcg.programs_of(run)
        assert program.plan is not None and not any(slot.moving for slot in program.plan.slots)
        del model, run


@torch.no_grad()
def test_attention_kernels_chosen_around_the_call_are_those_that_run() -> None:
    """Recorded once, the kernels of the first call ran for ever, whatever ``sdpa_kernel`` said."""

    def attend(q: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q) + 1

    run, q = compiled(attend), torch.randn(1, 2, 33, 16)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH) * 3:
        with sdpa_kernel(kernel):
            assert torch.equal(run(q), attend(q))
    assert bcg.stats(run).captures == 2
