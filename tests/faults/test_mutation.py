"""Writes in place, by breaks and between them: into arguments, intermediates, and views of either."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


def cases(name: str, named: dict[str, Any]) -> Any:
    """Parametrise a test over named cases."""
    return pytest.mark.parametrize(name, list(named.values()), ids=list(named))


#: From a tensor of shape [4, 6] to a part of its memory.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda t: t,
    "row": lambda t: t[1],
    "column": lambda t: t[:, 1],
    "rows": lambda t: t[1:3],
    "every_other_column": lambda t: t[:, ::2],
    "window": lambda t: t[1:3, 2:5],
    "transposed": lambda t: t.t(),
    "flat": lambda t: t.view(-1),
    "diagonal": lambda t: t.diagonal(),
    "one_element": lambda t: t[2, 3],
    "unsqueezed": lambda t: t.unsqueeze(1),
    "split_part": lambda t: t.split(2, 1)[1],
    "strided": lambda t: t.as_strided((3, 2), (7, 2), 1),
    "view_of_a_view": lambda t: t[1:].t()[2:5, 1],
    "narrow": lambda t: t.narrow(0, 1, 2),
    "zero_rows": lambda t: t[2:2],
}


@cases("view", VIEWS)
@ONE_FORM
@pytest.mark.parametrize("of", ["argument", "intermediate"])
def test_break_writes_through_a_view(
    check: Any, breaks: SimpleNamespace, rand: Any, view: Callable[[Tensor], Tensor], of: str
) -> None:
    """A break wrote into a view; a later segment, or the caller, did not see it (pytorch/pytorch#163129)."""

    def program(x: Tensor) -> Any:
        t = x if of == "argument" else x + 1
        before = t.cos()
        taken_before = view(t)
        breaks.scale_(view(t))
        between = t.sin()
        breaks.scale_(taken_before)
        return before + 1, between + t, view(t) * 2, taken_before.sin()

    check(program, [(rand(4, 6),) for _ in range(2)])


@cases("view", {name: VIEWS[name] for name in ("row", "column", "window", "strided", "transposed")})
@ONE_FORM
@pytest.mark.parametrize("layout", ["transposed", "window", "expanded_base"])
def test_break_writes_through_a_view_of_an_argument_that_is_not_contiguous(
    check: Any, breaks: SimpleNamespace, rand: Any, view: Callable[[Tensor], Tensor], layout: str
) -> None:
    """As above; the memory around the argument is compared, too (pytorch/pytorch#131192)."""
    made: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "transposed": (rand(6, 4), lambda home: home.t()),
        "window": (rand(9, 20), lambda home: home[3:7, 2:14:2]),
        "expanded_base": (rand(60), lambda home: home.as_strided((4, 6), (9, 2), 5)),
    }
    home, window = made[layout]

    def program(x: Tensor) -> Any:
        breaks.scale_(view(x))
        return x.sin() + 1, view(x).cos()

    check(program, [lambda: (window(home.clone()),)] * 2)


def _fold(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    t = x + 1
    b.fold_(acc, t)
    b.fold_(bank[1], acc)
    return t * 2 + acc, bank.sum(0)


def _prepared_output(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    out = torch.empty_like(x)
    b.write_(x.sin(), out)
    return out.cos() + acc


def _rows_of_a_prepared_output(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    out = torch.zeros_like(bank)
    for index in range(out.shape[0]):
        b.write_(bank[index].sin() + x, out[index])
    return out.cos(), out


def _overlapping_views(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    low, high = bank[:2], bank[1:]
    b.scale_(low)
    read = high.sin()
    b.scale_(high)
    return read + low, bank * 2


def _two_parts_of_one(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    b.fold_(bank[0], bank[2])
    read = bank[2].cos()
    b.fold_(bank[1], bank[0])
    return read + 1, bank + 0


def _read_between_joined_breaks(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    first = b.wall(x)
    b.scale_(acc)
    read = acc.sin()
    b.scale_(acc)
    second = b.wall(x)
    return read + first, second + acc


def _written_by_segment_between_breaks(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    first = b.wall(acc)
    acc.add_(1)
    second = b.wall(acc)
    acc.mul_(2)
    return first + second, acc.sin()


def _copy_taken_before(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    old = acc.clone()
    b.fold_(acc, x.clone())
    older = old.clone()
    b.scale_(old)
    return older + acc, old


def _base_written_view_taken_two_breaks_ago(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    row = bank[2]
    h = b.wall(x.sin())
    g = b.wall(h.cos())
    b.scale_(bank)
    return row.sin() + g


def _swapped_through_copies(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    spare = b.wall(x)
    x.copy_(acc)
    acc.copy_(spare)
    return b.wall(x) - b.wall(acc)


def _accumulated_over_breaks(b: SimpleNamespace, x: Tensor, acc: Tensor, bank: Tensor) -> Any:
    for index in range(bank.shape[0]):
        acc.add_(b.wall(bank[index].sin()))
        bank[index] = acc
    return acc * 2


@cases(
    "body",
    {
        f.__name__[1:]: f
        for f in (
            *(_fold, _prepared_output, _rows_of_a_prepared_output, _overlapping_views, _two_parts_of_one),
            *(_read_between_joined_breaks, _written_by_segment_between_breaks, _copy_taken_before),
            *(_base_written_view_taken_two_breaks_ago, _swapped_through_copies, _accumulated_over_breaks),
        )
    },
)
def test_each_read_sees_the_writes_before_it_and_none_after(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any]
) -> None:
    """Pieces were ordered by their data only: a write was seen too early, too late, or not (pytorch/pytorch#163129)."""
    check(lambda x, acc, bank: body(breaks, x, acc, bank), [(rand(4, 6), rand(4, 6), rand(3, 4, 6)) for _ in range(2)])


#: Writes in place that torch offers, into ``x`` of shape [4, 6].
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "augmented": lambda x: x.__iadd__(x.sin()),
    "fill_": lambda x: x[1].fill_(5),
    "zero_": lambda x: x[:, 2].zero_(),
    "setitem": lambda x: x.__setitem__(2, 7.0),
    "setitem_slice": lambda x: x.__setitem__((slice(None), slice(1, 5, 2)), x[:, :2].sin()),
    "setitem_mask": lambda x: x.__setitem__(x > 0, 0.5),
    "setitem_indices": lambda x: x.__setitem__(torch.tensor([0, 3], device=x.device), 2.0),
    "copy_": lambda x: x[0].copy_(x[1]),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([2, 0], device=x.device), x[:2].cos()),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1, 1], device=x.device), x[:2].cos()),
    "scatter_": lambda x: x.scatter_(1, torch.zeros_like(x[:, :1], dtype=torch.long), 4.0),
    "masked_fill_": lambda x: x.masked_fill_(x < 0, 1.0),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "relu_inplace": lambda x: torch.nn.functional.relu(x, inplace=True),
    "out": lambda x: torch.add(x, 1, out=x),
    "out_view": lambda x: torch.mul(x[0], 2, out=x[3]),
    "detached": lambda x: x.detach().add_(1),
    "through_data": lambda x: x.data.mul_(2),
    "through_view": lambda x: x.view(-1)[3:9].sub_(1),
    "foreach": lambda x: torch._foreach_add_([x[0], x[2]], 1.0),
    "addmm_": lambda x: x.addmm_(torch.ones(4, 2, device=x.device), torch.ones(2, 6, device=x.device)),
}


@cases("write", WRITES)
@ONE_FORM
@pytest.mark.parametrize("of", ["argument", "intermediate"])
def test_write_between_breaks_stays_between_them(
    check: Any, breaks: SimpleNamespace, rand: Any, write: Callable[[Tensor], Any], of: str
) -> None:
    """Every way to write in place is a write: the break before it reads the old values, the break after it the new
    ones (pytorch/pytorch#131192).
    """

    def program(x: Tensor) -> Any:
        t = x if of == "argument" else x * 1.5
        row = t[1]
        before = breaks.wall(t)
        write(t)
        after = breaks.wall(t)
        return before.sin() + after, row + 1, t

    check(program, [(rand(4, 6),) for _ in range(2)])


@ONE_FORM
@cases(
    "reshape",
    {
        "unsqueeze_": lambda x: x.unsqueeze_(0),
        "t_": lambda x: x.t_(),
        "transpose_": lambda x: x.transpose_(0, 1),
        "squeeze_": lambda x: x.unsqueeze(0).squeeze_(0),
        "swap_again": lambda x: x.t_().add_(1).t_(),
    },
)
def test_shape_changed_in_place_is_seen_by_what_comes_after(
    check: Any, breaks: SimpleNamespace, rand: Any, reshape: Callable[[Tensor], Any]
) -> None:
    """A trace leaves each value in its last state; earlier readers took that for theirs (pytorch/pytorch#163129)."""

    def program(x: Tensor) -> Any:
        t = x * 2
        before = breaks.wall(t).sin()
        reshape(t)
        return before, breaks.wall(t).cos(), t

    check(program, [(rand(4, 6),) for _ in range(2)])


@ONE_FORM
@cases(
    "reshape",
    {
        "t_": lambda t: t.t_(),
        "unsqueeze_": lambda t: t.unsqueeze_(1),
        "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(0),
        "twice": lambda t: t.t_().unsqueeze_(0),
        "of_a_view": lambda t: t[1:].t_(),
    },
)
def test_shape_changed_in_place_within_a_segment(
    check: Any, breaks: SimpleNamespace, rand: Any, reshape: Callable[[Tensor], Any]
) -> None:
    """The emulated device replayed an operation onto the tensor that it had made at capture, in the shape that a later
    operation had given it: sizes that do not match, or values in the wrong order.
    """

    def program(x: Tensor) -> Any:
        t = breaks.wall(x) * 2
        t.add_(x)
        return reshape(t) * 3, t + 1

    check(program, [(rand(4, 6),) for _ in range(2)])


@ONE_FORM
@cases(
    "replace",
    {
        "made_here": lambda x, y: setattr(x, "data", y * 2),
        "argument": lambda x, y: setattr(x, "data", y),
        "view": lambda x, y: setattr(x, "data", y[:, :3].t()),
        "then_written": lambda x, y: (setattr(x, "data", y), x.add_(1)),
    },
)
@pytest.mark.parametrize("broken", [False, True], ids=["one_segment", "between_breaks"])
def test_storage_replaced_in_the_graph(
    check: Any, breaks: SimpleNamespace, rand: Any, replace: Callable[[Tensor, Tensor], Any], broken: bool
) -> None:
    """``x.data = y`` sets an address on the host. It was captured, and a replay left the caller's tensor as it was.

    Dynamo writes ``set_`` up to torch 2.13 and ``shallow_copy_data_`` since.
    """
    wall = breaks.wall if broken else torch.abs

    def program(x: Tensor, y: Tensor) -> Any:
        before = wall(x).sin()
        replace(x, y)
        return before.sum() + wall(x).cos(), y + 1

    check(program, [(rand(4, 6), rand(4, 6)) for _ in range(2)])
