"""Equal layers are traced once: the graph is the one that Dynamo makes of each layer, and who differs is traced."""

import contextlib
import enum
import functools
import re
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg
from bcg_compiler.compat.dynamo import source_name
from bcg_compiler.compat.equal_calls import EqualCalls, equal_calls

OPTIONS = {"capture": "emulated", "min_segment_kernels": 1, "segment_compiler": "eager"}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


class _Seen(Exception):
    pass


def _entry(*args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 (a global of the function made of this)


def traced(fn: Callable[..., Any], args: Any, kwargs: Any, once: bool) -> tuple[list[Any], EqualCalls]:
    """All that a backend sees of Dynamo's graph: nodes with their notes, and sources and memory of values."""
    found: list[Any] = []

    def backend(module: GraphModule, example_inputs: list[Any]) -> Any:
        found.extend(map(described, module.graph.nodes))
        found.append([id(value) if isinstance(value, Tensor) else value for value in example_inputs])
        values = [leaf for n in module.graph.nodes for leaf in tree_leaves(n.meta.get("example_value"))]
        storages = [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]
        found.append([storages.index(storage) for storage in storages])
        raise _Seen

    torch._dynamo.reset()
    entry = types.FunctionType(_entry.__code__, {"model": fn, "__builtins__": __builtins__, "__name__": __name__})
    with equal_calls(fn if once else None) as calls, contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(entry, backend=backend, fullgraph=True)(*args, **kwargs)
    return found, calls


def described(node: Node) -> Any:
    values = [
        (v.dtype, str(v.shape), str(v.stride()), v.is_inference(), v.requires_grad) if isinstance(v, Tensor) else str(v)
        for v in tree_leaves(node.meta.get("example_value"))
    ]
    notes = [str(node.meta.get(name)) for name in ("nn_module_stack", "source_fn_stack", "stack_trace")]
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs), source_name(node), values, notes


def check(fn: nn.Module, *args: Any, copied: int, **kwargs: Any) -> EqualCalls:
    """The graph is what Dynamo makes of each layer by itself, and a program gives eager's bits; so many are copied."""
    each, _ = traced(fn, args, kwargs, once=False)
    once, calls = traced(fn, args, kwargs, once=True)
    assert once == each
    assert calls.copied == copied, calls
    program = bcg.aot_compile(fn, args, kwargs, options=OPTIONS)
    assert program.equal_calls.copied == copied
    for _ in range(3):
        torch.testing.assert_close(program(*args, **kwargs), fn(*args, **kwargs), rtol=0, atol=0)
    return calls


class Block(nn.Module):
    """Attention, a norm and a gated product, with a cache that is written in place and the index of the layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.qkv, self.out, self.up = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32)
        self.norm = nn.RMSNorm(16)
        self.register_buffer("cache", torch.zeros(2, 64, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        self.cache[:, : k.shape[2]] = k[:, 0]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        a, b = self.up(x).split(16, -1)
        return x.add_(F.silu(a) * b) * x.float().pow(2).mean(-1, keepdim=True).rsqrt()


class Layers(nn.Module):
    """Layers that are called one after the other, each with what ``more`` gives for its number."""

    def __init__(self, *layers: nn.Module, more: Callable[[int], Any] | None = None) -> None:
        super().__init__()
        self.layers, self.more = nn.ModuleList(layers), more

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        x = torch.neg(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, **kwargs) if self.more is None else layer(x, self.more(number), **kwargs)
        return x


class Part(nn.Module):
    """A layer with a part, which is what makes it worth to be looked at; ``held`` are its attributes."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return torch.tanh(self.linear(x))


def test_layers_are_copied_with_their_own_tensors() -> None:
    calls = check(Layers(*map(Block, range(4))), torch.randn(2, 5, 16), copied=3)
    assert calls.traced == {"first of its class": 1}


@pytest.mark.parametrize("grad", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("open_rows", [False, True])
def test_in_inference_mode_and_with_open_sizes(grad: str, open_rows: bool) -> None:
    with getattr(torch, grad)():
        x = torch.randn(2, 5, 16)
        if open_rows:
            torch._dynamo.mark_dynamic(x, 1)
        check(Layers(*map(Block, range(3))), x, copied=2)


def _zoo() -> list[Any]:
    pytest.importorskip("transformers")
    from bcg_compiler.models import zoo

    return [n if n in ("llama", "deepseek_v32") else pytest.param(n, marks=pytest.mark.nightly) for n in zoo.names()]


@pytest.mark.parametrize("name", _zoo())
def test_models_of_transformers(name: str) -> None:
    """Of nearly all of them layers are copied; some are no one graph, and some have different layers only."""
    from bcg_compiler.models import zoo

    made = zoo.build(name, layers=4)
    kwargs = made.make_inputs(24, torch.Generator().manual_seed(0))
    try:
        each, _ = traced(made.model, (), kwargs, once=False)
    except (torch._dynamo.exc.UserError, torch._dynamo.exc.Unsupported) as error:
        pytest.skip(f"it is no one graph: {str(error).splitlines()[0]}")
    once, calls = traced(made.model, (), kwargs, once=True)
    assert once == each
    assert calls.copied or name not in ("llama", "deepseek_v32")


# -- what tells layers apart -------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    ADD, MULTIPLY = "add", "multiply"


class Scaled(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) * self.scale


class Moded(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) + 1 if self.mode is Mode.ADD else self.linear(x) * 2


class Acting(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.act(self.linear(x))


class Named(Part):
    SCALES: ClassVar = {"a": 1.0, "b": 2.0, "c": 3.0}

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) * self.SCALES[self.name]


class Nested(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) * self.config["scales"][0]


class Object(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) * self.held.factor


@pytest.mark.parametrize(
    "layers",
    [
        [Scaled(scale=1.0), Scaled(scale=2.0)],
        [Scaled(scale=0.0), Scaled(scale=-0.0)],
        [Scaled(scale=2), Scaled(scale=2.0)],
        [Moded(mode=Mode.ADD), Moded(mode=Mode.MULTIPLY)],
        [Acting(act=torch.relu), Acting(act=torch.tanh)],
        [Acting(act=lambda x: x + 1), Acting(act=lambda x: x * 2)],
        [Named(name="a"), Named(name="b")],
        [Nested(config={"scales": [1, 2]}), Nested(config={"scales": [3, 2]})],
        [Object(held=types.SimpleNamespace(factor=2)), Object(held=types.SimpleNamespace(factor=3))],
        [Part(), Part().double()],
        [Part(more=nn.Linear(1, 1)), Part(more=None)],
    ],
    ids=lambda layers: type(layers[0]).__name__,
)
def test_attributes_that_differ(layers: list[nn.Module]) -> None:
    model = Layers(*layers)
    if any(p.dtype == torch.float64 for p in model.parameters()):
        layers[1].register_forward_pre_hook(lambda module, args: (args[0].double(),))
    check(model, torch.randn(3, 4), copied=0)


def test_an_attribute_that_differs_and_is_not_read_is_nothing() -> None:
    check(Layers(Part(index=0, name="a"), Part(index=1, name="b"), Part(index=2, name="c")), torch.ones(4), copied=2)


def test_partials_of_one_function() -> None:
    """Each layer has a partial of its own, as some activations of transformers are."""
    layers = [Acting(act=functools.partial(F.gelu, approximate="tanh")) for _ in range(3)]
    check(Layers(*layers), torch.randn(3, 4), copied=2)
    layers[1].act = functools.partial(F.gelu, approximate="none")
    check(Layers(*layers), torch.randn(3, 4), copied=1)


def test_layers_of_two_kinds_in_turn() -> None:
    check(Layers(*(Scaled(scale=float(i % 2)) for i in range(6))), torch.randn(3, 4), copied=4)


_REGISTRY: dict[Any, float] = {}


class ById(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) * _REGISTRY[id(self)]


class ByParent(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.linear(x) * (2 if self.parent[0].layers[-1] is self else 3)


class Counting(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        self.counter["calls"] += 1
        return self.linear(x) * self.counter["calls"]


def test_which_object_it_is() -> None:
    model = Layers(ById(), ById(), ById())
    _REGISTRY.update({id(layer): 1.0 + number for number, layer in enumerate(model.layers)})
    check(model, torch.randn(3, 4), copied=0)


class AlsoByParent(ByParent):
    pass


@pytest.mark.parametrize("classes", [(ByParent, ByParent), (ByParent, AlsoByParent)])
def test_whether_it_is_the_last_one(classes: tuple[type[ByParent], type[ByParent]]) -> None:
    """Also where another class has asked for the last one before."""
    parent: list[Any] = []
    first, second = classes
    model = Layers(first(parent=parent), first(parent=parent), *(second(parent=parent) for _ in range(3)))
    parent.append(model)
    check(model, torch.randn(3, 4), copied=0)


def test_python_objects_that_layers_change() -> None:
    counter = {"calls": 0}
    model = Layers(*(Counting(counter=counter) for _ in range(3)))
    each, _ = traced(model, (torch.randn(3, 4),), {}, once=False)
    once, calls = traced(model, (torch.randn(3, 4),), {}, once=True)
    assert len(once) == len(each) and [n[3] for n in once[:-2]] == [n[3] for n in each[:-2]]
    assert calls.copied == 0 and set(calls.not_kept) == {"changes Python objects"}


class Flag:
    factor = 1


class Flagged(nn.Module):
    """Sets what its layers read, before each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = Flag()
        self.layers = nn.ModuleList(Object(held=self.flag) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            self.flag.factor = number
            x = layer(x)
        self.flag.factor = 1
        return x


def test_python_objects_that_the_code_around_changes() -> None:
    model = Flagged()
    model.flag.factor = 1  # is what is left of it
    check(model, torch.randn(3, 4), copied=0)


def test_a_hook_of_one_layer() -> None:
    model = Layers(Part(), Part(), Part())
    model.layers[1].register_forward_hook(lambda module, args, result: result * 2)
    check(model, torch.randn(3, 4), copied=1)


class Around(nn.Module):
    """The second layer is called in a context of its own."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.layers, self.context = nn.ModuleList([Part(), Part(), Part()]), context

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](torch.neg(x))
        with self.context():
            x = self.layers[1](x)
        return self.layers[2](x.float())


@pytest.mark.parametrize(
    "context", [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.set_grad_enabled(True)]
)
def test_a_mode_around_one_layer(context: Callable[[], Any]) -> None:
    model = Around(context).requires_grad_(False)
    check(model, torch.randn(3, 4), copied=1)


class Nest(nn.Module):
    """Layers within a layer, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).sum(0)


def test_layers_within_layers() -> None:
    check(Layers(Nest(), Nest(), Nest()), torch.randn(3, 4), copied=2)


class Casting(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(False):
            return torch.tanh(self.linear(x)).float()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_modes_within_layers_and_layers_without_parts() -> None:
    check(Layers(Casting(), Casting(), Casting()), torch.randn(3, 4), copied=2)
    check(Layers(Scale(), Scale(), Scale()), torch.randn(3, 4), copied=2)


def test_weights_that_two_layers_share() -> None:
    model = Layers(Part(), Part(), Part())
    model.layers[2].linear.weight = model.layers[0].linear.weight
    check(model, torch.randn(3, 4), copied=2)


def test_a_layer_that_is_called_again_is_traced_again() -> None:
    layer = Part()
    check(Layers(layer, Part(), layer), torch.randn(3, 4), copied=1)


# -- arguments and results ---------------------------------------------------------------------------------------------


class Cached(Part):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        keys, values = cache
        keys[: x.shape[0]] = self.linear(x)
        return torch.tanh(x + keys[: x.shape[0]] * values)


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached() for _ in range(count))

    def forward(self, x: Tensor, caches: Any) -> Tensor:
        x = torch.neg(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return x


def test_tensors_of_each_layer_among_the_arguments() -> None:
    caches = [(torch.randn(8, 4), torch.randn(4)) for _ in range(3)]
    check(Stack(3), torch.randn(5, 4), caches, copied=2)


def test_tensors_of_each_layer_that_differ() -> None:
    caches = [(torch.randn(8, 4), torch.randn(4)), (torch.randn(9, 4), torch.randn(4))]
    check(Stack(2), torch.randn(5, 4), caches, copied=0)


class Shifted(Part):
    def forward(self, x: Tensor, by: Any) -> Tensor:
        return self.linear(x) + by


@pytest.mark.parametrize("more, copied", [(lambda n: 2, 2), (lambda n: n, 0), (lambda n: bool(n), 1)])
def test_numbers_among_the_arguments(more: Callable[[int], Any], copied: int) -> None:
    check(Layers(Shifted(), Shifted(), Shifted(), more=more), torch.randn(3, 4), copied=copied)


class Pair(Part):
    def forward(self, x: Any) -> Any:
        a, b = x
        return self.linear(a) + b, b


class Twins(nn.Module):
    """The first layer gets one tensor twice, the others two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = torch.neg(x)
        pair = (x, x)
        for layer in self.layers:
            pair = layer(pair)
        return pair


def test_a_tensor_that_is_two_arguments_and_a_result_that_is_an_argument() -> None:
    check(Twins(), torch.randn(3, 4), copied=1)


class Halves(Part):
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y[:, :2], (y[:, 2:], None, 3)


class OfHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halves() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = torch.neg(x)
        for layer in self.layers:
            a, (b, _, number) = layer(x)
            a.mul_(number)
            x = torch.cat([b, a], 1)
        return x, a._base is b._base


def test_results_in_tuples_that_share_memory() -> None:
    check(OfHalves(), torch.randn(3, 4), copied=2)


_begun: list[bool] = []


@torch.compiler.assume_constant_result
def begin_anew() -> int:
    if not _begun:
        _begun.append(True)
        raise torch._dynamo.exc.RestartAnalysis(restart_reason="once")
    return 2


class BegunAnew(Layers):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = super().forward(x)
        return result * begin_anew()


def test_a_trace_that_dynamo_begins_anew() -> None:
    """Its second graph gets nothing of the first one."""
    model, x = BegunAnew(Part(), Part(), Part()), torch.randn(3, 4)
    _begun.append(True)
    each, _ = traced(model, (x,), {}, once=False)
    _begun.clear()
    once, calls = traced(model, (x,), {}, once=True)
    assert once == each
    assert calls.copied == 4


# -- breaks ------------------------------------------------------------------------------------------------------------


class Breaking(Part):
    @bcg.eager_break(fake=lambda self, x: x.new_empty(x.shape[0], self.width))
    def run(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.index

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.run(x))


def test_a_break_is_bound_to_the_layer_that_it_is_of() -> None:
    layers = [Breaking(index=number, width=4) for number in (1, 2, 3)]
    model = Layers(*layers)
    program = bcg.aot_compile(model, (torch.randn(3, 4),), options=OPTIONS)
    assert program.equal_calls.copied == 2
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)
    assert bcg.stats(program).breaks == 3


def test_a_break_whose_result_differs_by_what_nobody_saw_read() -> None:
    """The fake of a break runs, and its reads are not seen: what it gives is looked at."""
    layers = [Breaking(index=number, width=width) for number, width in ((1, 4), (2, 4), (3, 4))]
    layers[1].linear = nn.Linear(4, 4)
    layers[2].width = 1
    layers[2].linear = nn.Linear(4, 1)
    program = bcg.aot_compile(Layers(*layers), (torch.randn(3, 4),), options=OPTIONS)
    assert program.equal_calls.copied == 1
    x = torch.randn(3, 4)
    torch.testing.assert_close(program(x), Layers(*layers)(x), rtol=0, atol=0)


# -- what is left behind -----------------------------------------------------------------------------------------------


class Failing(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        raise ValueError("no")


def test_dynamo_is_as_it_was_behind_an_error() -> None:
    from torch._dynamo.variables import builder, functions, nn_module

    def patched() -> list[Any]:
        modules, values = nn_module.UnspecializedNNModuleVariable, builder.VariableBuilder
        return [modules.call_function, values.__call__, functions.invoke_and_store_as_constant]

    before = patched()
    with pytest.raises(Exception, match="no"):
        bcg.aot_compile(Layers(Part(), Failing(), Failing()), (torch.randn(3, 4),), options=OPTIONS)
    assert patched() == before


def test_each_layer_is_traced_where_that_is_asked() -> None:
    model, x = Layers(Part(), Part(), Part()), torch.randn(3, 4)
    program = bcg.aot_compile(model, (x,), options=OPTIONS, trace_each_layer=True)
    assert program.equal_calls == EqualCalls()
    torch.testing.assert_close(program(x), model(x), rtol=0, atol=0)


def test_counts_say_why() -> None:
    program = bcg.aot_compile(
        Layers(Scaled(scale=1.0), Scaled(scale=2.0), Scaled(scale=1.0)), (torch.randn(4),), options=OPTIONS
    )
    calls = program.equal_calls
    assert (calls.copied, calls.traced) == (1, Counter({"first of its class": 1, "reads what differs: scale": 1}))
    assert re.search("copied=1", str(calls))
