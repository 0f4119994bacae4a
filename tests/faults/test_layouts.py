"""Strides: of arguments, of results, and the memory around a strided window."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)

#: From 192 numbers to a tensor of shape [6, 8].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda home: home[:48].view(6, 8),
    "offset": lambda home: home[7:55].view(6, 8),
    "columns": lambda home: home.view(12, 16)[:6, ::2],
    "rows": lambda home: home.view(12, 16)[::2, 4:12],
    "transposed": lambda home: home[:48].view(8, 6).t(),
    "expanded_rows": lambda home: home[:8].expand(6, 8),
    "expanded_columns": lambda home: home[:6, None].expand(6, 8),
    "self_overlapping": lambda home: home.as_strided((6, 8), (3, 1), 5),
    "of_one_element": lambda home: home[:1].expand(6, 8),
}


def _results(b: SimpleNamespace, x: Tensor) -> Any:
    h = b.wall(x)
    return h, x * 2, (x.sum(1), x.transpose(0, 1) + 0, h.t().cos(), x.clone(), x.contiguous() + 1, x.reshape(-1) * 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@ONE_FORM
def test_results_have_the_strides_of_eager(check: Any, breaks: SimpleNamespace, rand: Any, layout: str) -> None:
    """A static buffer lost the strides of the argument: values were copied in part, results had another layout
    (pytorch/torchdynamo#601). ``Pair`` compares the strides of every result.
    """
    home = rand(192)
    check(lambda x: _results(breaks, x), [lambda: (LAYOUTS[layout](home.clone()),)] * 2)


@pytest.mark.parametrize("first", ["contiguous", "transposed", "self_overlapping"])
@pytest.mark.parametrize("breaks", ["custom_op", "eager_break"], indirect=True)
def test_strides_may_change_from_call_to_call(check: Any, breaks: SimpleNamespace, rand: Any, first: str) -> None:
    """As above, for one function that sees several layouts of one shape (pytorch/torchdynamo#601)."""
    home = rand(192)
    order = [first, "columns", "expanded_rows", "contiguous", "offset"]
    check(lambda x: _results(breaks, x), [lambda name=name: (LAYOUTS[name](home.clone()),) for name in order])


WRITABLE = ("contiguous", "offset", "columns", "rows", "transposed")


@pytest.mark.parametrize("layout", WRITABLE)
@ONE_FORM
def test_write_into_a_window_leaves_the_memory_around_it(
    check: Any, breaks: SimpleNamespace, rand: Any, layout: str
) -> None:
    """Writing back a whole buffer destroyed what lay between the elements of a window (pytorch/torchdynamo#601).
    ``Pair`` compares the memory around every argument.
    """
    home = rand(192)

    def program(window: Tensor, x: Tensor) -> Any:
        window.mul_(0.5).add_(x)
        breaks.scale_(window)
        breaks.write_(x[1:3].sin(), window[1:3])
        window[4] = 9.0
        return window.sum(0), window

    check(program, [lambda: (LAYOUTS[layout](home.clone()), home[96:144].view(6, 8).clone())] * 2)


@ONE_FORM
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: t.contiguous(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), id="permuted"),
        pytest.param(lambda t: t.permute(3, 1, 0, 2), id="all_dimensions_permuted"),
        pytest.param(lambda t: t[:, :1], id="one_channel"),
        pytest.param(lambda t: t[:, :, ::2, 1:], id="window"),
        pytest.param(lambda t: t[:1].expand(3, -1, -1, -1), id="expanded"),
    ],
)
def test_layouts_of_images(check: Any, breaks: SimpleNamespace, rand: Any, make: Callable[[Tensor], Tensor]) -> None:
    """Layouts of four dimensions, through operations that keep them (pytorch/torchdynamo#601)."""
    home = rand(2, 3, 4, 4)

    def program(x: Tensor) -> Any:
        h = breaks.wall(x.relu())
        pooled = torch.nn.functional.avg_pool2d(h, 2)
        return h + 1, pooled, breaks.mix(pooled), x.flatten(2), torch.empty_like(x).copy_(h)

    check(program, [lambda: (make(home.clone()),)] * 2)


@ONE_FORM
@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1), (0, 3), (3, 0), (2, 0, 4), (1, 5), (5, 1)], ids=str)
def test_small_and_empty_shapes(check: Any, breaks: SimpleNamespace, rand: Any, shape: tuple[int, ...]) -> None:
    """Shapes without elements or dimensions, as arguments, results and written windows (pytorch/torchdynamo#601)."""

    def program(x: Tensor) -> Any:
        h = breaks.wall(x.sin())
        breaks.scale_(x)
        return h + x, breaks.mix(x), x.sum(), x.flatten(), x.unsqueeze(0).expand(2, *shape)

    check(program, [(rand(*shape),) for _ in range(2)])


@ONE_FORM
def test_strides_of_dimensions_of_size_one_are_kept(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Strides that no element tells, but that views and kernels read (pytorch/torchdynamo#601)."""
    home = rand(40)

    def program(x: Tensor) -> Any:
        return breaks.wall(x), x * 2, x.t() + 0, torch.empty_like(x).fill_(1)

    calls = [lambda s=strides: (home.clone().as_strided((1, 6), s, 2),) for strides in ((6, 1), (1, 1), (17, 3))]
    check(program, calls)


@ONE_FORM
def test_layout_made_between_breaks_reaches_the_next(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Intermediates that are not contiguous cross a break as they are (pytorch/torchdynamo#601)."""

    def program(x: Tensor) -> Any:
        turned = (x * 2).t()
        spread = turned[:, None].expand(-1, 2, -1)
        h = breaks.wall(turned)
        breaks.write_(x, turned.t())
        return h.cos() + spread[:, 1], turned, spread, breaks.wall(spread)

    check(program, [(rand(4, 6),), (rand(3, 5),)])
