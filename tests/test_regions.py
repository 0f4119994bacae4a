"""Nested compile regions: what is marked to be traced once is captured like the same code without the mark."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.plan import plan_text

region = torch.compiler.nested_compile_region


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def negate(x: Tensor, out: Tensor) -> None:
    torch.neg(x, out=out)


class Layer(nn.Module):
    """A matmul, a counter that is written, and maybe a break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.breaks = breaks
        self.register_buffer("calls", torch.zeros(()))

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        h = self.linear(x)
        if self.breaks:
            out = torch.empty_like(h)
            negate(h, out)
            h = out
        return x + 0.01 * h.sin() * self.calls, h

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute(x)


class Marked(Layer):
    @region
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.compute(x)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], Layer], count: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x
        for layer in self.layers:
            x, h = layer(x)
        return x, h


def opened(rows: int) -> Tensor:
    x = torch.randn(rows, 8)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("ladder", [None, [4, 8]])
def test_marked_layers_give_the_plan_of_unmarked_ones(breaks: bool, ladder: list[int] | None) -> None:
    options = {"capture": "emulated", "ladder": ladder, "max_padding_factor": 4.0, "min_segment_kernels": 1}
    texts = []
    for layer in (Layer, Marked):
        model, same = Model(lambda layer=layer: layer(breaks)), Model(lambda: Layer(breaks))
        compiled: Any = torch.compile(model, backend="bcg", options=options)
        with torch.no_grad():
            for rows in (3, 3, 8, 3, 5):
                x = opened(rows)
                torch.testing.assert_close(compiled(x), same(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(same.named_buffers()))
        stats = bcg.stats(compiled)
        assert stats.eager_runs == {"warm_up": 1 if ladder else 3}
        (program,) = bcg.programs_of(compiled)
        texts.append([line for line in plan_text(program.plan).splitlines() if not line.startswith(("plan", "given"))])
        assert stats.breaks == (12 if breaks else 0)
        bcg.reset()
    steps = [[line.split(":")[0] for line in text if line.startswith("  layers")] for text in texts]
    assert steps[0] == steps[1], "operations belong to the layer that is called, not to the one that was traced"
    assert len(texts[0]) == len(texts[1])


@region
def gate(x: Tensor, by: int) -> Tensor:
    return x * x.shape[0] + by


@region
def gates(x: Tensor) -> Tensor:
    return gate(gate(x, 1), 2).cos()


def test_regions_in_regions_and_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        return gates(x) + gates(x[1:]).sum()

    compiled: Any = torch.compile(fn, backend="bcg", options={"capture": "emulated", "min_segment_kernels": 1})
    with torch.no_grad():
        for rows in (3, 3, 7, 7):
            x = opened(rows)
            torch.testing.assert_close(compiled(x), fn(x))
    assert bcg.stats(compiled).segments == 1 and bcg.stats(compiled).replays == 2


def test_ahead_of_time() -> None:
    model, same = Model(Marked), Model(Layer)
    with torch.no_grad():
        program = bcg.aot_compile(model, (torch.randn(3, 8),), options={"capture": "emulated"})
        for _ in range(3):
            x = torch.randn(3, 8)
            torch.testing.assert_close(program(x), same(x))
    assert bcg.stats(program).segments == 1


@region
def first_rows(x: Tensor, count: Tensor) -> Tensor:
    return x[: count.item()].sum(0) + x  # type: ignore[misc]


def test_numbers_that_a_region_reads_are_those_of_each_call() -> None:
    def fn(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return first_rows(first_rows(x, one), other)

    compiled: Any = torch.compile(fn, backend="bcg", options={"capture": "emulated", "min_segment_kernels": 1})
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for one, other in ((1, 3), (4, 2), (2, 2)):
            given = torch.randn(5, 8), torch.tensor(one), torch.tensor(other)
            torch.testing.assert_close(compiled(*given), fn(*given))


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = scale

    @region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale


class Stack(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(scale) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_numbers_that_layers_hold() -> None:
    """The second value of a scale, which Dynamo opens and then closes again, was read from a number: a crash. What it
    does not close within regions is read at each call.
    """
    compiled: Any = None
    with torch.no_grad():
        for scale in (0.5, 0.25, 0.125):
            model = Stack(scale)
            compiled = torch.compile(model, backend="bcg", options={"capture": "emulated", "min_segment_kernels": 1})
            for _ in range(3):
                x = torch.randn(3, 8)
                want = x
                for layer in model.layers:
                    want = want + layer.linear(want) * layer.scale  # type: ignore[operator]
                torch.testing.assert_close(compiled(x), want)
