"""What a schema or a declaration says that an operation writes: lists, optional arguments, dictionaries, views."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg

ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


# -- custom ops: what a schema can say --------------------------------------------------------------------------------

_library = torch.library.Library("bcgtest", "FRAGMENT")
_library.define("scaled_alias_(Tensor(a!) x) -> Tensor(a!)")
_library.impl("scaled_alias_", lambda x: x.mul_(2), "CompositeExplicitAutograd")
_library.define("tail(Tensor(a) x) -> Tensor(a)")
_library.impl("tail", lambda x: x[1:], "CompositeExplicitAutograd")


@torch.library.custom_op("bcgtest::add_to_all_", mutates_args=("xs", "y"))
def add_to_all_(xs: list[Tensor], y: Tensor | None = None, *, by: float = 1.0) -> None:
    for x in xs if y is None else [*xs, y]:
        x.add_(by)


@add_to_all_.register_fake
def _(xs: list[Tensor], y: Tensor | None = None, *, by: float = 1.0) -> None:
    return None


def _list_and_optional(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    h = b.wall(x)
    before = y.sin()
    torch.ops.bcgtest.add_to_all_([x, y])
    between = y.cos() + x
    torch.ops.bcgtest.add_to_all_([y], x, by=0.5)
    return h, before + 1, between, x + y


def _written_and_returned(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    t = x + 1
    same = torch.ops.bcgtest.scaled_alias_(t)
    read = t.sin()
    again = torch.ops.bcgtest.scaled_alias_(same)
    return read + 1, t.cos(), again, b.wall(same)


def _view_returned(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    t = b.wall(x)
    tail = torch.ops.bcgtest.tail(t)
    read = tail.sin()
    b.scale_(t)
    return read + 1, tail.cos(), tail


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            _list_and_optional,
            id="list_and_optional",
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.11."), reason="torch 2.11 refuses a written argument with a default"
            ),
        ),
        pytest.param(_written_and_returned, id="written_and_returned"),
        pytest.param(_view_returned, id="view_returned"),
    ],
)
@pytest.mark.parametrize("capturable", [True, False])
@ONE_FORM
def test_schema_of_a_custom_op_tells_what_it_writes_and_returns(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any], capturable: bool
) -> None:
    """Writes into lists and optional arguments; results that are an argument, or a view (pytorch/pytorch#131192)."""
    names = ["bcgtest::add_to_all_", "bcgtest::scaled_alias_", "bcgtest::tail"] if capturable else []
    check(lambda x, y: body(breaks, x, y), [(rand(3, 4), rand(3, 4)) for _ in range(2)], options={"capturable": names})


# -- break functions only: what no schema can say ---------------------------------------------------------------------


@bcg.eager_break(mutates_args=("outs",))
def write_list(x: Tensor, outs: list[Tensor]) -> None:
    for index, out in enumerate(outs):
        out.copy_(x + index)


@bcg.eager_break(mutates_args=("outs",))
def write_dictionary(x: Tensor, outs: dict[str, Tensor]) -> None:
    outs["a"].copy_(x)
    outs["b"].add_(x)


@bcg.eager_break(mutates_args=("outs",))
def write_rest(x: Tensor, *outs: Tensor) -> None:
    for index, out in enumerate(outs):
        out.copy_(x + index)


@bcg.eager_break(mutates_args=("outs",))
def write_keywords(x: Tensor, **outs: Tensor) -> None:
    outs["a"].copy_(x)
    outs["b"].add_(x)


@bcg.eager_break(mutates_args=("out",), fake=lambda x, *, out: out)
def write_and_return(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(-x)


def _into_list(x: Tensor, a: Tensor, b: Tensor) -> None:
    write_list(x, [a, b])


def _into_dictionary(x: Tensor, a: Tensor, b: Tensor) -> None:
    write_dictionary(x, {"a": a, "b": b})


def _into_rest(x: Tensor, a: Tensor, b: Tensor) -> None:
    write_rest(x, a, b)


def _into_keywords(x: Tensor, a: Tensor, b: Tensor) -> None:
    write_keywords(x, a=a, b=b)


def _and_returned(x: Tensor, a: Tensor, b: Tensor) -> None:
    b.add_(write_and_return(x, out=a))


@pytest.mark.parametrize(
    "write",
    [
        _into_list,
        _into_dictionary,
        _into_rest,
        _into_keywords,
        _and_returned,
    ],
    ids=lambda f: f.__name__[1:],
)
@ONE_FORM
def test_break_function_writes_into_containers_of_tensors(
    check: Any, breaks: SimpleNamespace, rand: Any, write: Callable[..., None]
) -> None:
    """Writes into the items of a list, a dictionary, ``*args`` and ``**kwargs`` (pytorch/pytorch#163129)."""
    other = breaks.wall

    def program(x: Tensor, b: Tensor) -> Any:
        a = torch.zeros_like(x)
        before = other(b).sin()
        write(x.cos(), a, b)
        read = a.sin() + b
        write(read, a, b)
        return before, other(read), a, b

    check(program, [(rand(3, 4), rand(3, 4)) for _ in range(2)])
