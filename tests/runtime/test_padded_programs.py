"""Random programs over tokens: padded runs at random lengths are compared with eager code at the exact length.

A program is a text of lines that work row by row, look back, mix rows, call breaks that touch live rows only, or write
buffers and inputs. Whatever the compiler makes of it, each call must give what eager code gives, and leave it behind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bcg_compiler as bcg

#: ``{x}`` and ``{y}`` are values of n×4, ``{new}`` a new one. What is named more often is drawn more often.
LINES = (
    "{new} = {x} * 0.5 + {y}",
    "{new} = {x}.tanh()",
    "{new} = nn.functional.rms_norm({x}, (4,)) - {y}",
    "{new} = ({x} @ self.weight).sigmoid()",
    "{new} = torch.cat(({x}[:, :2], {y}[:, 2:]), 1)",
    "{new} = torch.stack(({x}, {y}), 1).flatten(0, 1).view(-1, 2, 4).sum(1)",
    "{new} = {x} + torch.arange({x}.shape[0]).unsqueeze(1) / 16",
    "{new} = {x} + TABLE[ids]",
    "{new} = torch.cat(({x}[:1], {x}), 0)[: {x}.shape[0]]",
    "{new} = {x}.cumsum(0).tanh()",
    "{new} = attention({x}, {y})",
    "{new} = attention({x}, {y})",
    "{new} = nn.functional.scaled_dot_product_attention({x}[None], {y}[None], {x}[None], is_causal=True)[0]",
    "{new} = torch.where({x} > {y}, {x}, {y} * 0.5)",
    "{new} = {x}.clone(); {new}[:, 1:] *= 0.5",
    "{new} = {x} - {y}.mean(0)",
    "{new} = {x} + {y}[-1]",
    "{new} = fresh({x})",
    "{new} = fresh({x}.tanh())",
    "{new} = torch.empty_like({x}); into({x}, {y}, {new})",
    "{new} = torch.empty({x}.shape[0], 8); into({x}, {y}, {new}[:, :4]); into({y}, {x}, {new}[:, 4:]); "
    "{new} = {new}[:, ::2]",
    "{new}, more = several({x}, {y}); {new} = {new} + more.unsqueeze(1)",
    "{new} = self.attend({x}, self.keys)",
    "{new} = given_back({x}.tanh())",
    "into({x}, {y}, {y})",
    "{x}.mul_(0.5)",
    "{x}.add_({y}.tanh())",
    "self.calls += 1",
    "self.first.mul_(0.5).add_({x}[0])",
    "{new} = {x} + self.first * self.calls",
    "self.mean.mul_(0.5).add_({x}.mean(0))",
)

RETURNS = (
    *("{x}", "{x}", "{x} * 2", "{x}[:, 1:3]", "{x}.t()", "{x}[1:]", "{x}[0]", "{x}.sum(-1)", "self.calls * 1"),
    *("{x}.unsqueeze(1).expand(-1, 2, -1)", "{x}.argmax(-1) * 0", "({x}, {x}[:, :2])", "{x}.bfloat16() * 0", "a"),
)

TABLE = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))


def attention(q: Tensor, k: Tensor) -> Tensor:
    at = torch.arange(q.shape[0])
    scores = (q.tanh() @ k.tanh().t()).masked_fill(at[None, :] > at[:, None], float("-inf"))
    return scores.softmax(-1) @ k


def live() -> int:
    return int(bcg.current_context().live_rows)


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def fresh(x: Tensor) -> Tensor:
    out, n = torch.full_like(x, float("nan")), live()
    out[:n] = x[:n] * 0.5 + 1
    return out


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def into(x: Tensor, y: Tensor, out: Tensor) -> None:
    n = live()
    out[:n] = x[:n] * 0.5 - y[:n] * 0.25


@bcg.eager_break(fake=lambda x, y: (torch.empty_like(x), x.new_empty(x.shape[0])), reads_live_rows=True)
def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out, more, n = torch.full_like(x, float("nan")), torch.full_like(x[:, 0], float("nan")), live()
    out[:n], more[:n] = x[:n] * 0.5, y[:n].sum(-1).tanh()
    return out, more


@bcg.eager_break(fake=lambda x: x, reads_live_rows=True)
def given_back(x: Tensor) -> Tensor:
    return x


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 16, requires_grad=False)
        for name, value in (("keys", torch.zeros(64, 4)), ("first", torch.zeros(4)), ("mean", torch.ones(4))):
            self.register_buffer(name, value)
        self.register_buffer("calls", torch.zeros(()))

    @bcg.eager_break(fake=lambda self, x, keys: torch.empty_like(x), mutates_args=("keys",), reads_live_rows=True)
    def attend(self, x: Tensor, keys: Tensor) -> Tensor:
        out, n = torch.full_like(x, float("nan")), live()
        keys[:n] = keys[:n] * 0.5 + x[:n]
        out[:n] = keys[:n].cumsum(0).tanh()
        return out


@st.composite
def programs(draw: st.DrawFn) -> str:
    """The text of a ``forward``. Values are chosen by their place from the newest back: each line may be left out."""
    values, text = ["a", "b"], ["torch._check(a.shape[0] == b.shape[0])", "torch._check(a.shape[0] == ids.shape[0])"]
    place = st.integers(0, 5)

    def chosen() -> str:
        return values[-1 - draw(place) % len(values)]

    for line in draw(st.lists(st.sampled_from(LINES), min_size=2, max_size=7)):
        new = f"v{len(text)}"
        text.append(line.format(x=chosen(), y=chosen(), new=new))
        values += [new] if "{new}" in line else []
    forms = draw(st.lists(st.sampled_from(RETURNS), min_size=1, max_size=3))
    text.append(f"return [{', '.join(form.format(x=chosen()) for form in forms)}]")
    return "\n".join(["def forward(self, a, b, ids):", *(f"    {line}" for line in text)]) + "\n"


def module_of(text: str) -> Base:
    scope: dict[str, Any] = {}
    exec(text, globals(), scope)
    return type("Random", (Base,), {"forward": scope["forward"]})()


# -- calls ------------------------------------------------------------------------------------------------------------


def separate(n: int, home: Tensor) -> tuple[Tensor, Tensor]:
    return home[:n].clone(), home[40 : 40 + n].clone()


def columns(n: int, home: Tensor) -> tuple[Tensor, Tensor]:
    return home.view(-1, 8)[:n, 1:5], home[40 : 40 + n].clone()


def turned(n: int, home: Tensor) -> tuple[Tensor, Tensor]:
    return home[:n].t().contiguous().t(), home[40 : 40 + n]


def overlapping(n: int, home: Tensor) -> tuple[Tensor, Tensor]:
    return home[:n], home[1 : n + 1]


@dataclass(frozen=True)
class Setup:
    """How a program is compiled and called; before call ``ahead`` all buckets are captured."""

    ladder: tuple[int, ...]
    factor: float
    kernels: int
    slot: Any
    inputs: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    lengths: tuple[int, ...]
    ahead: int


setups = st.builds(
    Setup,
    st.lists(st.sampled_from([8, 4, 16, 24, 32]), min_size=1, max_size=3, unique=True).map(lambda x: tuple(sorted(x))),
    st.sampled_from([8.0, 2.0, 1.3]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from(["zero", 3.0, -100.0]),
    st.sampled_from([separate, separate, columns, turned, overlapping]),
    st.lists(st.integers(2, 34), min_size=4, max_size=6).map(tuple),
    st.sampled_from([9, 9, 1, 3]),
)


def agree(padded: Any, text: str, setup: Setup) -> None:
    torch.manual_seed(5)
    pair = padded(
        module_of(text),
        close=True,
        ladder=list(setup.ladder),
        max_padding_factor=setup.factor,
        min_segment_kernels=setup.kernels,
    )
    for seed, n in enumerate(setup.lengths):
        if seed == setup.ahead and pair.plan.padding is not None and pair.program._admissions is not None:
            bcg.capture(pair.compiled, progress=False)
        generator = torch.Generator().manual_seed(seed)
        home = torch.randn(80, 4, generator=generator)
        pair(*setup.inputs(n, home), torch.randint(0, 16, (n,), generator=generator))


def holds(examples: int, padded: Any) -> None:
    """So many examples agree, and enough of them are padded and replay that it shows something."""
    replays: list[int] = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(), setups)
    def example(text: str, setup: Setup) -> None:
        note(text)
        torch.compiler.reset()
        before = bcg.counters.replays
        agree(padded, text, setup)
        replays.append(bcg.counters.replays - before)

    with torch._dynamo.config.patch(recompile_limit=64):
        example()
    assert sum(count >= 2 for count in replays) > len(replays) / 3, f"too few replays to show anything: {replays}"


def test_random_token_programs_give_what_eager_gives(padded: Any, poisoned: None) -> None:
    holds(20, padded)


@pytest.mark.nightly
def test_many_random_token_programs_give_what_eager_gives(padded: Any, poisoned: None) -> None:
    holds(2000, padded)
