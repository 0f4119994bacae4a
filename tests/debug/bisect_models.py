"""Models with one fault each, or none."""

from typing import Any

import torch
from torch import Tensor, nn

import bcg_compiler as bcg

#: What an operation reads on the host, and how often inputs were made: the host's state differs from call to call.
FACTOR = [1.0]


@torch.library.custom_op("bisect_models::scale", mutates_args=())
def scale(x: Tensor) -> Tensor:
    """Reads what is no argument."""
    return x * FACTOR[0]


@torch.library.custom_op("bisect_models::sly", mutates_args=())
def sly(x: Tensor, y: Tensor) -> Tensor:
    """Writes what it does not declare."""
    x.add_(1)
    return y * 2


@torch.library.custom_op("bisect_models::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    """Is of another dtype than its fake."""
    return x.double()


scale.register_fake(torch.empty_like)
sly.register_fake(lambda x, y: torch.empty_like(y))
half.register_fake(torch.empty_like)


@bcg.eager_break(fake=torch.empty_like)
def centre(x: Tensor) -> Tensor:
    """Reads padded rows, and says nothing of it."""
    return x - x.mean(1, keepdim=True)


class Right(nn.Module):
    """Embeds, three layers with something between the last two, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def example_inputs(self, length: int) -> dict[str, Any]:
        return {"ids": torch.randint(0, 64, (1, length))}

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for i, layer in enumerate(self.layers):
            h = layer(h).relu() + h
            if i == 1:
                h = self.between(h)
        return self.head(h)


class Host(Right):
    def example_inputs(self, length: int) -> dict[str, Any]:
        FACTOR[0] += 1
        return super().example_inputs(length)

    def between(self, h: Tensor) -> Tensor:
        return torch.ops.bisect_models.scale(h)


class Mean(Right):
    def between(self, h: Tensor) -> Tensor:
        return h - h.mean(1, keepdim=True)


class BreakMean(Right):
    def between(self, h: Tensor) -> Tensor:
        return centre(h)


class Sly(Right):
    def example_inputs(self, length: int) -> dict[str, Any]:
        return {**super().example_inputs(length), "noise": torch.randn(1, length, 16)}

    def forward(self, ids: Tensor, noise: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + torch.ops.bisect_models.sly(noise, h) + noise)


class Sorts(Right):
    """Sorts rows and sorts them back: padded rows stand among live ones, and reach none of them."""

    def between(self, h: Tensor) -> Tensor:
        order = h.sum(-1).argsort(1)
        back = torch.empty_like(order)
        back[0, order[0]] = torch.arange(order.shape[1])
        there = h.gather(1, order[..., None].expand_as(h)).sin()
        return there.gather(1, back[..., None].expand_as(h))


@bcg.eager_break(fake=torch.empty_like, writes_every_row=True)
def sine(x: Tensor) -> Tensor:
    """Works row by row."""
    return x.sin()


@bcg.eager_break(fake=torch.empty_like)
def sine_of_live_rows(x: Tensor) -> Tensor:
    """The same, and padded rows of its result are cleared."""
    return x.sin()


class SortsOverBreak(Right):
    """The same with a break in between: where live rows stand among all rows of a bucket is an input of a segment."""

    body = staticmethod(sine)

    def between(self, h: Tensor) -> Tensor:
        order = h.sum(-1).argsort(1)
        there = self.body(h.gather(1, order[..., None].expand_as(h)))
        return torch.zeros_like(h).scatter(1, order[..., None].expand_as(h), there)


class SortsAndLosesRows(SortsOverBreak):
    """A live row that is sorted behind others is cleared as if it were a padded one."""

    body = staticmethod(sine_of_live_rows)


def wrong_relu(module: torch.fx.GraphModule, fakes: Any) -> Any:
    """A segment compiler that adds a tenth to each relu."""

    class Wrong(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            return result + 0.1 if n.target == "relu" else result

    return Wrong(module).run


_DRAWN = [0]


@torch.library.custom_op("bisect_models::other_each_time", mutates_args=())
def other_each_time(x: Tensor) -> Tensor:
    """Changes what it reads."""
    _DRAWN[0] += 1
    return x * _DRAWN[0]


other_each_time.register_fake(torch.empty_like)


class OtherEachTime(Right):
    def between(self, h: Tensor) -> Tensor:
        return other_each_time(h)
