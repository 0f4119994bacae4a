"""What the fault tests share: a pair of eager and compiled callables that must agree, and breaks in every form.

``check(fn, calls)`` calls ``fn`` and ``torch.compile(fn, backend="bcg")`` with equal arguments, several times each, and
compares whatever a caller could see: see ``Pair``. ``breaks`` holds the same few break bodies once as custom ops, once
as ``@bcg.eager_break`` functions and once through ``bcg.call_with_break``.
"""

import copy
import dataclasses
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: The ways to run that every fault must stay away from. One kernel makes a segment, so that small tests have segments.
WAYS = {
    "off": {"capture": "off", "min_segment_kernels": 1},
    "captured": {"capture": "auto", "min_segment_kernels": 1},
}

#: What compares bits; ``--segments inductor`` puts something else in its place.
EQUAL = torch.equal

#: The names of the break bodies that ran, in order.
_bodies: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _no_profile() -> Iterator[None]:
    """Dynamo times the guards of everything it compiles, with cold caches: a third of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Each test starts without compiled code, without gradients and from one random state."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    on_device = torch.device(DEVICE) if DEVICE == "cuda" else nullcontext()  # what tests make without a word of where
    with torch.no_grad(), on_device:
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test in all ways, or in those that its module names in ``WAYS``.

    The first call of a shape runs eagerly where the later ones are captured: that way alone shows most faults of both.
    """
    if "way" in metafunc.fixturenames:
        ways = getattr(metafunc.module, "WAYS", tuple(WAYS))
        if metafunc.config.getoption("segments") != "eager":
            ways = [way for way in ways if way != "off"]  # nothing is compiled where nothing is captured
        metafunc.parametrize("way", ways, indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of one way to run."""
    return WAYS[request.param]


@pytest.fixture
def rand() -> Callable[..., Tensor]:
    """``rand(*shape)``: normal numbers, the same in every run of the test."""
    generator = torch.Generator().manual_seed(7)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator, device="cpu").to(DEVICE, dtype)


@pytest.fixture
def ints() -> Callable[..., Tensor]:
    """``ints(value, …)``: a tensor of integers."""
    return lambda *values: torch.tensor(values, dtype=torch.long, device=DEVICE)


@pytest.fixture
def bodies() -> list[str]:
    """The names of the break bodies of ``breaks`` that ran, in order."""
    _bodies.clear()
    return _bodies


@pytest.fixture
def compile_pair(way: dict[str, Any]) -> Callable[..., "Pair"]:
    """``compile_pair(fn, **options_of_torch_compile)``: a ``Pair`` to call step by step."""

    def make(fn: Callable[..., Any], *, options: dict[str, Any] | None = None, **given: Any) -> Pair:
        return Pair(fn, {"fullgraph": True, **given, "options": {**way, **(options or {})}})

    return make


@pytest.fixture
def check(compile_pair: Callable[..., "Pair"]) -> Callable[..., "Pair"]:
    """``check(fn, calls)``: call a ``Pair`` with each of ``calls``, in three rounds.

    A call is a tuple of arguments, a ``Call`` (``check.call``), or a function that makes either, for arguments that are
    views. The arguments of the second round are others than those of the first and equal to them; those of the third
    are the tensors of the first, filled again.
    """

    def run(fn: Callable[..., Any], calls: Iterable[Any], **given: Any) -> Pair:
        pair = compile_pair(fn, **given)
        calls = list(calls)
        first = [pair.call(made) for made in calls]
        for made in calls:
            pair.call(made)
        for made, (eager, compiled) in zip(calls, first, strict=True):
            _fill(eager, made)
            _fill(compiled, made)
            pair.run(eager, compiled)
        return pair

    run.call = lambda *args, **kwargs: Call(args, kwargs)  # type: ignore[attr-defined]
    return run


@dataclasses.dataclass
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given = _tensors(self)  # the call itself may take them out of their containers


def _make(made: Any) -> Call:
    """A call of its own from a tuple, a ``Call`` or a function that makes one."""
    made = made() if callable(made) else copy.deepcopy(made)  # tensors over one storage stay so
    return made if isinstance(made, Call) else Call(made)


def _fill(call: Call, made: Any) -> None:
    """Give the tensors of ``call`` the values of a fresh one."""
    fresh = _make(made)
    kept = {}
    for old, new in zip(call.given, fresh.given, strict=True):
        old.untyped_storage().copy_(new.untyped_storage())
        kept[id(new)] = old
    # The containers are new: the call may have changed them.
    call.args, call.kwargs = copy.deepcopy((fresh.args, fresh.kwargs), kept)


class Pair:
    """A callable and its compiled form, called together and compared.

    Each call compares results (bits, types, structure, strides, what shares memory with what), the arguments with the
    memory around them, the module's state, the random state, grad, inference and autocast mode, and which break
    bodies ran how often. Results of earlier calls are kept and compared again: they must change as eager ones do.
    ``module`` and ``eager`` are the two modules, where ``fn`` is one: ``both`` changes them alike.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]) -> None:
        if isinstance(fn, nn.Module):
            fn.to(DEVICE)
        self.module = fn
        self.eager = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
        self.compiled = torch.compile(fn, backend="bcg", **options)
        self.kept: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of both with copies of these arguments. Returns the compiled one's result."""
        self.call(Call(args, kwargs))
        return self.kept[-1][0]

    def call(self, made: Any) -> tuple[Call, Call]:
        """One call of both; returns the arguments that each was given."""
        eager, compiled = _make(made), _make(made)
        self.run(eager, compiled)
        return eager, compiled

    def run(self, eager: Call, compiled: Call) -> None:
        """One call of both with the very tensors given."""
        before = _Outside.now()
        _bodies.clear()
        want = self.eager(*eager.args, **eager.kwargs)
        after, ran = _Outside.now(), list(_bodies)
        before.restore()
        _bodies.clear()
        programs = _program_runs()
        got = self.compiled(*compiled.args, **compiled.kwargs)
        assert _program_runs() > programs, "no program of the backend ran: the call shows nothing"
        assert _bodies == ran, f"break bodies ran {_bodies}, in eager {ran}"
        after.compare(_Outside.now())
        self.compare(got, want, compiled, eager)
        self.kept.append((got, want))

    def compare(self, got: Any, want: Any, compiled: Call, eager: Call) -> None:
        """Results, arguments, module and kept results of both, now."""
        _same(got, want, "result")
        self.compare_state(compiled, eager)
        seen = [
            _sharing([*_tensors(result), *_tensors(call), *_tensors(_state(module))])
            for result, call, module in ((got, compiled, self.module), (want, eager, self.eager))
        ]
        assert seen[0] == seen[1], f"results, arguments and state share memory like {seen[0]}, in eager {seen[1]}"
        for index, (old_got, old_want) in enumerate(self.kept):
            _same(old_got, old_want, f"result kept from call {index}")

    def compare_state(self, compiled: Call, eager: Call) -> None:
        """What a call may have left behind in its arguments and in the module."""
        _same((compiled.args, compiled.kwargs), (eager.args, eager.kwargs), "argument")
        for one, other in zip(_tensors(compiled), _tensors(eager), strict=True):
            _same(_memory(one), _memory(other), "memory around an argument")
        _same(_state(self.module), _state(self.eager), "module")

    def both(self, change: Callable[[Any], Any]) -> None:
        """Make the same change to the module and to its eager copy."""
        change(self.module)
        change(self.eager)

    def write_results(self, made: Any) -> None:
        """One call, then write into each result in turn, as the caller may: both must change the same things."""
        eager, compiled = self.call(made)
        got, want = self.kept[-1]
        for one, other in zip(_tensors(got), _tensors(want), strict=True):
            one.add_(1)
            other.add_(1)
            self.compare(got, want, compiled, eager)

    def fails(self, made: Any, error: type[BaseException], *words: str, note: Sequence[str] = ()) -> BaseException:
        """One call that must fail alike in both: the type, the text, and what is left behind.

        ``words`` must be in the text (in that of a cause, where Dynamo wraps an error of its own), ``note`` in a note
        that the backend added.
        """
        eager, compiled = _make(made), _make(made)
        before = _Outside.now()
        with pytest.raises(error) as wanted:
            self.eager(*eager.args, **eager.kwargs)
        after = _Outside.now()
        before.restore()
        with pytest.raises(Exception) as seen:
            self.compiled(*compiled.args, **compiled.kwargs)
        text = _text_of_causes(seen.value)
        for word in (*words, *([] if words else [str(wanted.value)])):
            assert word in text, f"{word!r} is not in the error: {text}"
        if note:
            assert type(seen.value) is type(wanted.value)
            notes = [n for n in getattr(seen.value, "__notes__", []) if n.startswith("bcg: ")]
            assert len(notes) == 1, f"one note of the backend's wanted, seen: {notes}"
            for word in note:
                assert word in notes[0], f"{word!r} is not in the note: {notes[0]}"
        after.compare(_Outside.now())
        self.compare_state(compiled, eager)
        return seen.value


@dataclasses.dataclass
class _Outside:
    """What a call may change outside of its arguments: the random state and the modes of the thread."""

    random: Tensor
    cuda: list[Tensor]
    modes: tuple[Any, ...]

    @classmethod
    def now(cls) -> "_Outside":
        modes = (
            *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda")),
            torch._C._functorch.get_dynamic_layer_stack_depth(),
        )
        cuda = torch.cuda.get_rng_state_all() if DEVICE == "cuda" else []
        return cls(torch.get_rng_state(), cuda, modes)

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def compare(self, seen: "_Outside") -> None:
        assert seen.modes == self.modes, f"modes after the call {seen.modes}, in eager {self.modes}"
        assert torch.equal(seen.random, self.random), "the random state after the call is not that of eager"
        assert all(map(torch.equal, seen.cuda, self.cuda)), "the random state of the device is not that of eager"


def _same(got: Any, want: Any, what: str) -> None:
    """Equal to the last bit, in type, structure and layout."""
    assert type(got) is type(want), f"{what}: {type(got)} instead of {type(want)}"
    if isinstance(want, Tensor):
        for name in ("shape", "dtype", "device", "requires_grad", "layout"):
            seen, wanted = getattr(got, name), getattr(want, name)
            assert seen == wanted, f"{what}: {name} {seen} instead of {wanted}"
        assert got.is_inference() == want.is_inference(), f"{what}: is_inference {got.is_inference()}"
        # Kernels on fakes and real ones may disagree about the stride of a dimension with one element or none.
        told = [d for d in range(want.dim()) if want.numel() and want.shape[d] > 1]
        strides = [[t.stride(d) for d in told] for t in (got, want)]
        assert strides[0] == strides[1], f"{what}: strides {got.stride()} instead of {want.stride()}"
        assert _equal(got, want), f"{what}: {got} instead of {want}"
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{what}: keys {list(got)} instead of {list(want)}"
        for key in want:
            _same(got[key], want[key], f"{what}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{what}: {len(got)} items instead of {len(want)}"
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            _same(one, other, f"{what}[{index}]")
    elif dataclasses.is_dataclass(want):
        _same(vars(got), vars(want), what)
    elif isinstance(want, float):
        same = (math.isnan(got) and math.isnan(want)) or struct.pack("d", got) == struct.pack("d", want)
        same = same or (torch.equal is not EQUAL and math.isclose(got, want, rel_tol=1e-4))
        assert same, f"{what}: {got} instead of {want}"
    elif not isinstance(want, nn.Module):
        assert got == want, f"{what}: {got} instead of {want}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _equal(one: Tensor, other: Tensor) -> bool:
    """To the last bit, or as close as ``--segments`` asks for (tests/conftest.py)."""
    return EQUAL(_bits(one), _bits(other)) if torch.equal is EQUAL else torch.equal(one.detach(), other.detach())


def _memory(tensor: Tensor) -> Tensor:
    """All whole elements of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.itemsize,)
    )


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a call, a state, or a result."""
    if isinstance(value, Call):
        value = (value.args, value.kwargs)
    leaves = tree_leaves(value)
    leaves = [part for leaf in leaves for part in (vars(leaf).values() if dataclasses.is_dataclass(leaf) else [leaf])]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _sharing(tensors: list[Tensor]) -> list[int]:
    """For each tensor the first one over the same storage."""
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage()._cdata, index) for index, t in enumerate(tensors)]


def _state(module: Any) -> dict[str, Any]:
    """Parameters, buffers and plain attributes of a module and of those in it."""
    if not isinstance(module, nn.Module):
        return {}
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for group in (part._parameters, part._buffers, vars(part)):
            found.update({f"{path}.{k}": v for k, v in group.items() if not k.startswith("_")})
    return found


def _program_runs() -> int:
    return sum(bcg.counters.eager_runs.values()) + bcg.counters.replays


def _text_of_causes(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if cause is None else f"{text} | {_text_of_causes(cause)}"


# -- breaks -----------------------------------------------------------------------------------------------------------


def mix(h: Tensor) -> Tensor:
    _bodies.append("mix")
    return h * 2 + 1  # memory of its own in every call


def wall(h: Tensor) -> Tensor:
    _bodies.append("wall")
    return h.clone()


def fold_(acc: Tensor, tmp: Tensor) -> None:
    _bodies.append("fold_")
    acc.add_(tmp)
    tmp.mul_(10)


def scale_(x: Tensor) -> None:
    _bodies.append("scale_")
    x.mul_(3).add_(1)


def write_(x: Tensor, out: Tensor) -> None:
    _bodies.append("write_")
    out.copy_(-x)


def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _bodies.append("three")
    return x + 1, x * 2, x.sum(-1)


def each(xs: list[Tensor]) -> list[Tensor]:
    _bodies.append("each")
    return [x.flip(-1) for x in xs]


def push_(cache: Tensor, slots: Tensor, h: Tensor) -> Tensor:
    _bodies.append("push_")
    top = int(slots.max()) if slots.numel() else 0
    if top >= cache.shape[0]:
        raise ValueError(f"slot {top} does not fit a cache of {cache.shape[0]}")
    cache[slots] = h
    return cache.sum(0, keepdim=True) + h


def turn(x: Tensor, k: int, s: float, lens: list[int]) -> Tensor:
    _bodies.append("turn")
    out = x.roll(k, 1) * s
    for row, n in enumerate(lens):
        out[row, :n] += 1
    return out


def noise(x: Tensor) -> Tensor:
    _bodies.append("noise")
    return x + torch.rand_like(x)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _nothing(*_: Any) -> None:
    return None


def _three_like(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[:-1])


def _each_like(xs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


def _pushed_like(cache: Tensor, slots: Tensor, h: Tensor) -> Tensor:
    return torch.empty_like(h)


_DECLARED: list[tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]] = [
    (mix, _like, ()),
    (wall, _like, ()),
    (fold_, _nothing, ("acc", "tmp")),
    (scale_, _nothing, ("x",)),
    (write_, _nothing, ("out",)),
    (three, _three_like, ()),
    (each, _each_like, ()),
    (push_, _pushed_like, ("cache",)),
    (turn, _like, ()),
    (noise, _like, ()),
]


def _as_custom_op(body: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...]) -> Callable[..., Any]:
    name = f"bcgtest::{body.__name__}"
    op = torch.library.custom_op(name, body, mutates_args=mutates, tags=(torch.Tag.cudagraph_unsafe,))
    op.register_fake(fake)
    return getattr(torch.ops.bcgtest, body.__name__)


def _in_place(body: Callable[..., Any], fake: Callable[..., Any], mutates: tuple[str, ...]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return bcg.call_with_break(body, *args, mutates_args=mutates, fake=fake)

    return call


_FORMS: dict[str, Callable[..., Callable[..., Any]]] = {
    "custom_op": _as_custom_op,
    "eager_break": lambda body, fake, mutates: bcg.eager_break(mutates_args=mutates, fake=fake)(body),
    "call_with_break": _in_place,
}
_BREAKS = {
    form: SimpleNamespace(form=form, **{body.__name__: make(body, fake, mutates) for body, fake, mutates in _DECLARED})
    for form, make in _FORMS.items()
}


@pytest.fixture(params=_FORMS)
def breaks(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The breaks of ``_DECLARED`` in one of their three forms."""
    return _BREAKS[request.param]
