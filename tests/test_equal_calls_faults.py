"""What tells two layers apart: each of these was once copied from the trace of a layer that is not equal."""

import builtins
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.compat.equal_calls import equal_calls

OPTIONS = {"segment_compiler": "eager", "capture": "emulated"}
SPECIAL: list[Any] = [None]
STATE: dict[str, Any] = {}
same_as_id = id
BY_ID: dict[int, float] = {}


class Layer(nn.Module):
    """A layer with parts, whose ``forward`` multiplies with what ``scale`` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def scale(self, x: torch.Tensor, *args: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self.linear(x) * self.scale(x, *args)


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(self.before(at, x), *self.given())
        return x

    def before(self, at: int, x: torch.Tensor) -> torch.Tensor:
        return x

    def given(self) -> tuple[Any, ...]:
        return ()


def layers(scale: Callable[..., Any], each: Callable[[int], dict[str, Any]] = lambda at: {}) -> list[Layer]:
    cls = type("Scaled", (Layer,), {"scale": scale})
    made = [cls() for _ in range(3)]
    for at, layer in enumerate(made):
        vars(layer).update(each(at))
    return made


class Object:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"Object{vars(self)}"


class WithSlots:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Number(int):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


TABLE = Table()


def number(at: int) -> Number:
    made = Number(1)
    made.more = at + 2.0  # type: ignore[attr-defined]
    return made


@torch.compiler.assume_constant_result
def mean_of(tensor: torch.Tensor) -> float:
    return float(tensor.mean())


def is_argument_last() -> Stack:
    class Model(Stack):
        def given(self) -> tuple[Any, ...]:
            return (self.layers[-1],)

    return Model(layers(lambda self, x, last: 2 if self is last else 3))


def is_argument_first() -> Stack:
    class Model(Stack):
        def given(self) -> tuple[Any, ...]:
            return (self.layers[0],)

    return Model(layers(lambda self, x, first: 2 if self is first else 3))


def is_in_shared_list() -> Stack:
    every: list[Any] = []
    every += layers(lambda self, x: 2.0 + self.every.index(self), lambda at: {"every": every})
    return Stack(every)


def is_first_of_shared_object() -> Stack:
    shared = Object()
    made = layers(lambda self, x: 2 if self is self.shared.first else 3, lambda at: {"shared": shared})
    shared.first = made[0]
    return Stack(made)


def is_a_global_one() -> Stack:
    made = layers(lambda self, x: 2 if self is SPECIAL[0] else 3)
    SPECIAL[0] = made[1]
    return Stack(made)


def has_tied_argument() -> Stack:
    class Model(Stack):
        def given(self) -> tuple[Any, ...]:
            return (self.tied.weight,)

    model = Model(layers(lambda self, x, weight: 2 if self.linear.weight is weight else 3))
    model.tied = nn.Linear(4, 4)
    model.layers[1].linear.weight = model.tied.weight
    return model


def has_id() -> Stack:
    made = layers(lambda self, x: BY_ID[same_as_id(self)])
    BY_ID.update({id(layer): at + 2.0 for at, layer in enumerate(made)})
    return Stack(made)


def has_set_of_another_order() -> Stack:
    def scale(self: Any, x: torch.Tensor) -> Any:
        for value in self.values:
            x = x * 2 + value
        return x

    return Stack(layers(scale, lambda at: {"values": set([0, 8] if at % 2 else [8, 0])}))


def has_keys_of_another_type() -> Stack:
    def scale(self: Any, x: torch.Tensor) -> Any:
        return (x.int() * next(iter(self.values))) / 2

    return Stack(layers(scale, lambda at: {"values": {1.5 - 0.5: 0} if at % 2 else {True: 0}}))


def has_a_number_with_attributes() -> Stack:
    return Stack(layers(lambda self, x: self.number.more, lambda at: {"number": number(at)}))


def has_slots() -> Stack:
    return Stack(layers(lambda self, x: self.held.value, lambda at: {"held": WithSlots(at + 2.0)}))


def has_a_constant_of_a_tensor() -> Stack:
    return Stack(layers(lambda self, x: mean_of(self.linear.weight)))


def has_a_text() -> Stack:
    return Stack(layers(lambda self, x: len(str(self.held)), lambda at: {"held": Object(value=10**at)}))


def is_in_a_changed_dict_with_attributes() -> Stack:
    class Model(Stack):
        def before(self, at: int, x: torch.Tensor) -> torch.Tensor:
            TABLE.used = 1  # type: ignore[attr-defined]
            TABLE["scale"] = at + 2.0
            return x

    return Model(layers(lambda self, x: TABLE["scale"]))


def has_an_argument_with_attributes() -> Stack:
    class Model(Stack):
        def before(self, at: int, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            x.scale = at + 2.0  # type: ignore[attr-defined]
            return x

    return Model(layers(lambda self, x: x.scale))


def has_a_stored_argument() -> Stack:
    class Model(Stack):
        def before(self, at: int, x: torch.Tensor) -> torch.Tensor:
            if at == 0:
                x = x * 1
                STATE["x"] = x
            return x

    return Model(layers(lambda self, x: 2 if x is STATE["x"] else 3))


def has_a_break_of_another_structure() -> Stack:
    def give(self: Any, x: torch.Tensor) -> Any:
        return [x * 2, None] if self.first else [None, x * 2]

    def scale(self: Any, x: torch.Tensor) -> Any:
        first, second = self.give(x)
        return first if second is None else second * 3

    made = layers(scale, lambda at: {"first": at != 1})
    type(made[0]).give = bcg.eager_break(give, fake=give)  # type: ignore[attr-defined]
    return Stack(made)


MODELS = [
    is_argument_last,
    is_argument_first,
    is_in_shared_list,
    is_first_of_shared_object,
    is_a_global_one,
    has_tied_argument,
    has_id,
    has_set_of_another_order,
    has_keys_of_another_type,
    has_a_number_with_attributes,
    has_slots,
    has_a_constant_of_a_tensor,
    has_a_text,
    is_in_a_changed_dict_with_attributes,
    has_an_argument_with_attributes,
    has_a_stored_argument,
    has_a_break_of_another_structure,
]


def _call(x: Any) -> Any:
    return model(x)  # type: ignore[name-defined]  # noqa: F821 (a global of the function made of this)


def graph_of(model: nn.Module, x: torch.Tensor, reuse: bool) -> list[Any]:
    """The nodes of Dynamo's graph for a model, and the modules around them."""
    torch._dynamo.reset()
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            place = [(key, path) for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]
            found.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs), place))
        return graph

    with ExitStack() as stack:
        if reuse:
            stack.enter_context(equal_calls(model))
        entry = types.FunctionType(_call.__code__, {"model": model, "__builtins__": builtins})  # as that of aot_compile
        torch.compile(entry, backend=backend, fullgraph=True)(x)
    return found


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_layers_that_differ_are_not_copied(make: Callable[[], Stack]) -> None:
    torch.manual_seed(0)
    model, x = make().requires_grad_(False), torch.randn(3, 4)
    try:
        native = graph_of(model, x, reuse=False)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"this torch does not trace it: {str(error).splitlines()[0]}")
    assert graph_of(model, x, reuse=True) == native


class Named(Layer):
    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        h = x
        linear = self.linear(h)
        add_1, mul = linear + 1, linear * 2
        h_2 = mul - add_1
        return h_2


@torch.no_grad()
def test_names_of_nodes_are_those_of_dynamo() -> None:
    class Model(Stack):
        def before(self, at: int, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1].linear(x) * 3 if at == 0 else x * 3

    model, x = Model([Named() for _ in range(4)]).requires_grad_(False), torch.randn(3, 4)
    assert graph_of(model, x, reuse=True) == graph_of(model, x, reuse=False)
    with torch.no_grad():
        program = bcg.aot_compile(model, (x,), options=OPTIONS)
    assert program.equal_calls.copied == 3
    assert torch.equal(program(x), model(x))


def test_a_trace_that_ends_before_another_thread_s_takes_nothing_out() -> None:
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Variable

    before = Variable.call_function
    first, second = equal_calls(nn.Linear(1, 1)), equal_calls(nn.Linear(1, 1))

    worker = threading.Thread(target=first.__enter__)
    worker.start()
    worker.join()
    second.__enter__()
    seen = Variable.call_function
    first.gen.close()  # type: ignore[attr-defined]
    assert Variable.call_function is seen is not before
    second.__exit__(None, None, None)
    assert Variable.call_function is before
