"""Sizes: symbols that cross pieces, in any order, with arithmetic, and sizes that only the data tells."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

WAYS = ("captured",)

Body = Callable[..., Any]


def _reverse_order(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    n = ids.shape[0]
    h = b.wall(ids.float()[:, None].expand(n, 8).sin())
    h = b.wall(h + torch.arange(n, device=h.device)[:, None] / n)
    h = torch.where(keep[:, None], h, torch.zeros_like(h)) * gate
    return b.wall(h.reshape(n // 2, 16)).view(n // 2, 2, 8).flip(1), n, n // 2 + 1


def _returned(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    h = b.wall(gate.sin())
    return h.shape, h.shape[0], h.numel(), h.size(1), len(ids), h + 1, ids.shape[0] * 3 - 1


def _arithmetic(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    n = gate.shape[0]
    h = b.wall(gate.sin()).repeat(3, 1)[n // 2 : 2 * n + 1]
    h = b.wall(h) * (1 / n) + n**2 % 7
    return torch.nn.functional.pad(h, (0, 1, n // 2, 0)), -n, (n + 1) // 3


def _only_its_size_is_used(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    h = b.wall(torch.ones(ids.shape[0], 2, device=ids.device))
    return b.wall(h.cumsum(0)) + keep.shape[0]


def _late_use(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    n = keep.shape[0]
    h = b.wall(torch.ones(4, 8, device=gate.device))
    h = b.wall(h.cos())
    h = b.wall(h.sin())
    return h.sum() * torch.full((n,), n, device=gate.device)


def _size_to_a_break(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    n = gate.shape[0]
    wide = gate.expand(n, 5).contiguous()
    return b.turn(wide, n, float(n) / 2, [2, 1]).sin() + b.turn(wide, n // 3, 0.5, [1]).cos()


def _size_of_a_break_s_result(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    parts = b.three(gate.expand(-1, 3).contiguous())
    m = parts[2].shape[0]
    return b.wall(parts[0].sin()).view(m * 3), torch.arange(m, device=gate.device)


def _shape_decides(b: SimpleNamespace, gate: Tensor, keep: Tensor, ids: Tensor) -> Any:
    h = b.wall(gate.sin())
    return h + 1 if h.shape[0] > 11 else b.wall(h).cos() * h.shape[0]


BODIES: list[Body] = [
    *(_reverse_order, _returned, _arithmetic, _only_its_size_is_used, _late_use, _size_to_a_break),
    *(_size_of_a_break_s_result, _shape_decides),
]
LENGTHS = (6, 10, 12, 4)


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize(
    ("breaks", "dynamic"),
    [("custom_op", None), ("custom_op", True), ("eager_break", None)],
    indirect=["breaks"],
)
def test_sizes_cross_breaks(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any, body: Body, dynamic: bool | None
) -> None:
    """A symbolic size that several pieces use was lost, or bound to the wrong argument (pytorch/pytorch#155220)."""
    calls = [(rand(n, 1), rand(n) > 0, ints(*range(n))) for n in LENGTHS]
    check(lambda gate, keep, ids: body(breaks, gate, keep, ids), calls, dynamic=dynamic)


@pytest.mark.parametrize("body", BODIES[:3], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("breaks", ["eager_break"], indirect=True)
def test_static_sizes_compile_for_each_length(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any, body: Body
) -> None:
    """The same without symbols: one program a length, each with its own sizes (pytorch/pytorch#155220)."""
    calls = [(rand(n, 1), rand(n) > 0, ints(*range(n))) for n in LENGTHS[:3]]
    check(lambda gate, keep, ids: body(breaks, gate, keep, ids), calls, dynamic=False)


@pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)
@pytest.mark.parametrize(
    "mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic], ids=lambda f: f.__name__
)
def test_marked_dimensions_cross_breaks(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any, mark: Callable[..., None]
) -> None:
    """The same where the caller marks the dimension, in one compile (pytorch/pytorch#155220)."""
    base = [(rand(n, 1), rand(n) > 0, ints(*range(n))) for n in LENGTHS]

    def marked(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        copies = tuple(t.clone() for t in tensors)
        for copied in copies:
            mark(copied, 0)
        return copies

    check(lambda *args: _reverse_order(breaks, *args), [lambda tensors=tensors: marked(tensors) for tensors in base])


@pytest.mark.parametrize(("breaks", "dynamic"), [("custom_op", None), ("eager_break", True)], indirect=["breaks"])
def test_equal_and_unequal_dimensions(check: Any, breaks: SimpleNamespace, rand: Any, dynamic: bool | None) -> None:
    """Dimensions that are equal when compiled share one symbol; later they differ, and are equal in another way
    (Lightning-AI/lightning-thunder#1343).
    """

    def program(x: Tensor, y: Tensor) -> Any:
        a = breaks.wall(x.sin())
        c = breaks.wall(y.cos()).t()
        return a @ torch.ones(x.shape[1], y.shape[0], device=x.device) + c.sum(), c, x.shape[0] + y.shape[1], y.shape

    shapes = [((6, 6), (6, 6)), ((6, 8), (8, 6)), ((5, 7), (9, 3)), ((4, 4), (4, 9))]
    check(program, [(rand(*a), rand(*c)) for a, c in shapes], dynamic=dynamic)


@pytest.mark.parametrize("body", BODIES[1:], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("lengths", [(2, 1, 0, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)
def test_lengths_zero_and_one(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any, body: Body, lengths: tuple[int, ...]
) -> None:
    """Nothing to compute, and sizes that are compiled as constants (Lightning-AI/lightning-thunder#2420)."""
    if body in (_arithmetic, _size_to_a_break) and 0 in lengths:
        lengths = tuple(n or 3 for n in lengths)  # they divide by it, or write row 1
    if body is _size_to_a_break:
        lengths = tuple(max(n, 2) for n in lengths)
    calls = [(rand(n, 1), rand(n) > 0, ints(*range(n))) for n in lengths]
    check(lambda gate, keep, ids: body(breaks, gate, keep, ids), calls)


@pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)
def test_strides_and_offsets_may_be_symbols(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """A symbol that is only in the strides or the offset of an argument (pytorch/pytorch#155220)."""
    home = rand(400)

    def program(x: Tensor) -> Any:
        h = breaks.wall(x)
        return h.sin() + x, x.stride(0) + 1

    def window(rows: int, stride: int, offset: int) -> Callable[[], tuple[Tensor]]:
        return lambda: (home.clone().as_strided((rows, 3), (stride, 1), offset),)

    check(program, [window(4, 5, 0), window(4, 7, 3), window(6, 9, 11), window(5, 3, 2)], dynamic=True)


# -- sizes that only the data tells -----------------------------------------------------------------------------------


def _nonzero(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    idx = torch.nonzero(mask).squeeze(1)
    picked = b.wall(x[idx].sin()).relu()
    return torch.zeros_like(x).index_copy(0, idx, picked), picked.sum(-1)


def _where(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    (rows,) = torch.where(mask)
    return x.index_select(0, rows).cos() + 1, b.wall(x).sin()


def _boolean_index(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    picked = x[mask]
    return b.wall(picked * 2).sin(), b.wall(x).cos() + 1


def _masked_select(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    return b.wall(x).masked_select(mask[:, None]).sin() + 1


def _unique(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    values, counts = torch.unique((b.wall(x) * 2).round(), return_counts=True)
    return values * 2, counts + 1


def _repeat_interleave(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    return b.wall(torch.repeat_interleave(x.sin(), mask.long() * 2, dim=0)).cos()


def _masked_write(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    h = b.wall(x)
    h[mask] = x[mask] * 3
    x[mask] += 1
    return h.sin()


def _item_as_operand(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    count = mask.sum().item()
    return b.wall(x.sin() / (count + 1)).cos() + count, x.sum().item()


def _item_as_break_argument(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    count = int(mask.sum())
    return b.turn(x.sin(), count, 0.5, [1, 2]).cos()


def _item_as_size(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    count = int(mask.sum().item())
    torch._check(count >= 0)
    made = b.wall(torch.ones(count, 4, device=x.device))
    return made.cumsum(0) * 2, x.sin() + made.sum()


def _item_as_bound(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    count = int(mask.sum().item())
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return b.wall(x.narrow(0, 0, count)).sin() + 1


def _items_of_a_list(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    first, second = mask[:2].long().tolist()
    return b.wall(x.cos() * first).sin() - second


@torch.library.custom_op("bcgtest::pick", mutates_args=())
def pick(x: Tensor) -> Tensor:
    return x[x > 0]


@pick.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("bcgtest::count", mutates_args=())
def count(x: Tensor) -> int:
    return int((x > 0).sum())


@count.register_fake
def _(x: Tensor) -> Any:
    return torch.library.get_ctx().new_dynamic_size()


def _op_of_unknown_size(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    picked = torch.ops.bcgtest.pick(x.sin())
    return b.wall(picked.cos()) * 2, picked + 1


def _op_that_returns_a_number(b: SimpleNamespace, x: Tensor, mask: Tensor) -> Any:
    found = torch.ops.bcgtest.count(x.sin())
    return b.wall(x) * found + 1, x.new_ones(found).cumsum(0), found


DATA_BODIES: list[Body] = [
    *(_nonzero, _where, _boolean_index, _masked_select, _unique, _repeat_interleave, _masked_write, _item_as_operand),
    *(_item_as_break_argument, _item_as_size, _item_as_bound, _items_of_a_list),
    *(_op_of_unknown_size, _op_that_returns_a_number),
]


@pytest.fixture(params=[False, True], ids=["cut_by_dynamo", "captured"])
def captured(request: pytest.FixtureRequest) -> Any:
    """Whether Dynamo keeps numbers and sizes that it cannot know within the graph."""
    with torch._dynamo.config.patch(
        capture_scalar_outputs=request.param, capture_dynamic_output_shape_ops=request.param
    ):
        yield request.param


@pytest.mark.parametrize("body", DATA_BODIES, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("breaks", ["eager_break"], indirect=True)
def test_size_or_number_read_from_data_is_that_of_this_call(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Body, captured: bool
) -> None:
    """A size or number that the data gives leaked into a captured piece: replay used that of the capture
    (pytorch/pytorch#172728).
    """
    calls = []
    for hot in (3, 5, 0, 1):
        mask = torch.zeros(8, dtype=torch.bool)
        mask[torch.randperm(8)[:hot]] = True
        calls.append((rand(8, 4), mask.to(rand(1).device)))
    check(lambda x, mask: body(breaks, x, mask), calls, fullgraph=False)
