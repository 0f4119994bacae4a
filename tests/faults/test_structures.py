"""Arguments and results in containers: dictionaries, dataclasses, named tuples, keywords, ``None``."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


class Stage(nn.Module):
    """A stage of a pipeline: a dictionary in, a dictionary out, optional keywords."""

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.breaks = breaks

    def forward(self, proxy: dict[str, Tensor], *, scale: Tensor | None = None, extra: Any = None) -> Any:
        h, residual = proxy["hidden"], proxy["residual"]
        residual = residual + h
        h = self.breaks.wall(self.a(residual))
        if scale is not None:
            h = h * scale
        out = {"hidden": self.b(h), "residual": residual}
        return (out, [h, None]) if extra is None else (out, [h, extra["bias"] + h])


@pytest.mark.parametrize("breaks", ["custom_op", "eager_break"], indirect=True)
def test_dictionaries_and_keywords_of_each_call(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Buffers were kept for the graph, but new values not copied in, or keywords dropped (vllm-project/vllm#13417)."""

    def proxy(n: int, *order: str) -> dict[str, Tensor]:
        return {key: rand(n, 8) for key in order or ("hidden", "residual")}

    check(
        Stage(breaks),
        [
            check.call(proxy(4)),
            check.call(proxy(4, "residual", "hidden")),
            check.call(proxy(4), scale=rand(4, 1)),
            check.call(proxy(5), extra={"bias": rand(8)}),
            check.call(proxy(4), extra={"bias": rand(8)}, scale=rand(4, 1)),
            check.call(proxy(5), scale=None, extra=None),
            check.call(proxy(4, "residual", "hidden", "unused")),
        ],
    )


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None = None


Plain = namedtuple("Plain", ["x", "y"])


@dataclass
class Batch:
    ids: Tensor
    mask: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Frozen:
    ids: Tensor
    inner: Batch


def _of_named_tuple(b: SimpleNamespace, given: Pair) -> Pair:
    h = b.wall(given.first.sin())
    return Pair(h.cos(), given.second) if given.second is None else Pair(h + given.second, given.second * 2)


def _of_plain_named_tuple(b: SimpleNamespace, given: Any) -> Any:
    return Plain(y=b.wall(given.x).sin(), x=[given.y + 1, None])


def _of_dataclass(b: SimpleNamespace, given: Batch) -> Batch:
    h = b.wall(given.ids * given.scale)
    return Batch(h.sin() if given.mask is None else h * given.mask, given.mask, given.scale * 2)


def _of_nested_dataclass(b: SimpleNamespace, given: Frozen) -> dict[str, Any]:
    return {"a": b.wall(given.ids).cos() + given.inner.ids, "b": Frozen(given.ids + 1, given.inner)}


def _of_list(b: SimpleNamespace, given: list[Tensor]) -> list[Any]:
    return [*(b.wall(t).sin() + index for index, t in enumerate(given)), len(given), []]


def _of_nested(b: SimpleNamespace, given: Any) -> Any:
    h = b.wall(given["layers"][0]["k"]).sin()
    return {"layers": [{"k": h, "v": (given["layers"][1]["k"] + h, None, ())}], "n": 3, "s": "name"}


def _of_keys(b: SimpleNamespace, given: dict[Any, Tensor]) -> dict[Any, Any]:
    return {key: b.wall(value).cos() for key, value in given.items()}


def _of_ordered(b: SimpleNamespace, given: Any) -> Any:
    return OrderedDict((key, b.wall(value).cos()) for key, value in reversed(given.items()))


def _of_one_tensor_twice(b: SimpleNamespace, given: dict[str, Tensor]) -> Any:
    h = b.wall(given["a"]) + given["b"]
    return {"x": h, "y": h, "a": given["a"], "t": (h.sin(), h)}


def _of_container_changed(b: SimpleNamespace, given: dict[str, Any]) -> Any:
    given["new"] = b.wall(given["a"]).sin()
    given["list"].append(given["new"] + 1)
    del given["old"]
    return len(given)


def _structures(rand: Callable[..., Tensor]) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    def one() -> Tensor:
        return rand(2, 3)

    def tied() -> tuple[dict[str, Tensor]]:
        return ({"a": torch.ones(2, 3)} | {"b": torch.ones(2, 3)},)

    return {
        "named_tuple": (_of_named_tuple, [Pair(one(), one()), Pair(one()), Pair(one(), one())]),
        "plain_named_tuple": (_of_plain_named_tuple, [Plain(one(), one()), Plain(one(), one())]),
        "dataclass": (_of_dataclass, [Batch(one()), Batch(one(), one(), 2.0), Batch(one(), None, 3.0)]),
        "nested_dataclass": (_of_nested_dataclass, [Frozen(one(), Batch(one())), Frozen(one(), Batch(one()))]),
        "list": (_of_list, [[one(), one()], [one()], [one(), one(), one()], []][:3]),
        "nested": (_of_nested, [{"layers": [{"k": one()}, {"k": one()}]} for _ in range(2)]),
        "keys": (_of_keys, [{1: one(), "b": one(), (0, 1): one()}, {"b": one(), 1: one(), (0, 1): one()}]),
        "ordered": (_of_ordered, [OrderedDict(a=one(), b=one()), OrderedDict(b=one(), a=one())]),
        "one_tensor_twice": (_of_one_tensor_twice, [{"a": one(), "b": one()}, tied()[0]]),
        "container_changed": (
            _of_container_changed,
            [{"a": one(), "old": one(), "list": [one()]}, {"list": [], "old": 1, "a": one()}],
        ),
    }


@pytest.mark.parametrize("kind", list(_structures(torch.rand)))
@ONE_FORM
def test_structure_of_arguments_and_results(check: Any, breaks: SimpleNamespace, rand: Any, kind: str) -> None:
    """Whatever holds the tensors: their values are those of this call, and the result is built as in eager
    (vllm-project/vllm#42304).
    """
    body, arguments = _structures(rand)[kind]
    check(lambda given: body(breaks, given), [(given,) for given in arguments])


@ONE_FORM
def test_one_tensor_under_two_names(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Two arguments are one tensor in one call and two in another (sgl-project/sglang#36248)."""

    def program(given: dict[str, Tensor]) -> Any:
        given["a"].add_(1)
        return breaks.wall(given["b"]).sin() + given["a"], given["b"]

    def one() -> tuple[dict[str, Tensor]]:
        t = torch.ones(3)
        return ({"a": t, "b": t},)

    check(program, [({"a": rand(3), "b": rand(3)},), one, ({"b": rand(3), "a": rand(3)},)])


@ONE_FORM
def test_positional_keyword_and_surplus_arguments(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Ways to hand in the same arguments (vllm-project/vllm#13417)."""

    def program(x: Tensor, y: Tensor | None = None, *rest: Tensor, z: float = 1.0, **named: Tensor) -> Any:
        h = breaks.wall(x.sin()) * z
        if y is not None:
            h = h + y
        for tensor in (*rest, *named.values()):
            h = breaks.wall(h) - tensor
        return h

    check(
        program,
        [
            (rand(4),),
            check.call(x=rand(4), y=rand(4)),
            check.call(rand(4), y=rand(4), z=2.0),
            check.call(rand(4), rand(4), rand(4), rand(4), a=rand(4)),
            check.call(z=0.5, y=None, x=rand(4), b=rand(4), a=rand(4)),
        ],
    )


@ONE_FORM
def test_output_class_of_a_model_library(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """The ordered dictionaries with attributes that transformers' models return (vllm-project/vllm#42304)."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def program(given: Any, keep: bool) -> Any:
        h = breaks.wall(given.last_hidden_state).sin()
        states = (given.last_hidden_state, h) if keep else None
        return outputs.BaseModelOutput(last_hidden_state=h.cos(), hidden_states=states)

    given = [(outputs.BaseModelOutput(last_hidden_state=rand(2, 3)), keep) for keep in (True, False, True)]
    check(program, given)


# -- containers given to a break --------------------------------------------------------------------------------------


@bcg.eager_break(fake=lambda given, **named: torch.empty_like(named["like"]))
def total(given: Any, **named: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(given) if leaf is not None]
    found = sum(leaf * (index + 1) for index, leaf in enumerate(leaves))
    assert type(given) is named.get("kind", type(given))
    return named["like"] + found


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda r: [r(3), r(3)], id="list"),
        pytest.param(lambda r: (r(3), 2, r(3)), id="tuple"),
        pytest.param(lambda r: {"b": r(3), "a": [r(3), None]}, id="dictionary"),
        pytest.param(lambda r: Pair(r(3), r(3)), id="named_tuple"),
        pytest.param(lambda r: [{"k": r(3), "v": (r(3), 0.5)}] * 2, id="nested"),
        pytest.param(lambda r: [], id="empty"),
    ],
)
def test_break_function_takes_containers(check: Any, rand: Any, given: Callable[..., Any]) -> None:
    """Containers reach the body with their structure and order (vllm-project/vllm#13417)."""
    check(lambda x, g: total(g, like=x.sin(), scale=2).cos(), [(rand(3), given(rand)) for _ in range(2)])


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def slice(x: Tensor) -> Tensor:
    return x * 2


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def program(x: Tensor) -> Tensor:
    return x * 3


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def v1(x: Tensor) -> Tensor:
    return x * 5


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def make(x: Tensor) -> Tensor:
    return x * 7


@pytest.mark.parametrize("function", [slice, program, v1, make], ids=lambda f: f.__name__)
def test_break_may_have_any_name(check: Any, rand: Any, function: Callable[[Tensor], Tensor]) -> None:
    """A program is text: the names in it must not hide each other (vllm-project/vllm#13417)."""
    check(lambda x: function(x.sin())[1:3].cos() + x[0], [(rand(4, 2),) for _ in range(2)])
