"""An exception at any point of a program, twice in a row: it surfaces as it is, and leaves nothing behind."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Switch:
    """Lets one point fail."""

    point = ""

    @classmethod
    def check(cls, point: str) -> None:
        if cls.point == point:
            raise LookupError(f"no page at the {point}")


@pytest.fixture(autouse=True)
def _off() -> None:
    Switch.point = ""


@bcg.eager_break(
    mutates_args=("out",),
    capture_stub=lambda x, out: Switch.check("stub"),
    barrier=lambda: Switch.check("barrier"),
)
def store(x: Tensor, out: Tensor) -> None:
    Switch.check("break")
    out.copy_(x * 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.linear(x).sin()
        out = torch.empty_like(h)
        store(h, out)
        self.seen.add_(out.sum(0))
        return out[index].cos() * 2 + h + torch.rand_like(h)


def inputs(bad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, device=DEVICE), torch.tensor([2, 9 if bad else 0, 1], device=DEVICE)


def state() -> tuple[Any, ...]:
    """What a failure must leave as it was."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
    return capturing, stream, gc.isenabled(), modes


def pair() -> tuple[Model, Model, Callable[..., Tensor]]:
    eager, model = Model().to(DEVICE), Model().to(DEVICE)
    model.load_state_dict(eager.state_dict())
    return eager, model, torch.compile(model, backend="bcg", fullgraph=True)


def check_equal(eager: Model, model: Model, compiled: Callable[..., Tensor]) -> None:
    args = inputs()
    torch.manual_seed(3)
    want, drawn = eager(*args), torch.rand(1, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(compiled(*args), want) and torch.equal(torch.rand(1, device=DEVICE), drawn)
    assert torch.equal(model.seen, eager.seen)


#: (the point that fails, how many calls went well before it, what the note says of the place)
POINTS = [
    ("break", 0, "store(h, out)"),
    ("break", 1, "store(h, out)"),
    ("break", 2, "store(h, out)"),
    ("stub", 1, "store(h, out)"),
    ("barrier", 1, "store(h, out)"),
]


@pytest.mark.parametrize(("point", "good_calls", "place"), POINTS, ids=[f"{p}_after_{n}" for p, n, _ in POINTS])
def test_an_exception_surfaces_twice_and_then_the_program_works(point: str, good_calls: int, place: str) -> None:
    eager, model, compiled = pair()
    for _ in range(good_calls):
        check_equal(eager, model, compiled)
    before = state()
    for _ in range(2):
        Switch.point = point
        with pytest.raises(LookupError, match=f"no page at the {point}") as error:
            compiled(*inputs())
        Switch.point = ""
        (note,) = error.value.__notes__
        assert "bcg: break 1, %" in note and "store" in note and place in note and "test_failures.py" in note
        assert state() == before
        torch.rand(1, device=DEVICE)
    for _ in range(3):
        check_equal(eager, model, compiled)
    assert bcg.stats(compiled).replays >= 2


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assert ends the process's CUDA context")
@pytest.mark.parametrize("good_calls", [0, 1, 3], ids=["warm_up", "capture", "replay"])
def test_an_operation_of_a_segment_that_fails_surfaces_twice_and_then_the_program_works(good_calls: int) -> None:
    eager, model, compiled = pair()
    for _ in range(good_calls):
        check_equal(eager, model, compiled)
    before = state()
    for _ in range(2):
        with pytest.raises(IndexError, match="index 9 is out of bounds") as error:
            compiled(*inputs(bad=True))
        (note,) = error.value.__notes__
        assert "bcg: segment 2, %" in note and "out[index].cos()" in note
        assert state() == before
    # Each of the two calls has written the buffer before it failed, as an eager one does.
    with pytest.raises(IndexError):
        eager(*inputs(bad=True))
    model.seen.copy_(eager.seen)
    for _ in range(3):
        check_equal(eager, model, compiled)
    assert bcg.stats(compiled).replays >= 2


def test_results_outlive_the_model_and_its_program() -> None:
    _, model, compiled = pair()
    kept = []
    for _ in range(4):
        args = inputs()
        result = compiled(*args)
        kept.append((result, result.clone()))
    alive = weakref.ref(model)
    del model, compiled
    gc.collect()
    assert alive() is None
    bcg.reset()
    noise = [torch.full((3, 4), float("nan"), device=DEVICE) for _ in range(200)]
    assert noise and all(torch.equal(result, copy) for result, copy in kept)
