"""Break functions: in eager code, under Dynamo with ``fullgraph=True``, and in the program."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import bcg_compiler as bcg
from bcg_compiler.breaks import BoundBreak, Break
from bcg_compiler.errors import BreakArgumentError, BreakGradError, BreakMutationError, ContextError

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def full(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="bcg", fullgraph=True, options=options or None)


@bcg.eager_break(mutates_args=("out",))
def write_double(x: Tensor, out: Tensor, factor: float = 2.0) -> None:
    out.copy_(x * factor)


@bcg.eager_break(fake=like)
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.calls = 0

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def work(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.work((x + 1).sin()).cos() + 1


@torch.no_grad()
def test_a_break_function_is_an_ordinary_call_in_eager_code() -> None:
    x, out = torch.randn(3), torch.empty(3)
    write_double(x, out=out)
    assert torch.equal(out, x * 2) and torch.equal(doubled(x), x * 2)


@torch.no_grad()
def test_a_break_that_writes_into_a_buffer_needs_no_fake() -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        write_double((x + 1).sin() * 2, out, factor=3.0)
        return (out - 1).cos() * 2

    x = torch.randn(4)
    compiled = full(fn)
    assert torch.equal(compiled(x), fn(x))
    assert bcg.stats(compiled).reasons == {"eager_break": 1}


@torch.no_grad()
def test_the_instance_of_a_method_is_bound_and_no_argument() -> None:
    """Two instances of one class share Dynamo's entries; each must run its own method."""
    first, second = Scaled(2.0), Scaled(5.0)
    x = torch.randn(4)
    for _ in range(2):
        for model in (first, second):
            compiled = full(model)
            assert torch.equal(compiled(x), (((x + 1).sin() * model.scale).cos() + 1))
    assert (first.calls, second.calls) == (2, 2)
    third = copy.deepcopy(first)
    third.scale = 7.0
    assert torch.equal(full(third)(x), ((x + 1).sin() * 7.0).cos() + 1)
    assert (first.calls, third.calls) == (2, 3)


@torch.no_grad()
def test_a_program_does_not_keep_the_instance_alive() -> None:
    model = Scaled(2.0)
    full(model)(torch.randn(4))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("structure", "pick"),
    [
        (lambda a, b: (a, b), lambda r: r[0] - r[1]),
        (lambda a, b: [a, (b, None)], lambda r: r[0] - r[1][0]),
        (lambda a, b: {"first": a, "second": [b]}, lambda r: r["first"] - r["second"][0]),
        (lambda a, b: {"only": {"nested": a}}, lambda r: r["only"]["nested"]),
    ],
    ids=["tuple", "nested list", "dict", "nested dict"],
)
@torch.no_grad()
def test_results_keep_their_structure(structure: Callable[..., Any], pick: Callable[[Any], Tensor]) -> None:
    @bcg.eager_break(fake=lambda given: structure(torch.empty_like(given["x"]), torch.empty_like(given["y"])))
    def work(given: dict[str, Tensor]) -> Any:
        return structure(given["x"] * 2, given["y"] + 1)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return pick(work({"x": x.sin(), "y": y.cos()})) * 3

    x, y = torch.randn(4), torch.randn(4)
    assert torch.equal(full(fn)(x, y), fn(x, y))


@torch.no_grad()
def test_a_result_may_be_an_argument() -> None:
    """What is done to the result is done to the argument, as in eager code."""

    @bcg.eager_break(mutates_args=("out",), fake=lambda x, out: out)
    def work(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x * 2)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(x)
        result = work(x.sin(), out)
        result.add_(1)
        return out * 2, result

    x = torch.randn(4)
    for got, want in zip(full(fn)(x), fn(x), strict=True):
        assert torch.equal(got, want)


@torch.no_grad()
def test_an_undeclared_alias_keeps_the_order_of_effects() -> None:
    """The fake promises a new tensor and the body hands its argument back: a write to one is a write to both."""

    @bcg.eager_break(fake=like)
    def same(x: Tensor) -> Tensor:
        return x

    def fn(x: Tensor) -> Tensor:
        base = x + 0
        alias = same(base)
        before = base * 10  # must not move behind the write
        alias.add_(1)
        other = doubled(x)
        after = base * 100
        return before + after + other + doubled(other)

    x = torch.randn(4)
    assert torch.equal(full(fn)(x), fn(x))


class Live:
    pass


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: {"k": (o,)}], ids=["itself", "list", "dict"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_a_live_object_is_refused_by_name(compiled: bool, wrap: Callable[[Any], Any]) -> None:
    @bcg.eager_break(fake=like)
    def work(x: Tensor, meta: Any) -> Tensor:
        return x

    def fn(x: Tensor, meta: Any) -> Tensor:
        return work(x, wrap(meta))

    run = torch.compile(fn, backend="bcg") if compiled else fn
    with pytest.raises(BreakArgumentError, match=r"Argument 'meta' of break '.*work' is a live object of type Live"):
        run(torch.randn(2), Live())


@torch.no_grad()
def test_a_live_object_is_named_under_fullgraph() -> None:
    @bcg.eager_break(fake=like)
    def work(x: Tensor, meta: Any) -> Tensor:
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Argument 'meta' of break"):
        full(lambda x, meta: work(x, meta))(torch.randn(2), Live())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_break_under_grad_raises_by_name(compiled: bool) -> None:
    run = torch.compile(lambda x: doubled(x.sin()), backend="bcg") if compiled else lambda x: doubled(x.sin())
    with pytest.raises(BreakGradError, match=r"Break '.*doubled' has no gradient, but its argument 'x' requires grad"):
        run(torch.randn(3, requires_grad=True))


@pytest.mark.filterwarnings("ignore:bcg")
def test_a_break_beside_a_gradient_runs_its_body() -> None:
    """AOTAutograd would trace the break's fake and return uninitialised memory in its place."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return doubled(x.detach()) * w

    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    result = torch.compile(fn, backend="bcg")(x, w)
    result.sum().backward()
    assert torch.equal(result, x * 2 * w) and w.grad is not None and torch.equal(w.grad, x * 2)


def test_a_break_in_another_backend_is_refused() -> None:
    with pytest.raises(Exception, match="reached AOTAutograd, which would drop its body"), torch.no_grad():
        torch.compile(lambda x: doubled(x) + 1, backend="aot_eager")(torch.randn(3))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_an_undeclared_write_is_an_error(compiled: bool) -> None:
    @bcg.eager_break(mutates_args=("out",))
    def work(x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        x.zero_()

    def fn(x: Tensor) -> Tensor:
        y, out = x.sin(), torch.empty_like(x)
        work(y, out)
        return out + y

    with pytest.raises(BreakMutationError, match="wrote into its argument 'x', which it does not declare"):
        (full(fn) if compiled else fn)(torch.randn(3))


@torch.no_grad()
def test_writing_a_view_of_a_declared_argument_is_no_undeclared_write() -> None:
    @bcg.eager_break(mutates_args=("out",))
    def work(view: Tensor, out: Tensor) -> None:
        out.add_(1)

    def fn(x: Tensor) -> Tensor:
        out = x + 0
        work(out[1:], out)
        return out

    x = torch.randn(3)
    assert torch.equal(full(fn)(x), fn(x))


def test_a_misspelt_mutated_argument_is_an_error_when_declared() -> None:
    with pytest.raises(BreakArgumentError, match=r"mutates_args=\['ouput'\], but its parameters are x, output"):

        @bcg.eager_break(mutates_args=("ouput",))
        def work(x: Tensor, output: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("body", "fake", "said"),
    [
        (lambda x: x * 2, None, "was compiled as returning nothing"),
        (lambda x: (x, x), like, "was compiled as returning tensor"),
        (lambda x: {"b": x, "a": x}, lambda x: {"a": like(x), "b": like(x)}, "was compiled as returning"),
        (lambda x: x[1:], like, r"Result 0 of break .* is float32\[2\] on cpu, but its fake= says float32\[3\]"),
        (lambda x: x.double(), like, r"float64\[3\] on cpu, but its fake= says float32\[3\]"),
        (lambda x: 3, like, "returned a int. A break returns tensors"),
    ],
    ids=["no fake", "structure", "order of a dict", "shape", "dtype", "number"],
)
@torch.no_grad()
def test_a_result_unlike_the_fake_is_an_error(body: Any, fake: Any, said: str) -> None:
    """A swapped or reshaped result would otherwise reach the wrong readers in silence."""

    def work(x: Tensor) -> Any:
        return body(x)

    broken = bcg.eager_break(fake=fake)(work)
    with pytest.raises(BreakArgumentError, match=said):
        full(lambda x: (broken(x.sin()), x + 1))(torch.randn(3))


def some(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[1:])


@bcg.eager_break(fake=some)
def above_zero(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


@torch.no_grad()
def test_a_fake_may_leave_a_size_open_that_only_the_body_knows() -> None:
    """One graph for any size of the result, none and one included; ``call_with_break`` takes such a fake, too."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = above_zero((x * 2).sin())
        return kept.cos(), bcg.call_with_break(torch_free, kept.sum(0) + 1, fake=like)

    compiled = full(fn)
    for signs in ([1, -1, 1, 1], [-1, -1, -1, -1], [-1, 1, -1, -1], [1, 1, 1, 1]):
        x = torch.tensor(signs)[:, None] * torch.rand(4, 3)
        for found, wanted in zip(compiled(x), fn(x), strict=True):
            assert torch.equal(found, wanted)
    assert (bcg.stats(compiled).graphs, bcg.stats(compiled).replays) == (1, 3)


@torch.no_grad()
def test_a_size_of_fakes_without_symbols_cannot_be_left_open() -> None:
    with FakeTensorMode(), pytest.raises(BreakArgumentError, match=r"make them under FakeTensorMode\(shape_env="):
        BoundBreak(Break("above_zero", torch_free, fake=some))(torch.empty(4, 3))


@torch.no_grad()
def test_the_context_is_read_at_each_call_and_nests() -> None:
    @bcg.eager_break(fake=like)
    def work(x: Tensor) -> Tensor:
        return x * bcg.current_context().scale

    compiled = full(lambda x: work(x.sin()).cos() + 1)
    x = torch.randn(3)
    with bcg.forward_context(scale=2.0, other=1):
        for scale in (3.0, 4.0):
            with bcg.forward_context(scale=scale) as context:
                assert context.other == 1
                assert torch.equal(compiled(x), (x.sin() * scale).cos() + 1)
        assert torch.equal(compiled(x), (x.sin() * 2.0).cos() + 1)
    with pytest.raises(ContextError, match="No forward context is set"):
        compiled(x)
    with bcg.forward_context(scal=2.0), pytest.raises(ContextError, match=r"no field 'scale'\. Did you mean 'scal'"):
        compiled(x)


def test_the_context_is_back_after_an_exception_and_read_only() -> None:
    with bcg.forward_context(a=1) as outer:
        with pytest.raises(ZeroDivisionError), bcg.forward_context(a=2):
            raise ZeroDivisionError
        assert bcg.current_context().a == 1
        with pytest.raises(AttributeError, match="read-only"):
            outer.a = 3


class Holder:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def method(self, x: Tensor) -> Tensor:
        return x * self.scale


@torch.no_grad()
def test_call_with_break_takes_functions_methods_and_modules() -> None:
    holder, linear = Holder(3.0), nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        a = bcg.call_with_break(torch_free, x.sin(), fake=like)
        b = bcg.call_with_break(holder.method, a, fake=like)
        c = bcg.call_with_break(linear, b, fake=like)
        out = torch.empty_like(c)
        bcg.call_with_break(store, c, out, mutates_args=("out",))
        return out.cos()

    x = torch.randn(4)
    compiled = full(fn)
    assert torch.equal(compiled(x), fn(x))
    holder.scale = 4.0
    assert torch.equal(compiled(x), fn(x))
    assert bcg.stats(compiled).reasons["eager_break"] == 4


def torch_free(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() + 1)


def store(x: Tensor, out: Tensor) -> None:
    out.copy_(x + 1)


@torch.no_grad()
def test_a_static_method_may_be_a_break() -> None:
    class Ops:
        @bcg.eager_break(fake=like)
        @staticmethod
        def work(x: Tensor) -> Tensor:
            return x + 1

    x = torch.randn(3)
    assert torch.equal(full(lambda x: Ops.work(x).sin())(x), (x + 1).sin())


@torch.no_grad()
def test_a_break_inside_a_break_runs_inline() -> None:
    @bcg.eager_break(fake=like)
    def outer(x: Tensor) -> Tensor:
        return doubled(x) + 1

    compiled = full(lambda x: outer(x.sin()) * 3)
    x = torch.randn(3)
    assert torch.equal(compiled(x), (x.sin() * 2 + 1) * 3)
    assert bcg.stats(compiled).reasons["eager_break"] == 1


@torch.no_grad()
def test_modes_are_those_of_the_call_inside_a_break() -> None:
    seen = []

    @bcg.eager_break(fake=like)
    def work(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return x + 0

    def fn(x: Tensor) -> Tensor:
        x = work(x.sin())
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            x = work(x.sin())
        with torch.inference_mode():
            y = work(x + 1)
        return work(x) + y

    x = torch.randn(3)
    want = fn(x)
    eager, seen[:] = list(seen), []
    assert torch.equal(full(fn)(x), want)
    assert seen == eager
    assert not torch.is_autocast_enabled("cpu") and not torch.is_inference_mode_enabled()


# -- kinds of breaks ---------------------------------------------------------------------------------------------------


@bcg.eager_break(fake=like, reason="attention")
def attend(x: Tensor) -> Tensor:
    return x.softmax(-1)


@torch.no_grad()
def test_the_plan_shows_what_a_break_is_declared_to_be() -> None:
    def fn(x: Tensor) -> Tensor:
        return doubled(attend((x + 1).sin()).cos().tan()).cos() + 1

    x = torch.randn(4)
    compiled = full(fn, min_segment_kernels=1)
    assert torch.equal(compiled(x), fn(x))
    assert bcg.stats(compiled).reasons == {"attention": 1, "eager_break": 1}


@pytest.mark.parametrize(
    ("reason", "said"),
    [("atention", "Did you mean 'attention'"), ("host_sync", "Known: a2a_moe, attention, cp_gather_tail, dsa_indexer")],
)
def test_an_unknown_kind_of_break_is_refused_with_the_nearest_ones(reason: str, said: str) -> None:
    """Also a code that the compiler itself gives: nobody can declare what only facts show."""
    with pytest.raises(BreakArgumentError, match=rf"mine' declares reason='{reason}', which is no kind .*{said}"):

        @bcg.eager_break(reason=reason)
        def mine(x: Tensor) -> None: ...
