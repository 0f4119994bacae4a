"""Random numbers: drawn in the order of eager, from the same state, and leaving the same state."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


#: Each draws from the generator; all take and give a tensor of shape [4, 6].
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: x + torch.rand(4, 6, device=x.device),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x + torch.randint(0, 9, (4, 6), device=x.device),
    "randperm": lambda x: x[torch.randperm(4, device=x.device)],
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_all": lambda x: F.dropout(x, 1.0),
    "dropout_inplace": lambda x: F.dropout(x + 0, 0.4, inplace=True),
    "bernoulli": lambda x: x + torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x + torch.empty_like(x).bernoulli_(0.5),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(1, 2),
    "normal_": lambda x: x + torch.empty_like(x).normal_(0, 2),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "multinomial": lambda x: x + torch.multinomial(x.abs() + 0.1, 6, replacement=True),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
}

#: These draw too, though nothing of what they draw shows.
NO_EFFECT: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli_of_nothing": lambda x: x + torch.bernoulli(x, 0.0),
    "bernoulli_in_place_of_nothing": lambda x: x + torch.empty_like(x).bernoulli_(0.0),
    "native_dropout_of_nothing": lambda x: torch.native_dropout(x, 0.0, True)[0],
}


def _around_breaks(b: SimpleNamespace, draw: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    first = b.noise(x)
    drawn = draw(x) + 1
    second = b.noise(drawn)
    return draw(first) + second, draw(x).sin(), b.noise(x)


@pytest.mark.parametrize("draw", list(DRAWS.values()), ids=list(DRAWS))
@ONE_FORM
def test_random_numbers_are_drawn_in_order(
    check: Any, breaks: SimpleNamespace, rand: Any, draw: Callable[[Tensor], Tensor]
) -> None:
    """A draw that moves across a break which draws too gives other numbers; one that is recorded gives the same ones
    again (pytorch/pytorch#103985). ``Pair`` compares the random state after every call.
    """
    check(lambda x: _around_breaks(breaks, draw, x), [(rand(4, 6),) for _ in range(2)])


@pytest.mark.parametrize("draw", NO_EFFECT.values(), ids=NO_EFFECT)
@ONE_FORM
def test_draws_without_effect_keep_their_place(
    check: Any, breaks: SimpleNamespace, rand: Any, draw: Callable[[Tensor], Tensor]
) -> None:
    """With a probability of 0 the numbers are drawn all the same: all later ones shift (pytorch/pytorch#103985)."""
    check(lambda x: _around_breaks(breaks, draw, x), [(rand(4, 6),)])


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("breaks", ["custom_op", "eager_break"], indirect=True)
def test_dropout_of_modules_follows_training(compile_pair: Any, breaks: SimpleNamespace, rand: Any, p: float) -> None:
    """Dropout on, off and of nothing, in layers around breaks (pytorch/pytorch#103985)."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Dropout(p), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(breaks.noise(self.first(x)).sin()) + self.first(x)

    pair = compile_pair(Dropping())
    for training in (True, False, True):
        pair.both(lambda module, training=training: module.train(training))
        pair(rand(4, 6))
        pair(rand(4, 6))


@ONE_FORM
def test_equal_seeds_give_equal_results(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """After ``torch.manual_seed`` a call gives what eager gives, and twice the same; without it, never the same
    (pytorch/pytorch#103985).
    """
    pair = compile_pair(lambda x: _around_breaks(breaks, DRAWS["dropout"], x))
    x = rand(4, 6)
    seen = []
    for seed in (3, 4, 3, 3):
        torch.manual_seed(seed)
        seen.append(pair(x)[0])
    unseeded = [pair(x)[0] for _ in range(3)]
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(unseeded[0], unseeded[1]) and not torch.equal(unseeded[1], unseeded[2])


@ONE_FORM
def test_seed_set_within_the_function(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Setting the state is an effect with a place of its own among the draws (pytorch/pytorch#103985)."""

    def program(x: Tensor) -> Any:
        before = breaks.noise(x)
        drawn = torch.rand_like(x)
        torch.manual_seed(5)
        after = breaks.noise(drawn + 1)
        return before + torch.rand_like(x), drawn, after

    check(program, [(rand(4, 6),) for _ in range(2)], fullgraph=False)


@ONE_FORM
def test_other_draws_between_calls_count(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """The state is the caller's: what is drawn between calls moves it (pytorch/pytorch#103985)."""
    pair = compile_pair(lambda x: breaks.noise(F.dropout(x, 0.5)).sin() + torch.rand(4, device=x.device))
    for n in range(4):
        torch.rand(n)
        pair(rand(4))
