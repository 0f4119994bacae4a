"""Whole programs: results that alias, odd arguments, several graphs, several models, recursion."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)

Program = Callable[[SimpleNamespace, Tensor, Tensor], Any]


def programs(named: dict[str, Program]) -> Any:
    return pytest.mark.parametrize("program", list(named.values()), ids=list(named))


def _written_and_returned(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    b.scale_(x)
    return x, x[0], y


def _view_across_a_write(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    row, h = x[1], x.sin()
    b.scale_(x)
    return row, h[0], h


ALIASING: dict[str, Program] = {
    "argument_itself": lambda b, x, y: (x, b.wall(y).sin()),
    "both_arguments_swapped": lambda b, x, y: (b.wall(x), y, x)[1:],
    "view_of_an_argument": lambda b, x, y: (x[1:], x.t(), b.wall(y)),
    "expanded_argument": lambda b, x, y: (x[:, None].expand(-1, 2, -1), b.wall(y), x.view(-1)),
    "written_and_returned": _written_and_returned,
    "view_across_a_write": _view_across_a_write,
    "views_of_one_result": lambda b, x, y: (lambda h: (h, h[0], h.view(-1)[2:]))(b.wall(x).sin()),
    "views_of_a_break_s_result": lambda b, x, y: (lambda h: (h[0], h.t(), h.sin()))(b.wall(x)),
    "reshape_that_is_a_view": lambda b, x, y: (x.reshape(6, 4), x.contiguous(), b.wall(y).reshape(-1)),
    "to_that_copies_nothing": lambda b, x, y: (x.to(x.device), x.float(), b.wall(y).to(torch.float32)),
    "in_place_result": lambda b, x, y: (x.add_(1), y.mul_(b.wall(x))),
    "dropout_of_nothing": lambda b, x, y: (torch.dropout(x, 0.5, False), b.wall(y)),
    "items_of_one_tuple": lambda b, x, y: (*x.split(2), *x.unbind()[:2], b.wall(y)),
    "one_result_twice": lambda b, x, y: (lambda h: (h, h, [h]))(b.wall(x) + y),
    "detached": lambda b, x, y: (x.detach(), x.data, b.wall(y)),
}


@programs(ALIASING)
@ONE_FORM
def test_results_alias_as_in_eager(compile_pair: Any, breaks: SimpleNamespace, rand: Any, program: Program) -> None:
    """A result shared memory with an argument, with another result or with neither, other than in eager
    (pytorch/pytorch#170604). ``write_results`` writes into each and compares all.
    """
    pair = compile_pair(lambda x, y: program(breaks, x, y))
    for _ in range(2):
        made = (rand(4, 6), rand(4, 6))
        pair.call(made)
        expanded = any(0 in t.stride() for t in torch.utils._pytree.tree_leaves(pair.kept[-1][0]))
        if not expanded:
            pair.write_results(made)


@bcg.eager_break(fake=lambda x: x)
def same(x: Tensor) -> Tensor:
    return x


def _handed_back(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    h = x.sin()
    return h, same(h), same(h)[1:], y


def _view_of_a_result_behind_the_next_break(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    h = b.mix(x)
    return h, b.mix(h.exp()), h.t(), h[1:]


def _handed_back_view(b: SimpleNamespace, x: Tensor, y: Tensor) -> Any:
    return b.wall(x.sin()).cos(), same(y[1:]), y


@programs(
    {
        "argument": _handed_back,
        "view_behind_the_next_break": _view_of_a_result_behind_the_next_break,
        "view_of_an_argument": _handed_back_view,
    }
)
@pytest.mark.parametrize("breaks", ["eager_break"], indirect=True)
def test_results_that_a_break_makes_alias_as_in_eager(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, program: Program
) -> None:
    """A result that a break made at this call was copied on its own: it shared no memory with the value that it is, or
    that it is a view of, where both were returned.
    """
    pair = compile_pair(lambda x, y: program(breaks, x, y))
    for _ in range(3):
        pair.write_results((rand(4, 6), rand(4, 6)))


class _HandsBack(nn.Module):
    """Its break hands a part of a buffer through."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Any:
        part = self.cache[1:]
        part.add_(x.sin())
        return same(part), x.cos()


def test_part_of_a_buffer_that_a_break_hands_back(compile_pair: Any, rand: Any) -> None:
    """The caller got a copy of the module's memory where eager code returns the memory itself."""
    pair = compile_pair(_HandsBack())
    for _ in range(3):
        pair.write_results((rand(2, 4),))


class _Returns(nn.Module):
    """Returns its own state, and views of it."""

    cache: Tensor

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4), requires_grad=False)
        self.register_buffer("cache", torch.zeros(3, 4))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Any:
        self.cache.add_(x)
        self.breaks.scale_(self.cache[1])
        return self.weight, self.cache, self.cache[1:], self.breaks.wall(x) * self.weight.t()[0, 0]


@ONE_FORM
def test_results_that_are_the_module_s_own_state(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Writing into a returned buffer writes into the module's, and a later call changes it (pytorch/pytorch#158551)."""
    pair = compile_pair(_Returns(breaks))
    for _ in range(3):
        pair.write_results((rand(3, 4),))


# -- odd arguments ----------------------------------------------------------------------------------------------------


def test_no_argument_at_all(check: Any, breaks: SimpleNamespace) -> None:
    """Nothing to bind: the device is known from the constants only (Lightning-AI/lightning-thunder#1343)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(lambda: breaks.wall(torch.arange(4.0, device=device).sin()).cos(), [(), ()])


@pytest.mark.parametrize(("breaks", "dynamic"), [("custom_op", None), ("eager_break", True)], indirect=["breaks"])
def test_numbers_only(check: Any, breaks: SimpleNamespace, dynamic: bool | None) -> None:
    """No tensor among the arguments (Lightning-AI/lightning-thunder#2420)."""

    def program(n: int, scale: float) -> Any:
        h = breaks.wall(torch.full((n, 2), scale).cumsum(0))
        return h * n, n + 1

    check(program, [(3, 1.0), (4, 1.0), (4, 0.5), (6, 2.0)], dynamic=dynamic)


@ONE_FORM
def test_arguments_that_nobody_reads(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """They are not bound, and may be anything (Lightning-AI/lightning-thunder#2420)."""

    def program(x: Tensor, unused: Any, also: Any = None) -> Tensor:
        return breaks.wall(x.sin()).cos()

    check(program, [(rand(3), rand(2)), (rand(3), None), (rand(3), "text", rand(9)), (rand(3), rand(5), 2)])


@ONE_FORM
def test_nothing_is_returned(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Only effects (pytorch/pytorch#103985)."""

    def program(x: Tensor) -> None:
        x.add_(1)
        breaks.scale_(x)
        x.mul_(2)

    check(program, [(rand(3),), (rand(3),), (rand(0),)])


def test_program_without_a_break_and_one_of_breaks_only(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """One segment, one step that is no segment, and nothing to run at all (vllm-project/vllm#37361)."""
    check(lambda x: x.sin().cos() + 1, [(rand(3),) for _ in range(2)])
    check(lambda x: breaks.mix(breaks.wall(x)), [(rand(3),) for _ in range(2)])


@ONE_FORM
def test_small_segments_that_join_breaks(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Which operations are in which step changes nothing (vllm-project/vllm#37361)."""

    def program(x: Tensor, acc: Tensor) -> Any:
        h = breaks.wall(x.sin())
        acc.add_(h)
        h = breaks.noise(h.cos() * 2 + acc[:1])
        breaks.fold_(acc, h)
        return breaks.three(h.sin())[1] + acc, h

    for kernels in (0, 1, 2, 3, 100):
        torch.compiler.reset()
        pair = compile_pair(program, options={"min_segment_kernels": kernels})
        for _ in range(2):
            pair(rand(3, 4), rand(3, 4))


@ONE_FORM
def test_long_chain_of_breaks(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Many pieces, with values that skip over several of them (vllm-project/vllm#37361)."""

    def program(x: Tensor, acc: Tensor) -> Any:
        skipped = []
        h = x
        for layer in range(6):
            residual = h
            h = breaks.wall(h.sin() + layer)
            acc[layer].add_(h)
            if layer % 2:
                breaks.scale_(acc[layer - 1])
            h = h.cos() + residual
            skipped.append(h if layer % 3 else breaks.mix(acc[layer]))
        return torch.stack(skipped), h, acc.sum(0)

    pair = compile_pair(program)
    for _ in range(3):
        pair(rand(4), rand(6, 4))


# -- several graphs, several models -----------------------------------------------------------------------------------


def _cut(b: SimpleNamespace, x: Tensor, acc: Tensor) -> Any:
    h = b.wall(x.sin())
    acc.add_(h)
    torch._dynamo.graph_break()
    b.scale_(acc)
    h = h.cos() + acc
    torch._dynamo.graph_break()
    return b.wall(h), h, acc


def _cut_by_the_data(b: SimpleNamespace, x: Tensor, acc: Tensor) -> Any:
    h = b.wall(x.sin())
    b.scale_(acc)
    return b.wall(h).cos() + acc if h.sum() > 0 else b.mix(h).sin() - acc


def _cut_twice_by_the_data(b: SimpleNamespace, x: Tensor, acc: Tensor) -> Any:
    x = b.wall(x.sin())
    acc.add_(x)
    if x.max() > 0.5:
        b.scale_(acc)
        x = x * 0.5
    x = b.wall(x + acc)
    if x.sum() > 1:
        acc.sub_(x)
    return b.wall(x).cos(), acc * 2


@pytest.mark.parametrize("body", [_cut, _cut_by_the_data, _cut_twice_by_the_data], ids=lambda f: f.__name__[1:])
def test_function_that_dynamo_cuts(check: Any, breaks: SimpleNamespace, rand: Any, body: Program) -> None:
    """Several graphs for one call: effects stay in order and happen once (pytorch/pytorch#163129)."""
    calls = [(x, rand(4)) for x in (rand(4).abs(), -rand(4).abs(), rand(4))]
    check(lambda x, acc: body(breaks, x, acc), calls, fullgraph=False)


@ONE_FORM
def test_models_in_one_process_share_tensors(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Two compiled functions, one buffer: each sees what the other wrote (vllm-project/vllm#48941)."""
    shared = [torch.zeros(4), torch.zeros(4)]

    def writer(x: Tensor, cache: Tensor) -> Tensor:
        breaks.fold_(cache, x + 0)
        cache.mul_(0.5)
        return breaks.wall(cache).sin()

    def reader(x: Tensor, cache: Tensor) -> Tensor:
        return breaks.wall(x).cos() * cache.sum()

    pairs = [compile_pair(writer), compile_pair(reader)]
    for _ in range(4):
        for pair in pairs:
            x = rand(4)
            assert torch.equal(pair.compiled(x, shared[0]), pair.eager(x, shared[1]))
        assert torch.equal(*shared)


@ONE_FORM
def test_result_of_one_model_is_written_by_another(breaks: SimpleNamespace, rand: Any, way: dict[str, Any]) -> None:
    """Results in flight between two compiled stages (vllm-project/vllm#13417)."""

    def first(x: Tensor) -> Tensor:
        return breaks.wall(x.sin()).cos()

    def second(h: Tensor) -> Tensor:
        h.add_(1)
        breaks.scale_(h)
        return h.sum() + breaks.wall(h)

    stages = [torch.compile(f, backend="bcg", fullgraph=True, options=way) for f in (first, second)]
    flight = []
    for _ in range(4):
        x = rand(4)
        h, want = stages[0](x), first(x)
        flight.append((h, want, stages[1](h), second(want)))
        for got, wanted, out, wanted_out in flight:
            assert torch.equal(got, wanted) and torch.equal(out, wanted_out)


class _Recursive(nn.Module):
    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: Tensor, depth: int) -> Tensor:
        x = self.breaks.wall(self.lin(x)).sin()
        return x if depth == 0 else self(x, depth - 1) + x


@ONE_FORM
def test_recursion_of_a_function(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """A function that calls itself, with a depth that changes (pytorch/pytorch#170604)."""
    check(_Recursive(breaks).eval(), [(rand(2, 4), depth) for depth in (0, 2, 1)], fullgraph=False)


def test_break_that_runs_a_compiled_function(rand: Any, way: dict[str, Any]) -> None:
    """A body calls another compiled function, or the very one that it is a part of (pytorch/pytorch#170604)."""

    def inner(x: Tensor) -> Tensor:
        return (x.sin() * 2).cos()

    compiled_inner = torch.compile(inner, backend="bcg", fullgraph=True, options=way)
    depth = 0

    @bcg.eager_break(fake=lambda x: torch.empty_like(x))
    def body(x: Tensor) -> Tensor:
        nonlocal depth
        if depth == 2:
            return compiled_inner(x)
        depth += 1
        try:
            return compiled_outer(x * 0.5) if compiling else outer(x * 0.5)
        finally:
            depth -= 1

    def outer(x: Tensor) -> Tensor:
        return body(x.cos()).sin() + x

    compiled_outer = torch.compile(outer, backend="bcg", fullgraph=True, options=way)
    for _ in range(3):
        x = rand(4)
        compiling = True
        got = compiled_outer(x)
        compiling = False
        assert torch.equal(got, outer(x))


@ONE_FORM
def test_compiled_functions_call_each_other(breaks: SimpleNamespace, rand: Any, way: dict[str, Any]) -> None:
    """A compiled function within another one is a part of it (pytorch/pytorch#170604)."""

    def inner(x: Tensor) -> Tensor:
        x.mul_(2)
        return breaks.wall(x).sin()

    compiled_inner = torch.compile(inner, backend="bcg", options=way)

    def outer(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        h = fn(x.cos()) + 1
        return breaks.mix(h) * fn(h)

    compiled = torch.compile(lambda x: outer(x, compiled_inner), backend="bcg", options=way)
    for _ in range(3):
        x = rand(4)
        assert torch.equal(compiled(x), outer(x, inner))


@ONE_FORM
def test_view_that_nobody_reads(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """A view beside a break that no line reads, such as what a debug print left behind: the code of the capture named
    a value that it had not made, and the whole program was never captured.
    """

    def program(x: Tensor) -> Any:
        h = x.sin()
        y = breaks.wall(x)
        h.unbind(1)
        return h.t(), y

    pair = compile_pair(program)
    with bcg.counters.expect(replays=1, eager_runs={"warm_up": 1}):
        for _ in range(2):
            pair(rand(4, 4))


def test_empty_views_of_an_argument_are_returned(compile_pair: Any, rand: Any) -> None:
    """No element has no address, and where a view lies in its argument was told by addresses."""
    pair = compile_pair(lambda x: (x * 2, x[:0], x[:, 1:][:0], x[:, 1:]))
    with bcg.counters.expect(replays=2, eager_runs={"warm_up": 1}):
        for _ in range(3):
            pair(rand(4, 4))


def _shared_and_conjugate(b: SimpleNamespace, x: Tensor) -> Any:
    h = b.wall(x) * 2
    return h, h.conj(), h.conj().imag


CONJUGATE = {
    "of_an_argument": lambda b, x: (x * 2, x.conj(), x.mH),
    "of_an_argument_behind_a_break": lambda b, x: (b.wall(x.sin()) * 2, x[1:].conj()),
    "negative_imag_of_an_argument": lambda b, x: (b.wall(x + 1), x.conj().imag, x.conj()[1:].imag),
    "of_a_result": _shared_and_conjugate,
    "of_a_break_s_result": lambda b, x: (lambda h: (h * 2, h.conj(), h.conj().imag))(b.wall(x.sin())),
}


@pytest.mark.parametrize("conjugate_argument", [False, True])
@pytest.mark.parametrize("program", list(CONJUGATE.values()), ids=list(CONJUGATE))
@ONE_FORM
def test_conjugate_and_negative_views_are_returned_as_such(
    check: Any, breaks: SimpleNamespace, rand: Any, program: Callable[..., Any], conjugate_argument: bool
) -> None:
    """A view for the caller was made anew from shape and strides: it lost its conj or neg bit, and so its sign."""
    numbers = torch.view_as_complex(rand(3, 4, 2))
    made = lambda: (numbers.clone().conj() if conjugate_argument else numbers.clone(),)  # noqa: E731
    check(lambda x: program(breaks, x), [made, made])


@ONE_FORM
def test_detached_results_require_no_gradient(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """``x.detach()`` came back requiring a gradient where the argument or the weight does, and ``numpy()`` refused
    it. ``Pair`` compares ``requires_grad``.
    """
    weight, x = nn.Parameter(rand(4)), rand(4)
    pair = check(
        lambda x: (breaks.wall(x.sin()) * weight, weight.detach()[1:], x.detach(), x, weight),
        [lambda: (x.clone().requires_grad_(),)] * 2,
    )
    assert bcg.stats(pair.compiled).replays


def _quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.sin(), 0.1, 0, torch.qint8).dequantize() + 1


def _mkldnn(x: Tensor) -> Tensor:
    return x.sin().to_mkldnn().to_dense() + 1


@pytest.mark.parametrize("program", [_quantised, _mkldnn], ids=lambda f: f.__name__[1:])
@pytest.mark.skipif(torch.cuda.is_available(), reason="layouts of the CPU")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_intermediates_that_are_no_plain_tensors(check: Any, rand: Any, program: Callable[..., Any]) -> None:
    """A value that is more than shape and strides over a storage was captured: the second call ended in an error."""
    check(program, [(rand(4, 4),), (rand(4, 4),)], fullgraph=False)


def test_model_on_the_meta_device(way: dict[str, Any]) -> None:
    """There is no autocast for it, which a replay switched off: the second call ended in an error."""
    compiled = torch.compile(lambda x: (x + 1) @ x, backend="bcg", fullgraph=True, options=way)
    for _ in range(3):
        made = compiled(torch.empty(4, 4, device="meta"))
        assert made.is_meta and made.shape == (4, 4)
