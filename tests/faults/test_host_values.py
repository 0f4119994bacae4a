"""Tensors on the CPU in the middle of device code: scalars, tables, constants made on the spot.

Where the device is the CPU itself these show a frozen value; on a GPU they show the illegal copy, too.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

WAYS = ("captured",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


@pytest.fixture(autouse=True)
def _on_the_host(_clean: None) -> Iterator[None]:
    with torch.device("cpu"):
        yield


Body = Callable[[SimpleNamespace, Tensor, Tensor, Tensor], Any]


def _scalar_operand(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    return b.wall(x / scalar).sin() + scalar, x * scalar


def _scalar_comparison(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    return torch.where(b.wall(x) > scalar, x, scalar), x.pow(scalar.abs())


def _scalar_arithmetic_on_the_host(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    half = scalar * 0.5 + 1
    return b.wall(x * half).cos() - half, half, scalar * 2


def _table_moved_over(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    return b.wall(x) * table.to(x.device) + 1, table + 1


def _constant(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    y = x + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)
    return b.wall(y).sin() + torch.tensor(2.5), torch.as_tensor([3, 4])


def _constant_written(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    made = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made.add_(scalar)
    made[1] = 9.0
    return b.wall(x + made.to(x.device)).sin(), made


def _arange(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    rows = torch.arange(x.shape[0]).to(x.device).unsqueeze(1)
    return b.wall(x + rows).cos() + rows


def _scalar_written(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    scalar.mul_(2)
    h = b.wall(x * scalar)
    scalar.add_(1)
    table[0] = scalar
    return h.sin() * scalar


def _written_by_a_break(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    b.scale_(scalar)
    h = x * scalar
    b.scale_(table)
    return h + table.to(x.device).sum(), scalar


def _result_on_the_host(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    return b.wall(x).sum().cpu() + scalar, x.sin().to("cpu"), table.sum()


def _index_from_the_host(b: SimpleNamespace, x: Tensor, scalar: Tensor, table: Tensor) -> Any:
    order = table.argsort()
    return b.wall(x)[:, order.to(x.device)].sin(), x[:, order] + 1


BODIES: list[Body] = [
    *(_scalar_operand, _scalar_comparison, _scalar_arithmetic_on_the_host, _table_moved_over, _constant),
    *(_constant_written, _arange, _scalar_written, _written_by_a_break, _result_on_the_host, _index_from_the_host),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("breaks", ["custom_op", "eager_break"], indirect=True)
def test_values_of_the_host_are_those_of_this_call(check: Any, breaks: SimpleNamespace, rand: Any, body: Body) -> None:
    """A scalar or a table on the CPU met captured code: its value was frozen (pytorch/pytorch#175425)."""
    calls = [(rand(n, 4), torch.tensor(s), torch.tensor([s, 1.0, -s, 2.0])) for n, s in ((4, 1.0), (4, 2.5), (6, -0.5))]
    check(lambda x, scalar, table: body(breaks, x, scalar, table), calls)


@ONE_FORM
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool], ids=str)
def test_scalars_of_other_dtypes_promote_as_in_eager(
    check: Any, breaks: SimpleNamespace, rand: Any, dtype: torch.dtype
) -> None:
    """A 0-dim tensor does not promote as others do: a slot for it must stay 0-dim (pytorch/pytorch#130712)."""

    def program(x: Tensor, scalar: Tensor) -> Any:
        return breaks.wall(x * scalar) + scalar, scalar * 2, scalar.view(1) * x

    check(program, [(rand(4), torch.tensor(value, dtype=dtype, device=DEVICE)) for value in (0.0, 2.0, 3.0)])


class _Holds(nn.Module):
    """Holds a scalar as a plain tensor attribute, as learning rates and temperatures are held."""

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.temperature = torch.tensor(1.0)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        return self.breaks.wall(x / self.temperature).softmax(-1) * self.temperature


@ONE_FORM
@pytest.mark.parametrize("replaced", [True, False])
def test_scalar_held_by_a_module_may_change(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, replaced: bool
) -> None:
    """Written in place or replaced between calls, its new value counts (pytorch/pytorch#172942)."""
    pair = compile_pair(_Holds(breaks))

    def change(module: Any, value: float) -> None:
        if replaced:
            old, module.temperature = module.temperature, torch.tensor(value)
            old.fill_(float("nan"))
        else:
            module.temperature.fill_(value)

    for value in (1.0, 0.5, 8.0):
        pair.both(lambda module, value=value: change(module, value))
        pair(rand(2, 4))
        pair(rand(2, 4))
