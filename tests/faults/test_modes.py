"""Autocast, grad mode, inference mode and vmap: around the call, around breaks, and across them."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


def _around_all(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    with region():
        h = b.wall(x @ x)
        return h @ x, h + 1


def _before_the_break(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    with region():
        h = x @ x
    return b.wall(h) @ h, x @ x


def _after_the_break(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    h = b.wall(x @ x)
    with region():
        return h @ x, b.wall(h).float() + 1


def _only_the_break(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    h = x @ x
    with region():
        g = b.wall(h)
    return g @ h


def _opened_twice(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    with region():
        h = x @ x
    g = b.wall(x) @ x
    with region():
        return b.wall(h) @ h, g, g @ x


def _nested(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    with region():
        h = x @ x
        with torch.autocast(x.device.type, enabled=False):
            g = b.wall(h.float() @ x)
        with torch.inference_mode(), torch.autocast(x.device.type, torch.float16):
            f = b.wall(x) @ x
        return h @ h, g @ g, f.float() @ x


def _crossing_breaks(b: SimpleNamespace, x: Tensor, region: Any) -> Any:
    """Pure operations that move across joined breaks take their mode with them."""
    first = b.wall(x)
    with region():
        made = x @ x
    second = b.wall(x + 1)
    return first @ x, made @ made, second @ x


REGIONS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.autocast("cpu" if not torch.cuda.is_available() else "cuda", torch.bfloat16),
    "no_autocast": lambda: torch.autocast("cpu" if not torch.cuda.is_available() else "cuda", enabled=False),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "not_inference": lambda: torch.inference_mode(False),
}
OUTER = {"plain": nullcontext, "autocast": REGIONS["bfloat16"], "inference_mode": torch.inference_mode}
NO_REGION_BODIES = [_around_all, _only_the_break, _nested]


@pytest.mark.parametrize(
    "body",
    [*NO_REGION_BODIES, _before_the_break, _after_the_break, _opened_twice, _crossing_breaks],
    ids=lambda f: f.__name__[1:],
)
@pytest.mark.parametrize("region", list(REGIONS))
@ONE_FORM
def test_regions_around_breaks(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any], region: str
) -> None:
    """A mode acted at capture only, or stayed on past its region (pytorch/pytorch#193044). ``Pair`` compares dtypes,
    ``requires_grad``, ``is_inference`` and the modes after the call.
    """
    entered = REGIONS[region]
    check(lambda x: body(breaks, x, entered), [(rand(4, 4),) for _ in range(2)])


@pytest.mark.parametrize("body", NO_REGION_BODIES, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("outer", list(OUTER))
@pytest.mark.parametrize("breaks", ["eager_break"], indirect=True)
def test_regions_within_the_caller_s(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any], outer: str
) -> None:
    """The mode of the caller counts, and may change from call to call (pytorch/pytorch#193044)."""
    pair = compile_pair(lambda x: body(breaks, x, REGIONS["no_grad"]))
    for entered in (OUTER[outer], nullcontext, OUTER[outer]):
        with entered():
            pair(rand(4, 4))
            pair(rand(4, 4))


@bcg.eager_break(fake=lambda x: x.new_empty(8))
def modes_seen(x: Tensor) -> Tensor:
    """What mode a break's body runs in."""
    seen = [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") == torch.bfloat16,
        torch.get_autocast_dtype("cpu") == torch.float16,
        torch.is_autocast_cache_enabled(),
    ]
    return torch.tensor([*map(float, seen), x.numel(), 0], device=x.device)


@pytest.mark.parametrize("region", [*REGIONS, "float16_without_cache"])
@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, REGIONS["bfloat16"]], ids=["a", "b", "c"])
def test_body_of_a_break_runs_in_the_mode_of_its_place(check: Any, rand: Any, region: str, outer: Any) -> None:
    """A break's grad, autocast and inference state were those of the caller and not of its place in the program
    (pytorch/pytorch#193044).
    """
    cached = lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)  # noqa: E731
    entered = REGIONS.get(region, cached)

    def program(x: Tensor) -> Any:
        before = modes_seen(x)
        with entered():
            within = modes_seen(x.sin())
        return before, within, modes_seen(x)

    with outer():
        check(program, [(rand(4, 4),)])


@ONE_FORM
@pytest.mark.parametrize("leave", [torch.is_grad_enabled, torch.get_default_dtype], ids=["grad", "default_dtype"])
def test_mode_that_the_function_leaves_on_stays_on(
    breaks: SimpleNamespace, rand: Any, way: dict[str, Any], leave: Callable[[], Any], request: Any
) -> None:
    """A function that switches a mode for its caller still does (pytorch/pytorch#193044)."""

    def program(x: Tensor) -> Tensor:
        h = breaks.wall(x.sin())
        if leave is torch.is_grad_enabled:
            torch.set_grad_enabled(True)
        else:
            torch.set_default_dtype(torch.float64)
        return h + torch.ones(3, device=x.device)

    seen = []
    for fn in (program, torch.compile(program, backend="bcg", options=way)):
        for _ in range(2):
            try:
                with torch.no_grad():
                    seen.append((fn(rand(3)).dtype, leave()))
            finally:
                torch.set_default_dtype(torch.float32)
    assert seen[:2] == seen[2:]


# -- gradients --------------------------------------------------------------------------------------------------------


class _Trained(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.steps.add_(1)
        state.add_(x.detach().sum())
        h = self.drop(self.norm(self.lin(x)))
        return h.relu() * self.steps, h


@pytest.mark.filterwarnings("ignore:bcg. the model was called under grad mode")
@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_effects_under_grad_mode(compile_pair: Any, rand: Any, training: bool) -> None:
    """A model called with gradients runs unsplit: its results, gradients, effects and random numbers are those of eager
    (pytorch/pytorch#193044).
    """
    pair = compile_pair(_Trained().train(training))
    for mode in (torch.enable_grad, torch.no_grad, torch.enable_grad):
        with mode():
            pair(rand(5, 6), torch.zeros(()))
            for got, want in pair.kept[-1:]:
                if want[0].requires_grad:
                    got[0].sum().backward()
                    want[0].sum().backward()
            grads = [[p.grad for p in module.parameters()] for module in (pair.module, pair.eager)]
            assert all(torch.equal(a, c) for a, c in zip(*grads, strict=True))
        pair.kept.clear()


@ONE_FORM
@pytest.mark.filterwarnings("ignore:bcg. the model was called under grad mode")
def test_op_without_a_gradient_runs_under_grad_mode(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """An inference model called without ``no_grad``: eager runs it, and so must the compiled one
    (pytorch/pytorch#193044).
    """
    lin = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: lin(breaks.mix(lin(x))), backend="bcg", fullgraph=True)
    with torch.enable_grad():
        x = rand(2, 4)
        assert torch.equal(compiled(x), lin(breaks.mix(lin(x))))


# -- vmap -------------------------------------------------------------------------------------------------------------


def _mapped(b: SimpleNamespace, x: Tensor) -> Any:
    return torch.vmap(lambda row: row.sin() * row.sum())(b.wall(x)).cos(), b.wall(x)


def _mapped_between(b: SimpleNamespace, x: Tensor) -> Any:
    h = b.wall(x.sin())
    h = torch.vmap(torch.dot)(h, x)
    return b.wall(h).cos() + x.sum()


def _mapped_twice(b: SimpleNamespace, x: Tensor) -> Any:
    outer = torch.vmap(torch.vmap(lambda a, c: a * c + 1, in_dims=(0, None)), in_dims=(None, 0))
    return outer(b.wall(x[0]), x[:, 0]), b.wall(x).sin()


def _mapped_in_a_region(b: SimpleNamespace, x: Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        h = torch.vmap(lambda row: row[None] @ row[:, None])(b.wall(x))
    return h, b.wall(x) @ x.t()


def _mapped_with_random(b: SimpleNamespace, x: Tensor) -> Any:
    h = torch.vmap(lambda row: row + torch.rand_like(row), randomness="different")(b.noise(x))
    return h, b.noise(h)


def _mapped_write(b: SimpleNamespace, x: Tensor) -> Any:
    def body(row: Tensor) -> Tensor:
        made = row * 2
        made.add_(row.sum())
        return made

    return torch.vmap(body)(b.wall(x)), b.wall(x)


def _break_within(b: SimpleNamespace, x: Tensor) -> Any:
    return torch.vmap(lambda row: b.wall(row.sin()).cos())(x), x + 1


MAPPED = [_mapped, _mapped_between, _mapped_twice, _mapped_in_a_region, _mapped_with_random, _mapped_write]


@pytest.mark.parametrize(
    ("breaks", "body"),
    [
        *(pytest.param("custom_op", body, id=body.__name__[1:]) for body in [*MAPPED, _break_within]),
        pytest.param("eager_break", _break_within, id="break_function_within"),
    ],
    indirect=["breaks"],
)
def test_mapped_functions_around_and_beside_breaks(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[..., Any]
) -> None:
    """The values of a vmap exist only between its ends: a cut within it loses them (pytorch/pytorch#193044). Its ends,
    which compute nothing, counted as something that a capture does once: the capture failed, and all ran eagerly.
    """
    before = bcg.counters.snapshot()
    check(lambda x: body(breaks, x), [(rand(3, 4),), (rand(5, 4),)])
    assert set(bcg.counters.eager_runs - before.eager_runs) == {"warm_up"}


@ONE_FORM
def test_compiled_function_within_a_vmap(breaks: SimpleNamespace, rand: Any, way: dict[str, Any]) -> None:
    """A compiled function is called with batched tensors, alone or among real ones (pytorch/pytorch#193044)."""

    def program(row: Tensor, y: Tensor) -> Tensor:
        return (row.sin() * 2 + y).cos()

    compiled = torch.compile(program, backend="bcg", options=way)
    for n in (3, 3, 5):
        x, y = rand(n, 4), rand(4)
        assert torch.equal(torch.vmap(compiled, in_dims=(0, None))(x, y), torch.vmap(program, in_dims=(0, None))(x, y))
        assert torch.equal(compiled(x, y), program(x, y))


def test_compiled_function_within_functionalize(rand: Any, way: dict[str, Any]) -> None:
    """A compiled function called with the wrappers of ``torch.func.functionalize`` was captured with them: wrong
    numbers from the second call on.
    """

    def program(x: Tensor) -> Tensor:
        return ((x + 1) * 1.5).sin() + x.cos()

    compiled = torch.compile(program, backend="bcg", options=way)
    for _ in range(3):
        x = rand(3)
        assert torch.equal(torch.func.functionalize(compiled)(x), program(x))
        assert torch.equal(compiled(x), program(x))


# -- regions that Dynamo keeps as one operation -----------------------------------------------------------------------


@pytest.mark.parametrize("breaks", ["custom_op", "eager_break", "call_with_break"], indirect=True)
def test_break_within_a_checkpointed_region_is_a_break(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, request: Any
) -> None:
    """A break that the tracer hides within a region of its own was captured with it (pytorch/pytorch#163129)."""

    def program(x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda y: breaks.wall(y.sin()).cos(), x, use_reentrant=False)
        return h + 1

    pair = compile_pair(program)
    pair(rand(3))
    pair(rand(3))
    assert bcg.stats(pair.compiled).breaks == 1


@pytest.mark.parametrize("breaks", ["custom_op", "eager_break"], indirect=True)
def test_write_within_a_checkpointed_region_keeps_its_place(
    check: Any, breaks: SimpleNamespace, rand: Any, request: Any
) -> None:
    """What the region writes is read after it, by pieces that could run before it (pytorch/pytorch#163129)."""

    def program(x: Tensor) -> Any:
        h = x + 1

        def region(y: Tensor) -> Tensor:
            breaks.scale_(h)
            return y.sin()

        first = breaks.wall(x)
        g = torch.utils.checkpoint.checkpoint(region, first, use_reentrant=False)
        read = h.cos()
        return breaks.wall(read) + g, read

    check(program, [(rand(3),) for _ in range(2)])


@ONE_FORM
@pytest.mark.parametrize("kind", ["checkpoint", "cond", "compile_region"])
def test_regions_beside_breaks(check: Any, breaks: SimpleNamespace, rand: Any, kind: str) -> None:
    """Regions with a graph of their own, with different data, between breaks (pytorch/pytorch#163129)."""

    @torch.compiler.nested_compile_region
    def region(y: Tensor) -> Tensor:
        return y.sin() * 2

    def program(x: Tensor) -> Any:
        h = breaks.wall(x.sin())
        if kind == "checkpoint":
            h = torch.utils.checkpoint.checkpoint(lambda y: y.cos() @ x, h, use_reentrant=False)
        elif kind == "cond":
            h = torch.cond(h.sum() > 0, lambda y: y.cos(), lambda y: y.sin() - 1, (h,))
        else:
            h = region(h) + region(h.cos())
        return breaks.wall(h).cos() + h

    check(program, [(x,) for x in (rand(3, 3).abs(), -rand(3, 3).abs(), rand(3, 3))])


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def noted(x: Tensor) -> Tensor:
    """Its log says in which modes it ran."""
    bcg.current_context().bodies.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    return x.clone()


def _inference_within_grad(x: Tensor) -> Any:
    with torch.enable_grad():
        with torch.inference_mode():
            h = noted(x.sin())
        g = noted(x.cos())
    return h, g, noted(x)


def _no_inference_within_inference(x: Tensor) -> Any:
    with torch.inference_mode():
        with torch.inference_mode(False):
            h = noted(x.sin())
        return h, noted(x.cos())


def _grad_set_within_autocast(x: Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        torch.set_grad_enabled(True)
        h = noted(x @ x)
    g = noted(x.cos())  # autocast leaves grad mode as it is
    torch.set_grad_enabled(False)
    return h, g, noted(x)


@pytest.mark.parametrize(
    "body",
    [_inference_within_grad, _no_inference_within_inference, _grad_set_within_autocast],
    ids=lambda f: f.__name__[1:],
)
def test_break_runs_in_the_modes_of_eager(compile_pair: Any, rand: Any, bodies: list[Any], body: Any) -> None:
    """Inference regions set grad mode and put it back; autocast regions do neither."""
    pair = compile_pair(body)
    with bcg.forward_context(bodies=bodies):
        for _ in range(3):
            pair(rand(4, 4))


@ONE_FORM
def test_weights_changed_between_autocast_regions_are_read(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any
) -> None:
    """Autocast keeps the cast of a weight until its region ends: a capture within it read that copy for ever."""
    pair = compile_pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            pair(rand(2, 4))
            pair(rand(2, 4))
        pair.both(lambda module: module[0].weight.data.mul_(2))


class _Cache(nn.Module):
    cache: Tensor

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(3, 4))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        self.cache.add_(x.sin())
        self.cache[1:].mul_(0.5)
        return self.breaks.wall(self.cache.cos()) + self.cache


@ONE_FORM
def test_buffer_made_in_inference_mode_is_written_by_segments(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any
) -> None:
    """As engines allocate their KV caches. Recorded outside of inference mode each write was refused, and a break."""
    with torch.inference_mode():
        pair = compile_pair(_Cache(breaks))
        for _ in range(4):
            pair(rand(3, 4))
    assert "capture_failed" not in bcg.stats(pair.compiled).reasons
    assert bcg.stats(pair.compiled).replays == 3
