"""The generated text: names, constants, memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.lower.emit import Namespace


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    bcg.reset()


def source(fn: Callable[..., Any], *args: Any) -> str:
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0)
    return bcg.programs_of(compiled)[0].source


def test_an_op_named_like_a_builtin_does_not_hide_it() -> None:
    """``torch.ops.aten.slice`` was bound as ``slice``, and an index ``[..., -2:]`` then called it."""
    text = source(lambda x: torch.ops.aten.slice(x, 0, 1, 3)[..., -2:] + max(x.shape), torch.randn(4, 4))
    assert "slice(-2, None, None)" in text


def test_equal_names_of_different_objects_stay_apart() -> None:
    names = Namespace()
    assert (names.bind(torch.add, "add"), names.bind(torch.sub, "add"), names.bind(torch.add, "add")) == (
        "add",
        "add_2",
        "add",
    )


@pytest.mark.parametrize("hint", ["v3", "segment_1", "program", "make", "lambda", "2d", "slice", "None"])
def test_no_bound_name_is_one_of_the_texts_own(hint: str) -> None:
    assert Namespace().bind(object(), hint) != hint


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1,), "(1,)"),
        ([1, (2.5, "a'b")], '[1, (2.5, "a\'b")]'),
        ({"k": None, "e": ...}, "{'k': None, 'e': Ellipsis}"),
        (slice(1, None, 2), "slice(1, None, 2)"),
        (torch.Size([2, 3]), "(2, 3)"),
        (float("inf"), "float"),
        (float("nan"), "float"),
        (torch.float32, "float32"),
        (Pair(1, 2), "Pair(1, 2)"),
    ],
)
def test_constants_as_expressions(value: Any, text: str) -> None:
    names = Namespace()
    written = names.expression(value, str)
    assert written.lstrip("_") == text
    made = eval(written, {**names.objects, "__builtins__": __builtins__})
    assert made == value or value != value or isinstance(value, float)


def test_intermediate_values_are_freed_after_their_last_use() -> None:
    def fn(x: Tensor) -> Tensor:
        a = x.sin()
        b = a + x
        return b.cos() * 2

    lines = [line.strip() for line in source(fn, torch.randn(3)).splitlines()]
    first_use_over = next(i for i, line in enumerate(lines) if line.startswith("del v1"))
    assert any("cos" in line for line in lines[first_use_over:])


def test_a_mode_is_a_with_block() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        return y.float() + x

    text = source(fn, torch.randn(3, 3))
    assert "with mode_" in text and "_enter_autocast" not in text
