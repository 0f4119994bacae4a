"""Python values that change from call to call: arguments, attributes, globals, elements of containers."""

import enum
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["eager_break"], indirect=True)


class Kind(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Level(enum.IntEnum):
    ONE = 1
    THREE = 3


NUMBERS: dict[str, list[Any]] = {
    "int": [2, 3, 5, -4, 2, 100],
    "int_zero_one": [1, 0, 2, -1, 1],
    "float": [0.5, 2.0, -0.25, 0.5, 1.0],
    "float_special": [math.inf, math.nan, -math.inf, 0.0, -0.0],
    "float_extreme": [1e300, 5e-324, -1e-38, 3.4e38],
    "int_huge": [2**40, -(2**53) - 1, 2**62, 7],
    "bool": [True, False, True],
    "int_float_bool": [1, 1.0, True, 2, 2.0],
}


@pytest.mark.parametrize("values", list(NUMBERS.values()), ids=list(NUMBERS))
@pytest.mark.parametrize("dynamic", [None, True])
@ONE_FORM
def test_number_of_this_call_is_used(
    check: Any, breaks: SimpleNamespace, rand: Any, values: list[Any], dynamic: bool | None
) -> None:
    """A Python number was frozen into the recording, or left out of the key that picks it (pytorch/pytorch#189123)."""

    def program(x: Tensor, k: Any) -> Any:
        h = breaks.wall(x.sin() * k)
        # Where one operand is a number and the other too, arithmetic stays in Python: its result is returned.
        return h + k, torch.full((2,), k, dtype=torch.float64, device=x.device), k, k * 2

    check(program, [(rand(4), k) for k in values], dynamic=dynamic)


@pytest.mark.parametrize(
    ("breaks", "dynamic"),
    [("custom_op", None), ("eager_break", None), ("call_with_break", None), ("eager_break", True)],
    indirect=["breaks"],
)
def test_numbers_given_to_a_break_are_those_of_this_call(
    check: Any, breaks: SimpleNamespace, rand: Any, dynamic: bool | None
) -> None:
    """As above, for the arguments of a break (pytorch/torchtitan#2876)."""
    calls = [(1, 1.0, [1, 2, 3]), (2, 1.0, [1, 2, 3]), (2, 0.5, [3, 2, 1]), (-3, -0.5, [0, 0, 6]), (1, 1.0, [1, 2, 3])]

    def program(x: Tensor, k: int, s: float, lens: list[int]) -> Any:
        h = breaks.turn(x.sin(), k, s, lens)
        return breaks.turn(h.cos(), k - 1, s * 0.5, [n // 2 for n in lens]) + k

    check(program, [(rand(4, 6), k, s, list(lens)) for k, s, lens in calls], dynamic=dynamic)


def _as_scalar(x: Tensor, k: int) -> Any:
    return x.add(x, alpha=k).clamp(-k, k), torch.where(x > 0, x, k)


def _as_size(x: Tensor, k: int) -> Any:
    return x.repeat(k, 1), torch.zeros(k, 2, device=x.device) + 1, x.new_ones(k)


def _as_bound(x: Tensor, k: int) -> Any:
    return x[:k] * 2, x[-k:] + 1, x[:, k // 2], x.narrow(0, 1, k - 1).sin()


def _as_shift(x: Tensor, k: int) -> Any:
    return x.roll(k, 0), x.tril(k - 2), torch.arange(k, 3 * k, k, device=x.device)


def _in_a_branch(x: Tensor, k: int) -> Any:
    return x.sin() if k % 2 else x.cos() * k


def _as_count(x: Tensor, k: int) -> Any:
    for step in range(k):
        x = x.sin() + step
    return x


def _written(x: Tensor, k: int) -> Any:
    x[k - 1] = k
    x[:k].mul_(k)
    return x + 1


@pytest.mark.parametrize(
    "use", [_as_scalar, _as_size, _as_bound, _as_shift, _in_a_branch, _as_count, _written], ids=lambda f: f.__name__[1:]
)
@pytest.mark.parametrize("dynamic", [None, True])
@ONE_FORM
def test_number_may_be_used_in_any_role(
    check: Any, breaks: SimpleNamespace, rand: Any, use: Callable[..., Any], dynamic: bool | None
) -> None:
    """A number as operand, size, bound, shift, branch or count (pytorch/pytorch#189123)."""

    def program(x: Tensor, k: int) -> Any:
        return use(breaks.wall(x), k), use(x, k), breaks.wall(x)

    check(program, [(rand(6, 6), k) for k in (2, 3, 5, 2)], dynamic=dynamic)


VALUES: dict[str, list[Any]] = {
    "str": ["low", "high", "low"],
    "none": [None, "low", None],
    "enum": [Kind.LOW, Kind.HIGH, Kind.LOW],
    "int_enum": [Level.ONE, Level.THREE, Level.ONE],
    "tuple": [(1, 2), (3, 2), (1, 2)],
    "tuple_length": [(1, 2), (1, 2, 3), (1,)],
    "list": [[1.5, 2], [0.5, 2], [1.5, 3]],
    "dict": [{"a": 1, "b": 2.0}, {"a": 3, "b": 2.0}, {"a": 1, "b": 0.5}],
    "nested": [{"a": [1, (2, None)]}, {"a": [1, (3, None)]}, {"a": [1, (2, 4)]}],
    "dtype": [torch.float32, torch.float64, torch.float32],
    "optional_tensor": [None, torch.ones(4, device="cuda" if torch.cuda.is_available() else "cpu"), None],
}


def _number_of(value: Any) -> Any:
    """Something that differs wherever ``value`` does."""
    if isinstance(value, (str, enum.Enum)):
        return 5.0 if value in ("low", Kind.LOW, Level.ONE) else 7.0
    if isinstance(value, (list, tuple)):
        return sum(_number_of(item) * (index + 1) for index, item in enumerate(value))
    if isinstance(value, dict):
        return sum(_number_of(item) for item in value.values())
    if isinstance(value, torch.dtype):
        return 2.0 if value is torch.float32 else 3.0
    return 11.0 if value is None else value


@bcg.eager_break(fake=lambda x, value: torch.empty_like(x))
def scaled(x: Tensor, value: Any) -> Tensor:
    return x * _number_of(value)


@pytest.mark.parametrize("values", list(VALUES.values()), ids=list(VALUES))
@ONE_FORM
def test_value_that_is_no_number_is_that_of_this_call(
    check: Any, breaks: SimpleNamespace, rand: Any, values: list[Any]
) -> None:
    """Strings, enums, ``None`` and containers are part of the key, too (vllm-project/vllm#53366)."""
    check(lambda x, value: (breaks.wall(x.sin()) * _number_of(value)).cos() + x, [(rand(4), v) for v in values])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(raises=AssertionError, reason="a break is given an IntEnum as int"))
        if name == "int_enum"
        else name
        for name in VALUES
    ],
)
def test_value_that_is_no_number_reaches_a_break_as_it_is(check: Any, rand: Any, name: str) -> None:
    """As above, for the arguments of a break: it sees the value and type that eager code gives it
    (vllm-project/vllm#53366).
    """
    check(lambda x, value: scaled(x.sin(), value).cos() + x, [(rand(4), value) for value in VALUES[name]])


# -- numbers that are no arguments ------------------------------------------------------------------------------------


class _Gains(nn.Module):
    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.gain: Any = 1.0
        self.flip = False
        self.mode = Kind.LOW
        self.table: dict[str, Any] = {"bias": 1, "shape": [2, 2]}
        self.inner = nn.Dropout(0.0)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.breaks.wall(x * self.gain) + self.table["bias"]
        h = self.inner(h) * _number_of(self.mode)
        h = scaled(h.view(*self.table["shape"]), self.gain)
        return -h if self.flip else h.cos()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m, n: setattr(m, "gain", (1.0, 3.0, -2.0, 1.0)[n]), id="float"),
        pytest.param(lambda m, n: setattr(m, "gain", (1, 3, -2, 1)[n]), id="int"),
        pytest.param(lambda m, n: setattr(m, "flip", n % 2 == 1), id="bool"),
        pytest.param(lambda m, n: setattr(m, "mode", Kind.HIGH if n % 2 else Kind.LOW), id="enum"),
        pytest.param(lambda m, n: m.table.update(bias=n), id="in_a_dictionary"),
        pytest.param(lambda m, n: m.table["shape"].__setitem__(slice(None), [(4, 1), (2, 2)][n % 2]), id="in_a_list"),
        pytest.param(lambda m, n: setattr(m.inner, "p", (0.0, 1.0, 0.0, 1.0)[n]), id="of_a_submodule"),
        pytest.param(lambda m, n: m.train(n % 2 == 0), id="training"),
    ],
)
@ONE_FORM
def test_attribute_that_changes_between_calls(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, change: Callable[[Any, int], Any]
) -> None:
    """Attributes of modules that callers change were frozen (pytorch/torchtitan#2876)."""
    pair = compile_pair(_Gains(breaks))
    for n in range(4):
        pair.both(lambda module, n=n: change(module, n))
        pair(rand(4))
        pair(rand(4))


SETTING: Any = 1.0


@ONE_FORM
def test_global_and_enclosing_numbers_that_change(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that a function finds outside of itself (pytorch/pytorch#189123)."""
    enclosing = 2

    def program(x: Tensor, *, default: float = 0.5) -> Tensor:
        return breaks.wall(x * SETTING) * enclosing + default

    pair = compile_pair(program)
    for value in (1.0, 2.5, 1.0, 3):
        monkeypatch.setitem(globals(), "SETTING", value)
        enclosing = int(value * 2) + 1
        for kwargs in ({}, {"default": value}):
            pair(rand(4), **kwargs)


def test_what_the_forward_context_holds_is_that_of_this_call(rand: Any) -> None:
    """Lengths that differ from call to call are published, never frozen (vllm-project/vllm#53366)."""

    @bcg.eager_break(fake=lambda x: torch.empty_like(x))
    def cut(x: Tensor) -> Tensor:
        context = bcg.current_context()
        return x.masked_fill(torch.arange(x.shape[0]) >= context.length, context.fill)

    compiled = torch.compile(lambda x: cut(x.sin()).cos(), backend="bcg", fullgraph=True)
    for length, fill in ((2, 0.0), (3, 1.0), (0, -1.0), (4, 0.0)):
        x = rand(4)
        with bcg.forward_context(length=length, fill=fill):
            assert torch.equal(compiled(x), cut(x.sin()).cos())
