"""Random functions of views, writes, random numbers and breaks: whatever the plan is, results are those of eager."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.runtime import programs_of

#: Each line reads and writes values ``{x}``, ``{y}``; ``{new}`` is a value of its own. All values are 4×4.
LINES = (
    "{new} = torch.relu({x}) + {y}",
    "{new} = {x} * 0.5 - {y}.sum(0)",
    "{new} = {x} + torch.rand(4, 4)",
    "{new} = torch.nn.functional.dropout({x}, 0.5, True)",
    "{new} = torch.vmap(lambda row: row + row.sum())({x})",
    # views, and tuples of views
    "{new} = {x}.t()",
    "{new} = {x}[:, :]",
    "{new} = {x}.split(2)[1].sum(0) + {y}",
    # writes
    "{x}.add_({y} + 1)",
    "{x}[1:3].mul_(0.5)",
    "{x}[2] = {y}[1].clone()",
    "{x}.copy_({y} / 2)",
    # breaks
    "fill({x}, {y})",
    "accumulate({y}, into={x})",
    "draw({x})",
    "{new} = cosine({x})",
    "{new} = halve({x})",
    "{new} = torch.sin({x})",  # by rule
    "{new} = {x} * {y}.sum().item()",
    # a buffer of the module, seen and unseen
    "{new} = self.state * 2 + {x}",
    "self.state.add_({x})",
    "self.grow({x})",
    "self.read_state({x})",
)


@bcg.eager_break(mutates_args=("out",))
def fill(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2 + 1)


@bcg.eager_break(mutates_args=("into",))
def accumulate(x: Tensor, *, into: Tensor) -> None:
    into.copy_(into * 0.5 + x)


@bcg.eager_break(mutates_args=("out",))
def draw(out: Tensor) -> None:
    out.copy_(torch.rand(4, 4))


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@bcg.eager_break(fake=lambda x: x, mutates_args=("x",))
def halve(x: Tensor) -> Tensor:
    return x.mul_(0.5)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(4, 4))

    @bcg.eager_break
    def grow(self, x: Tensor) -> None:
        self.state.mul_(0.5).add_(x)

    @bcg.eager_break(mutates_args=("out",))
    def read_state(self, out: Tensor) -> None:
        out.sub_(self.state)


def program(choose: random.Random) -> type[Base]:
    """A module whose ``forward(a, b, c)`` is a few random lines and returns most of its values."""
    values, lines = ["a", "b", "c", "v"], ["v = torch.sin(a)"]  # a rule must match something
    for _ in range(choose.randrange(6, 20)):
        new, line = f"v{len(values)}", choose.choice(LINES)
        x, y = choose.sample(values, 2)
        lines.append(line.format(x=x, y=y, new=new))
        values += [new] if "{new}" in line else []
    returned = [value for value in values if choose.random() < 0.7]
    text = "\n        ".join([*lines, f"return [{', '.join(returned)}]"])
    scope: dict[str, Any] = {}
    exec(f"class Random(Base):\n    def forward(self, a, b, c):\n        {text}", globals(), scope)
    return scope["Random"]


def separate(memory: Tensor) -> list[Tensor]:
    return [memory[:4].clone(), memory[4:8].clone(), memory[8:].clone()]


def overlapping(memory: Tensor) -> list[Tensor]:
    return [memory[:4], memory[2:6], memory[8:]]


@pytest.mark.parametrize("capture", ["off", "emulated"])
@pytest.mark.parametrize("seed", range(20))
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_random_program_gives_what_eager_gives(seed: int, capture: str) -> None:
    """Called with separate arguments first, then with overlapping ones."""
    choose = random.Random(seed)
    module = program(choose)()
    options = {
        "capture": capture,
        "min_segment_kernels": choose.choice([0, 1, 2, 5]),
        "breaks": [lambda facts: facts.op == "sin"],
    }
    compiled = torch.compile(module, backend="bcg", fullgraph=True, options=options)
    for arguments in (separate, separate, overlapping, separate):
        expected = run(module, module.forward, arguments)
        for value, wanted in zip(run(module, compiled, arguments), expected, strict=True):
            assert torch.equal(value.nan_to_num(), wanted.nan_to_num())
    assert len(programs_of(compiled)) == 1


def run(module: Base, call: Callable[..., list[Tensor]], arguments: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """The results, the arguments, the module's state and a random number drawn after a call."""
    torch.manual_seed(5)
    module.state.copy_(torch.arange(16.0).view(4, 4) / 7)
    given = arguments(torch.randn(12, 4, generator=torch.Generator().manual_seed(3)))
    results = call(*given)
    return [value.clone() for value in (*results, *given, module.state, torch.rand(2))]
