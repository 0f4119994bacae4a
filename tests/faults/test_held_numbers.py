"""Two models in one process: what Dynamo has seen of the first one is no fact about the second."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bcg_compiler as bcg
from bcg_compiler.errors import AotError

OPTIONS = {"capture": "emulated", "min_segment_kernels": 1}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        y = self.linear(x)[None]
        return F.scaled_dot_product_attention(y, y, y, scale=self.scale) * factor


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_a_second_model_of_a_class_has_no_break_for_its_scale() -> None:
    """Its numbers were read on the host at each use, as if they were other ones in each call."""
    with torch.no_grad():
        for width in (8, 16, 32):
            model = Model(width)
            compiled: Any = torch.compile(model, backend="bcg", options=OPTIONS)
            before = bcg.counters.snapshot()
            for _ in range(3):
                x = torch.randn(5, width)
                assert torch.equal(compiled(x), model(x))
            after = bcg.counters.snapshot()
            made = (after.graphs - before.graphs, after.breaks - before.breaks, after.replays - before.replays)
            assert made == (1, 0, 2), width


def test_a_number_that_a_model_holds_may_change() -> None:
    model = Model(8)
    compiled: Any = torch.compile(model, backend="bcg", options=OPTIONS)
    with torch.no_grad():
        for scale in (0.5, 0.25, 0.125, 0.25, 0.5):
            model.layers[1].scale = scale  # type: ignore[assignment]
            for _ in range(3):
                x = torch.randn(5, 8)
                assert torch.equal(compiled(x), model(x))
    assert bcg.stats(compiled).breaks == 0


def test_a_number_that_a_caller_gives_stays_open() -> None:
    model = Attention(8)
    compiled: Any = torch.compile(model, backend="bcg", options=OPTIONS)
    with torch.no_grad():
        for factor in (0.5, 0.25, 0.75, 2.0, 3.0, 5.0):
            x = torch.randn(5, 8)
            assert torch.equal(compiled(x, factor), model(x, factor))
    assert bcg.stats(compiled).graphs == 2, "the first number, and all others"


@pytest.mark.parametrize("length", [3, 7])
def test_a_program_ahead_of_time_knows_nothing_of_those_before(length: int) -> None:
    """Its scale was read on the host, and its length was open, which nobody had asked for."""
    with torch.no_grad():
        bcg.aot_compile(Model(8), (torch.randn(5, 8),), options=OPTIONS)
        model = Model(16)
        program = bcg.aot_compile(model, (torch.randn(length, 16),), options=OPTIONS)
        for _ in range(3):
            x = torch.randn(length, 16)
            assert torch.equal(program(x), model(x))
        assert (bcg.stats(program).segments, bcg.stats(program).breaks) == (1, 0)
        with pytest.raises(AotError):
            program(torch.randn(4, 16))


class Held(nn.Module):
    """Numbers in a configuration, as transformers has them, and in a dictionary."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=scale)
        self.more = {"scale": scale}

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, scale=self.config.scale)
        return F.scaled_dot_product_attention(y, y, y, scale=self.more["scale"])


def test_numbers_in_what_a_module_holds_are_constants_too() -> None:
    for scale in (0.5, 0.25):
        model = Held(scale)
        compiled: Any = torch.compile(model, backend="bcg", options=OPTIONS)
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(1, 5, 8)
                assert torch.equal(compiled(x), model(x))
    assert bcg.stats(compiled).breaks == 0


class Blended(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.share + x.cos() * (1 - self.share)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_number_that_goes_on_changing_becomes_open(compiler: str) -> None:
    """Each value was a compile of its own, and with the ninth Dynamo gave the function up, for all its modules; with
    Inductor also where it was open, which a pass of AOTAutograd had Dynamo take back.
    """
    model = Blended(0.0)
    compiled: Any = torch.compile(model, backend="bcg", options={**OPTIONS, "segment_compiler": compiler})
    with torch.no_grad():
        for step in range(20):
            model.share = 1 / (step + 2)
            x = torch.randn(5, 8)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0 if compiler == "eager" else 1e-6)
    stats = bcg.stats(compiled)
    assert stats.graphs < 8 and stats.recompile_limit_hits == 0 and stats.eager_units == {}
    assert stats.reasons["host_number"] and stats.replays > 10
