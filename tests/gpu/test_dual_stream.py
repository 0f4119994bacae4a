"""Work on a second stream in real graphs: forked and joined in one segment, with eager's numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

side = torch.cuda.Stream() if torch.cuda.is_available() else None


@bcg.eager_break(mutates_args=("out",), reason="a2a_moe")
def experts(x: Tensor, out: Tensor) -> None:
    out.copy_((x * 2).exp())


class Layer(torch.nn.Module):
    """Shared and routed experts; ``order`` says how the streams wait, and whether the routed ones are a break."""

    def __init__(self, order: str, width: int = 512) -> None:
        super().__init__()
        self.order = order
        self.shared, self.routed = (torch.nn.Linear(width, width, bias=False, device="cuda") for _ in range(2))
        self.before, self.after = torch.cuda.Event(), torch.cuda.Event()

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh() * 0.5
        out = torch.empty_like(x)
        current = torch.cuda.current_stream()
        if self.order == "events":
            self.before.record()
        else:
            side.wait_stream(current)  # type: ignore[union-attr]
        with torch.cuda.stream(side):
            if self.order == "events":
                self.before.wait()
            shared = self.shared(x).relu()
            shared = self.shared(shared * 0.1).relu()
            if self.order == "events":
                self.after.record()
        if self.order == "break":
            experts(x, out)
        else:
            out = self.routed(self.routed(x).sin()).cos()
        if self.order == "events":
            self.after.wait()
        else:
            current.wait_stream(side)  # type: ignore[arg-type]
        return shared * out + shared


class Layers(torch.nn.Module):
    def __init__(self, order: str, count: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(order) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def check(
    model: Callable[[Tensor], Tensor],
    calls: int = 6,
    reference: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> bcg.Plan:
    reference = reference or model
    bcg.reset()
    compiled = torch.compile(
        model,
        backend="bcg",
        options={"dual_stream": True, "segment_compiler": "eager", "min_segment_kernels": 1, **options},
    )
    with torch.inference_mode():
        for _ in range(calls):
            x = torch.randn(256, 512, device="cuda")
            got, expected = compiled(x), reference(x)
            torch.cuda.synchronize()
            assert torch.equal(got, expected)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and bcg.stats(compiled).replays == calls - 1
    return program.plan


def summary(plan: bcg.Plan) -> tuple[int, tuple[str, ...]]:
    return next((p.changes, p.notes) for p in plan.passes if p.name == "join_side_streams")


@pytest.mark.parametrize("order", ["waits", "events"])
def test_fork_and_join_are_captured_in_one_segment(order: str) -> None:
    plan = check(Layers(order))
    assert summary(plan) == (4, ()) and not plan.reasons()
    assert [step.kind for step in plan.steps] == ["segment"]
    assert any(node.mode.stream for step in plan.steps for node in step.nodes)


def test_the_join_stands_before_a_break() -> None:
    plan = check(Layers("break"))
    assert summary(plan) == (4, ()) and dict(plan.reasons()) == {"a2a_moe": 4}
    assert [step.kind for step in plan.steps] == ["segment", "break"] * 4 + ["segment"]


def test_memory_that_both_streams_use_is_not_given_away_between_them() -> None:
    """The side stream is kept busy while the caller's goes on to allocate: what it has not read yet must stay.

    Eager code would have to call ``h.record_stream(side)``; its own result, on one stream, is what is compared.
    """

    def products(h: Tensor) -> Tensor:
        return h @ h.mT @ h @ h.mT @ h * 1e-9 + h

    def cosines(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 2).cos()
        return x

    def on_one_stream(x: Tensor) -> Tensor:
        for _ in range(8):
            x = (cosines(x.clone()) + products(x + 1)).tanh()
        return x

    def fn(x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        for _ in range(8):
            h = x + 1
            side.wait_stream(current)  # type: ignore[union-attr]
            with torch.cuda.stream(side):
                slow = products(h)
            del h
            fast = cosines(x.clone())
            current.wait_stream(side)  # type: ignore[arg-type]
            x = (fast + slow).tanh()
        return x

    plan = check(fn, calls=12, reference=on_one_stream)
    assert summary(plan) == (8, ()) and len(plan.steps) == 1


def test_a_ladder_of_buckets_and_a_second_model_share_the_streams() -> None:
    bcg.reset()
    models = [Layers("waits", 2), Layers("events", 2)]
    options = {"dual_stream": True, "segment_compiler": "eager", "ladder": [64, 256], "assume_rows_independent": True}
    compiled = [torch.compile(model, backend="bcg", options=options, dynamic=True) for model in models]
    with torch.inference_mode():
        for rows in (50, 64, 200, 256, 33, 129):
            for model, run in zip(models, compiled, strict=True):
                x = torch.randn(rows, 512, device="cuda")
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(bcg.stats(run).replays >= 4 for run in compiled)
