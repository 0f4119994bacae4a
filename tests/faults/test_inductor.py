"""Segments compiled by Inductor: what a caller sees besides the last bits of numbers is what eager code shows.

A few programs; ``make inductor`` runs all tests of this folder so.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

SINCE_2_14 = torch.__version__ >= "2.14"
WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)
pytestmark = [pytest.mark.usefixtures("inductor_segments")]


@ONE_FORM
def test_writes_into_arguments_and_caches_between_breaks(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any
) -> None:
    def program(cache: Tensor, x: Tensor, slots: Tensor) -> Any:
        x[1:].mul_(2)
        h = breaks.push_(cache, slots, torch.sigmoid(x))
        cache[0].add_(h.sum(0))
        return h.t() * 0.5, cache[1:], x.view(-1), (cache * 2).sum(1)

    pair = check(program, [(rand(6, 4), rand(3, 4), ints(1, 4, 2))] * 2)
    stats = bcg.stats(pair.compiled)
    assert stats.replays and stats.unique_units == 2 and not stats.eager_units


@ONE_FORM
def test_random_numbers_and_autocast_regions_stay_eager_s(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    def program(x: Tensor) -> Any:
        drawn = breaks.wall(x.sin() * 2) + torch.rand_like(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            mixed = breaks.wall(drawn) @ x
        return breaks.wall(mixed.float()).cos() + 1

    stats = bcg.stats(check(program, [(rand(4, 4),)]).compiled)
    assert stats.replays and stats.unique_units == 4
    assert stats.eager_units == {"unit_random": 1, "unit_mode": 1}


def _is_the_argument(x: Tensor) -> Any:
    return torch.dropout(x, 0.5, False), x * 2


def _written_before(x: Tensor) -> Any:
    x.add_(1)
    return torch.dropout(x, 0.5, False), x * 2


def _lazily_conjugate(x: Tensor) -> Any:
    made = torch.view_as_complex(x.view(2, 2, 2) * 2)
    return made, made.conj(), made.conj().imag


@pytest.mark.parametrize(
    "program", [_is_the_argument, _written_before, _lazily_conjugate], ids=lambda f: f.__name__[1:]
)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_result_that_shares_memory_with_another_value(
    compile_pair: Any, rand: Any, program: Callable[..., Any]
) -> None:
    """What is ``x`` or a view of a result in eager code was a copy: a later write was not seen in the other one."""
    pair = compile_pair(program)
    for _ in range(3):
        pair.write_results((rand(2, 4),))
    stats = bcg.stats(pair.compiled)
    same_view = SINCE_2_14 and program is not _lazily_conjugate  # torch's decomposition gives it, too
    assert stats.replays and stats.eager_units == ({} if same_view else {"unit_alias": 1})


def _neutral_tensors(x: Tensor) -> Any:
    zeros, ones = torch.zeros(4), torch.ones(4)
    return x + zeros, x * ones, x - zeros, x / ones


def _neutral_numbers(x: Tensor) -> Any:
    return x + 0, x * 1.0, x / 1.0


def _columns_plus_zeros(x: Tensor) -> Any:
    return torch.zeros(3) + x[:, :3]


def _a_result_times_ones(x: Tensor) -> Any:
    made = x.sin()
    return made * torch.ones(4), made


def _written_later(x: Tensor) -> Any:
    before = x + torch.zeros(4)
    x.add_(1)
    return before, x * 2


@pytest.mark.parametrize(
    "program",
    [_neutral_tensors, _neutral_numbers, _columns_plus_zeros, _a_result_times_ones, _written_later],
    ids=lambda f: f.__name__[1:],
)
def test_a_result_has_memory_of_its_own(compile_pair: Any, rand: Any, program: Callable[..., Any]) -> None:
    """A result was the argument, or the other result, where an operation changes no number. Its strides were those of
    that value, too, and with torch 2.11 it was what was written there later.
    """
    pair = compile_pair(program)
    for _ in range(3):
        pair.write_results((rand(2, 4),))
    stats = bcg.stats(pair.compiled)
    assert stats.replays and not stats.eager_units


@ONE_FORM
def test_a_copy_does_not_change_with_what_a_break_writes(
    check: Any, breaks: SimpleNamespace, rand: Any, ints: Any
) -> None:
    """The sum was the cache itself."""

    def program(cache: Tensor, x: Tensor, slots: Tensor) -> Any:
        before = cache + torch.zeros(4)
        breaks.push_(cache, slots, x)
        return before * 2, before

    assert bcg.stats(check(program, [(rand(6, 4), rand(2, 4), ints(1, 4))]).compiled).replays


def test_a_written_argument_with_gaps(check: Any, rand: Any) -> None:
    """The first look at the code is on copies, which had none: the code asked for the strides that it was made for."""

    def program(x: Tensor) -> Any:
        x.add_(1)
        return x[:1], x * 2

    whole = rand(5, 4)
    pair = check(program, [lambda: (whole.clone()[:, :3],)])
    stats = bcg.stats(pair.compiled)
    assert stats.replays and not stats.eager_units


@pytest.mark.skipif(torch.cuda.is_available(), reason="a layout of the CPU")
def test_an_input_without_a_storage(check: Any, rand: Any) -> None:
    """Its fake looks like any other tensor: the code that was made for it asked for its address."""
    pair = check(lambda x: x.sin().to_mkldnn().to_dense() + 1, [(rand(4, 4),)], fullgraph=False)
    stats = bcg.stats(pair.compiled)
    # Since 2.14 its fake has a layout, too: what makes and takes it is a break.
    assert stats.breaks == 1 if SINCE_2_14 else stats.eager_units == {"unit_odd_input": 1}


class _Tables(nn.Module):
    """Layers of one form, each with ids of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.ReLU()) for _ in range(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        return sum((layer(row) for layer, row in zip(self.layers, ids.unbind(), strict=True)), self.calls)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ends the process's CUDA context")
@pytest.mark.parametrize("good_calls", [0, 1, 2], ids=["warm_up", "capture", "replay"])
def test_an_error_in_code_that_runs_for_several_layers_names_the_layer(
    compile_pair: Any, ints: Any, good_calls: int
) -> None:
    """Inductor's own text names a line of a C++ file, its type is another one, and the layer was the first of those
    that share the code.
    """
    pair = compile_pair(_Tables())
    ids = ints(*range(1, 13)).view(6, 2)
    for _ in range(good_calls):
        pair(ids)
    bad = ids.clone()
    bad[4, 1] = 99
    for _ in range(2):
        pair.fails((bad,), IndexError, "index out of range", note=("embedding", "layers.4.0"))
        pair(ids)
    assert bcg.stats(pair.compiled).unique_units < len(pair.eager.layers)


def written_dropout_of_argument(x: Tensor) -> Tensor:
    torch.nn.functional.dropout(x, 0.1, False).add_(1.0)
    return x * 2


def written_dropout_of_value(x: Tensor) -> Tensor:
    h = x * 3
    dropped = torch.dropout(h, 0.5, False)
    dropped.add_(1.0)
    return h + 0.5


def written_dropout_of_nothing(x: Tensor) -> Tensor:
    h = x * 3
    dropped = torch.nn.functional.dropout(h, 0.0, True)
    dropped += x
    return h * dropped


@pytest.mark.parametrize("fn", [written_dropout_of_argument, written_dropout_of_value, written_dropout_of_nothing])
def test_a_write_through_a_dropout_that_is_its_argument(fn: Callable[[Tensor], Tensor]) -> None:
    """Inductor makes a copy of it: the write was lost, at every call."""
    options = {"capture": "emulated", "segment_compiler": "inductor", "min_segment_kernels": 1}
    compiled: Any = torch.compile(fn, backend="bcg", options=options)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 8)
            same = x.clone()
            torch.testing.assert_close(compiled(x), fn(same))
            torch.testing.assert_close(x, same)
    assert bcg.stats(compiled).eager_units == {"unit_alias": 1}


_calls = [0]


@bcg.eager_break(fake=lambda x: x.new_empty(*x.shape, 2)[..., 1])
def lazily_negated_now_and_then(x: Tensor) -> Tensor:
    _calls[0] += 1
    return torch.complex(x, x).conj().imag if _calls[0] % 2 == 0 else torch.stack([x, x], -1)[..., 1]


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def wider_than_its_fake(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, : x.shape[1]]


@pytest.mark.parametrize("made", [lazily_negated_now_and_then, wider_than_its_fake])
def test_what_a_break_gives_may_lie_otherwise_from_call_to_call(made: Any) -> None:
    """A lazily negated tensor was read as it lies, silently; other strides were an error at each call."""

    def fn(x: Tensor) -> Tensor:
        return made(made(x).sin() * 2).sin() * 2 + 1

    options = {"capture": "emulated", "segment_compiler": "inductor", "min_segment_kernels": 1}
    compiled: Any = torch.compile(fn, backend="bcg", options=options)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 8)
            _calls[0] = 0
            wanted = fn(x)
            _calls[0] = 0
            torch.testing.assert_close(compiled(x), wanted)
    assert bcg.stats(compiled).eager_units["unit_odd_input"]
