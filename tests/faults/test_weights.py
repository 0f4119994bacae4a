"""Weights, buffers and modules that are changed, replaced or swapped between calls."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


class _Model(nn.Module):
    gain: Tensor
    shift: Tensor

    def __init__(self, breaks: SimpleNamespace, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("gain", torch.ones(8))
        self.register_buffer("shift", torch.zeros(8), persistent=False)
        self.table = torch.linspace(0, 1, 8)  # a plain attribute
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(2)])
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.breaks.wall(self.lin(x) * self.gain).relu()
        h = self.out(h + self.table) + self.rows[0] * self.rows[1]
        return self.breaks.wall(h) + self.shift


def fresh(n: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(n), device="cpu").to(torch.get_default_device())


def _forget(tensor: Tensor) -> None:
    """Make sure that nobody reads the old memory unseen."""
    tensor.fill_(float("nan"))


def _in_place(m: Any, n: int) -> None:
    m.lin.weight.copy_(fresh(n, 8, 8))
    m.gain.mul_(0.5)


def _data(m: Any, n: int) -> None:
    old = m.lin.weight.data
    m.lin.weight.data = fresh(n, 8, 8)
    _forget(old)


def _parameter(m: Any, n: int) -> None:
    old, m.lin.weight = m.lin.weight, nn.Parameter(fresh(n, 8, 8), requires_grad=n % 2 == 0)
    _forget(old)


def _buffer(m: Any, n: int) -> None:
    old, m.gain = m.gain, fresh(n, 8)
    _forget(old)
    old, m.shift = m.shift, fresh(n + 9, 8)
    _forget(old)


def _registered_again(m: Any, n: int) -> None:
    old = m.gain
    m.register_buffer("gain", fresh(n, 8))
    _forget(old)


def _attribute(m: Any, n: int) -> None:
    old, m.table = m.table, fresh(n, 8)
    _forget(old)


def _state_dict(m: Any, n: int) -> None:
    m.load_state_dict({k: fresh(n + i, *v.shape) for i, (k, v) in enumerate(m.state_dict().items())})


def _state_dict_assigned(m: Any, n: int) -> None:
    old = list(m.state_dict().values())
    m.load_state_dict({k: fresh(n + i, *v.shape) for i, (k, v) in enumerate(m.state_dict().items())}, assign=True)
    for tensor in old:
        _forget(tensor)


def _module(m: Any, n: int) -> None:
    torch.manual_seed(n)
    old, m.lin = m.lin, nn.Linear(8, 8)
    _forget(old.weight)


def _module_kind(m: Any, n: int) -> None:
    torch.manual_seed(n)
    m.lin = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if n % 2 else nn.Linear(8, 8, bias=False)


def _two_swapped(m: Any, n: int) -> None:
    m.lin.weight, m.out.weight = m.out.weight, m.lin.weight


def _item_of_a_list(m: Any, n: int) -> None:
    old, m.rows[0] = m.rows[0], nn.Parameter(fresh(n, 8))
    _forget(old)


def _all_moved(m: Any, n: int) -> None:
    m._apply(lambda t: t.clone())


def _layout(m: Any, n: int) -> None:
    m.lin.weight = nn.Parameter(fresh(n, 8, 8).t() if n % 2 else fresh(n, 16, 16)[::2, ::2])


CHANGES: list[Callable[[Any, int], None]] = [
    *(_in_place, _data, _parameter, _buffer, _registered_again, _attribute, _state_dict, _state_dict_assigned),
    *(_module, _module_kind, _two_swapped, _item_of_a_list, _all_moved, _layout),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__[1:])
@ONE_FORM
def test_weights_changed_between_calls_are_read(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, change: Callable[[Any, int], None]
) -> None:
    """Weights moved to other memory after capture, the recording went on reading the old (vllm-project/vllm#48312)."""
    pair = compile_pair(_Model(breaks).requires_grad_(False))
    pair(rand(4, 8))
    pair(rand(4, 8))
    for n in (1, 2, 3):
        pair.both(lambda module, n=n: change(module, n))
        pair(rand(4, 8))
        pair(rand(4, 8))


@ONE_FORM
def test_dtype_changed_between_calls(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """The same for a change that asks for another program (sgl-project/sglang#27140)."""

    def convert(module: Any, dtype: torch.dtype) -> None:
        module.to(dtype)
        module.table = module.table.to(dtype)

    pair = compile_pair(_Model(breaks))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        pair.both(lambda module, dtype=dtype: convert(module, dtype))
        pair(rand(4, 8, dtype=dtype))
        pair(rand(4, 8, dtype=dtype))


@ONE_FORM
def test_instances_of_one_class_in_turn(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Two instances share one compiled entry; their weights alternate call by call (vllm-project/vllm#48941)."""
    pairs = [compile_pair(_Model(breaks, seed)) for seed in (1, 2, 3)]
    for _ in range(3):
        for pair in pairs:
            pair(rand(4, 8))
    pairs[1].both(lambda module: _parameter(module, 5))
    for pair in pairs:
        pair(rand(4, 8))


@ONE_FORM
def test_layers_compiled_one_by_one(breaks: SimpleNamespace, rand: Any, way: dict[str, Any]) -> None:
    """A stack of equal layers, each of them compiled: every layer reads its own weights (vllm-project/vllm#48941)."""
    layers = [_Model(breaks, seed) for seed in range(4)]
    compiled = [torch.compile(layer, backend="bcg", fullgraph=True, options=way) for layer in layers]
    for _ in range(3):
        want = got = rand(2, 8)
        for layer, fast in zip(layers, compiled, strict=True):
            want, got = layer(want), fast(got)
            assert torch.equal(want, got)


@ONE_FORM
def test_model_made_where_another_was_deleted(breaks: SimpleNamespace, rand: Any, way: dict[str, Any]) -> None:
    """A new model may get the addresses of a deleted one (sgl-project/sglang#27140)."""
    for seed in range(3):
        model = nn.Sequential(_Layer(seed), nn.Linear(4, 4), _Layer(seed + 0.5)).requires_grad_(False)
        compiled = torch.compile(model, backend="bcg", fullgraph=True, options=way)
        for _ in range(2):
            x = rand(4)
            got = compiled(x)
            for buffer in model.buffers():
                buffer.sub_(1)  # once more in eager, from the same state
            assert torch.equal(got, model(x))
        del model, compiled
        gc.collect()


class _Tied(nn.Module):
    def __init__(self, breaks: SimpleNamespace, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.breaks = breaks

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.breaks.wall(self.embed(ids)).sin())


def _tie(m: Any, n: int) -> None:
    m.head.weight = m.embed.weight


def _untie(m: Any, n: int) -> None:
    m.head.weight = nn.Parameter(fresh(n, 16, 8))


def _write_tied(m: Any, n: int) -> None:
    m.embed.weight.mul_(0.5)


def _replace_tied(m: Any, n: int) -> None:
    m.embed.weight = nn.Parameter(fresh(n, 16, 8))
    m.head.weight = m.embed.weight


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "changes",
    [(_write_tied, _replace_tied, _write_tied), (_untie, _write_tied, _tie, _write_tied), (_tie, _untie, _tie)],
    ids=["written_and_replaced", "untied_and_tied", "tied_and_untied"],
)
@ONE_FORM
def test_tied_weights(
    compile_pair: Any, breaks: SimpleNamespace, ints: Any, tied: bool, changes: tuple[Callable[..., None], ...]
) -> None:
    """Weights that are one tensor when compiled and two later, or the other way round (vllm-project/vllm#48312)."""
    pair = compile_pair(_Tied(breaks, tied))
    pair(ints(1, 2, 3))
    for n, change in enumerate(changes):
        pair.both(lambda module, n=n, change=change: change(module, n))
        pair(ints(1, 2, 3))
        pair(ints(4, 5, 6))


TABLE = torch.ones(8)


@pytest.mark.parametrize("way_to_change", ["replaced", "written"])
@ONE_FORM
def test_global_and_enclosing_tensors(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, monkeypatch: pytest.MonkeyPatch, way_to_change: str
) -> None:
    """Tensors that a function finds outside of itself (vllm-project/vllm#48312)."""
    monkeypatch.setitem(globals(), "TABLE", torch.ones(8))
    enclosed = torch.ones(8)

    def program(x: Tensor) -> Tensor:
        return breaks.wall(x * TABLE).sin() + enclosed

    pair = compile_pair(program)
    for n in range(3):
        pair(rand(4, 8))
        if way_to_change == "replaced":
            old, enclosed = (TABLE, enclosed), fresh(n, 8)
            monkeypatch.setitem(globals(), "TABLE", fresh(n + 9, 8))
            for tensor in old:
                _forget(tensor)
        else:
            TABLE.mul_(2)
            enclosed.add_(1)


class _Layer(nn.Module):
    """A layer whose break is a method: the instance is bound when the model is compiled."""

    seen: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("seen", torch.zeros(()))

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def attend(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.scale + self.seen

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x.sin()).cos()


def test_break_method_runs_on_its_own_instance(compile_pair: Any, rand: Any) -> None:
    """Layers of one class, in one model and in two that alternate, and one replaced by another
    (vllm-project/vllm#48941).
    """
    pairs = [compile_pair(nn.Sequential(_Layer(n), _Layer(n + 0.5), nn.Tanh())) for n in (1, 3)]
    for _ in range(2):
        for pair in pairs:
            pair(rand(4))
    pairs[0].both(lambda module: module.__setitem__(1, _Layer(7)))
    gc.collect()
    for pair in pairs:
        pair(rand(4))


def test_attribute_that_a_break_method_reads_may_change(compile_pair: Any, rand: Any) -> None:
    """What a body reads from its own object is never frozen (sgl-project/sglang#27140)."""
    pair = compile_pair(_Layer(1.0))
    for n in range(3):
        pair.both(lambda module, n=n: setattr(module, "scale", n + 0.5))
        pair.both(lambda module: setattr(module, "seen", module.seen.clone()))
        pair(rand(4))


class _Window(nn.Module):
    """Its segments see the cache through a view only, which is taken next to a break."""

    cache: Tensor

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(6, 4))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        window = self.cache[:3]
        self.breaks.scale_(x)
        window.add_(x)
        return window * 2


@ONE_FORM
def test_buffer_that_is_only_seen_through_a_view_may_be_replaced(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any
) -> None:
    """A view next to a break is taken once, at capture, and the address behind it was not checked: replays read and
    wrote the memory of the old buffer.
    """
    pair = compile_pair(_Window(breaks))
    for n in range(4):
        pair.both(lambda module, n=n: setattr(module, "cache", fresh(n // 2, 6, 4)))
        pair(rand(3, 4))


class _Projection(nn.Module):
    def __init__(self, breaks: SimpleNamespace, trained: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(8, 24).requires_grad_(trained)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Any:
        h = self.breaks.wall((x + 1).transpose(0, 1))
        return torch.nn.functional.linear((x + 1).transpose(0, 1), self.lin.weight, self.lin.bias), self.lin(h)


@pytest.mark.parametrize("trained", [True, False])
@ONE_FORM
def test_segments_run_the_kernels_that_eager_chooses_by_requires_grad(
    check: Any, breaks: SimpleNamespace, rand: Any, trained: bool
) -> None:
    """A segment was captured on detached weights, for which torch folds a batch of matrices another way: results
    were rounded otherwise than in eager.
    """
    pair = check(_Projection(breaks, trained), [(rand(2, 3, 8),) for _ in range(3)])
    assert bcg.stats(pair.compiled).replays
