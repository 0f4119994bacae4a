"""What a break returns, and what the caller keeps: fresh tensors, lists, items, results of earlier calls."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

Program = Callable[[SimpleNamespace, Tensor], Any]
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)
FUNCTION_FORMS = pytest.mark.parametrize("form", ["eager_break", "call_with_break"])


def programs(named: dict[str, Program]) -> Any:
    """Parametrise a test over programs of ``(breaks, x)``."""
    return pytest.mark.parametrize("program", list(named.values()), ids=list(named))


@programs(
    {
        "between_segments": lambda b, x: b.mix(x.sin()).cos() + x,
        "straight_after_another": lambda b, x: b.mix(b.mix(x.sin())).cos(),
        "one_segment_apart": lambda b, x: b.mix(b.mix(x.sin()).cos()).sin() + x,
        "of_the_argument_itself": lambda b, x: b.mix(x).sin(),
        "returned_as_it_is": lambda b, x: b.mix(x.sin()),
        "returned_and_read": lambda b, x: (lambda h: (h, h.cos() + 1))(b.mix(x.sin())),
        "read_again_behind_the_next_break": lambda b, x: (lambda h: b.mix(h.sin()).cos() + h)(b.mix(x.sin())),
        "read_by_nobody": lambda b, x: (b.mix(x.sin()), x.cos())[1],
        "of_a_view": lambda b, x: b.mix(x.sin()[1:, ::2]).cos(),
        "read_through_a_view": lambda b, x: b.mix(x.sin())[1].cos() + x[0],
    }
)
def test_each_call_reads_the_result_that_the_break_made_in_it(
    check: Any, breaks: SimpleNamespace, rand: Any, program: Program
) -> None:
    """A segment went on reading where the break's result had been when it was captured (vllm-project/vllm#53915)."""
    check(lambda x: program(breaks, x), [(rand(4, 6),) for _ in range(3)])


@ONE_FORM
def test_result_is_read_where_it_is_when_the_caller_keeps_nothing(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any
) -> None:
    """As above, with memory that is freed and taken again between calls, so that results come to lie elsewhere."""
    pair = compile_pair(lambda x: breaks.mix(breaks.mix(x.sin()).cos()) + x)
    busy = []
    for _ in range(6):
        x = rand(8, 8)
        assert torch.equal(pair.compiled(x), pair.eager(x))
        busy.append(torch.full((8, 8), float("nan")))


@ONE_FORM
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_results_of_any_dtype_cross_a_break(check: Any, breaks: SimpleNamespace, rand: Any, dtype: torch.dtype) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        h = breaks.wall(x.flip(0))
        return h, h.clone().roll(1, 0)

    check(program, [((rand(4, 6) * 9).to(dtype),) for _ in range(2)])


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def turned(x: Tensor) -> Tensor:
    return (x.t() * 2).t()


def test_strides_of_a_result_are_those_that_the_break_gave_it(check: Any, rand: Any) -> None:
    """A result was taken to lie in memory as its fake does (pytorch/torchdynamo#601)."""

    def program(x: Tensor) -> Any:
        h = turned(x.sin())
        return h, h.cos(), turned(h), h.reshape(-1), h.sum(0), h + x

    check(program, [(rand(3, 4),) for _ in range(2)])


class _Workspace:
    """Writes each result of its break into the same buffer, and returns that."""

    def __init__(self) -> None:
        self.out = torch.zeros(4)

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def run(self, x: Tensor) -> Tensor:
        return self.out.copy_(x * 2)


def test_result_that_the_next_break_overwrites_is_read_before_it() -> None:
    """A break that returns its own workspace is common. A reader moved behind the next break sees the wrong values
    (vllm-project/vllm#53915).
    """
    workspace = _Workspace()

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        first = workspace.run(x)
        read = first.sin()
        second = workspace.run(x + 1)
        return read + 1, second + 1

    compiled = torch.compile(program, backend="bcg", options={"min_segment_kernels": 1})
    for scale in (1, 2, 3):
        x = torch.arange(4.0) * scale
        assert all(map(torch.equal, compiled(x), program(x)))


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def same_tensor(x: Tensor) -> Tensor:
    return x


@bcg.eager_break(fake=lambda x: torch.empty_like(x[0]))
def first_row(x: Tensor) -> Tensor:
    return x[0]


@bcg.eager_break(fake=lambda x: x)
def same_tensor_declared(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("handed_on", [same_tensor, first_row, same_tensor_declared], ids=lambda f: f.__name__)
@ONE_FORM
def test_result_that_is_an_argument_follows_later_writes(
    check: Any, breaks: SimpleNamespace, rand: Any, handed_on: Callable[[Tensor], Tensor]
) -> None:
    """A break that returns its argument, or a view of it: who reads the result and who writes the argument touch one
    memory, whatever the break's fake says (vllm-project/vllm#53915).
    """

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x + 1
        same = handed_on(h)
        before = same.sin()
        breaks.scale_(h)
        return before + 1, same.cos(), same

    check(program, [(rand(3, 4),) for _ in range(2)])


# -- results that the caller keeps ------------------------------------------------------------------------------------


class _Keeps(nn.Module):
    """Keeps a value of each call on itself, as hidden states are kept."""

    def __init__(self, breaks: SimpleNamespace) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.wall = breaks.wall
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.wall(self.lin(x)).relu()
        self.last = h
        self.seen.append(h.cos())
        return h, h.sum(-1)


@ONE_FORM
def test_results_and_attributes_kept_from_earlier_calls_stay(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """A result kept from an earlier call was overwritten by the next replay (pytorch/pytorch#144386). ``Pair`` compares
    all kept results after every call, and the module's attributes.
    """
    torch.manual_seed(1)
    check(_Keeps(breaks).eval(), [(rand(4, 6),) for _ in range(2)])


@programs(
    {
        "results": lambda b, x: (b.wall(x.sin()), b.wall(x).cos()),
        "views_of_one": lambda b, x: (lambda h: (h[0], h[1:], h.t()))(b.wall(x.sin())),
        "one_twice": lambda b, x: (lambda h: (h, h))(b.wall(x).sin()),
        "a_constant": lambda b, x: (torch.ones(3, device=x.device), b.wall(x)),
        "a_constant_list": lambda b, x: (torch.tensor([1.0, 2.0], device=x.device), b.wall(x)),
    }
)
@ONE_FORM
def test_caller_may_write_into_a_result(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, program: Program
) -> None:
    """The static buffer was handed out: writing into a result leaked into later calls (pytorch/pytorch#144386)."""
    pair = compile_pair(lambda x: program(breaks, x))
    for _ in range(3):
        pair.write_results((rand(3, 4),))


@ONE_FORM
@pytest.mark.parametrize("kept", [True, False])
def test_result_may_be_the_next_call_s_argument(
    compile_pair: Any, breaks: SimpleNamespace, rand: Any, kept: bool
) -> None:
    """A recurrent state goes in where it came out: slot and result must not be one buffer (pytorch/pytorch#158551)."""

    def program(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        breaks.fold_(state, x.clone())
        return breaks.wall(x).sin() + state, state * 0.5

    pair = compile_pair(program)
    states = [torch.zeros(4), torch.zeros(4)]
    history = []
    for _ in range(5):
        x = rand(4)
        for index, fn in enumerate((pair.eager, pair.compiled)):
            out, states[index] = fn(x, states[index])
            history.append((out, states[index]) if kept else out.clone())
        assert torch.equal(*states)
    for want, got in zip(history[::2], history[1::2], strict=True):
        assert all(map(torch.equal, want, got))


_watched: list[Any] = []
_alive: list[int] = []


@bcg.eager_break
def watch(x: Tensor) -> None:
    _watched.append(weakref.ref(x))


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def count_alive(x: Tensor) -> Tensor:
    _alive.append(sum(reference() is not None for reference in _watched))
    return x + 1


def _within_a_segment(x: Tensor) -> Tensor:
    x = x + 1
    watch(x)
    x = x * 2
    return count_alive((x.sin() + 1).cos())


def _across_segments(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x.sin()
        watch(x)
    x = x.cos()
    return count_alive(x).sin()


def _results_of_breaks(x: Tensor) -> Tensor:
    for _ in range(2):
        x = count_alive(x)
        watch(x)
    return count_alive(x.cos())


@pytest.mark.parametrize(
    "body", [_within_a_segment, _across_segments, _results_of_breaks], ids=lambda f: f.__name__[1:]
)
def test_values_that_nobody_reads_any_more_are_freed(rand: Any, way: dict[str, Any], body: Any) -> None:
    """Values were held until the end of the program: it took far more memory than eager (pytorch/pytorch#158551)."""
    if way["capture"] != "off":
        pytest.skip("memory that is captured is not freed within a call")
    seen = []
    for fn in (body, torch.compile(body, backend="bcg", fullgraph=True, options=way)):
        for _ in range(2):
            _watched.clear()
            _alive.clear()
            fn(rand(4))
            seen.append(list(_alive))
    for eager, compiled in zip(seen[:2], seen[2:], strict=True):
        assert len(eager) == len(compiled)
        assert all(now <= then for now, then in zip(compiled, eager, strict=True)), (eager, compiled)


# -- breaks with several results --------------------------------------------------------------------------------------


def _skips_a_break(b: SimpleNamespace, x: Tensor) -> Any:
    first, second, third = b.three(x.sin())
    e, f = b.each([first.cos(), x])
    g, _, k = b.three(e + second)
    return g - f, third, k


def _loop(b: SimpleNamespace, x: Tensor) -> Tensor:
    total = x
    for part in b.each([x.sin(), x.cos(), x]):
        total = total + b.wall(part)
    return total


@programs(
    {
        "in_the_next_segment": lambda b, x: (lambda r: r[0].sin() + r[1])(b.three(x.sin())),
        "two_pieces_later": lambda b, x: (lambda r: (b.wall(r[0].sin()).cos() + r[1], r[2]))(b.three(x)),
        "one_for_each_piece": _skips_a_break,
        "only_the_last": lambda b, x: b.three(x.sin())[-1].cos(),
        "none": lambda b, x: (b.three(x.sin()), x.cos())[1],
        "returned_whole": lambda b, x: tuple(b.three(x.sin())),
        "one_twice": lambda b, x: (lambda r: (r[1], r[1].sin() + r[1], r[0]))(b.three(x)),
        "given_to_the_next_break": lambda b, x: b.each([*b.three(x.sin())[:2]])[1].cos(),
        "a_list_of_one": lambda b, x: b.each([x.sin()])[0].cos(),
        "a_list_reversed": lambda b, x: [h.cos() for h in reversed(b.each([x, x.sin(), x + 1]))],
        "in_a_loop": _loop,
    }
)
def test_items_of_a_break_s_results_reach_their_readers(
    check: Any, breaks: SimpleNamespace, rand: Any, program: Program
) -> None:
    """The ``getitem`` of a result was put into another piece than its break: a cycle, or the wrong item
    (vllm-project/vllm#37361).
    """
    check(lambda x: program(breaks, x), [(rand(4, 6),) for _ in range(2)])


@programs(
    {
        "topk": lambda b, x: (lambda r: b.wall(r.values).sin() + r[1])(x.topk(2)),
        "max_whole": lambda b, x: (lambda r: (b.wall(x), r))(torch.max(x, 0))[1],
        "split": lambda b, x: (lambda r: b.wall(r[2]).sin() + r[0])(x.split(2, -1)),
        "chunk_written": lambda b, x: (lambda y: (lambda r: (b.scale_(r[1]), y * 2, r[0])[1:])(y.chunk(2)))(x + 1),
        "unbind": lambda b, x: torch.stack([b.wall(r).cos() for r in x.unbind()]),
        "sort_across": lambda b, x: (lambda r: (b.wall(r[0]), x.gather(-1, r[1])))(x.sort(-1)),
    }
)
@ONE_FORM
def test_items_of_a_segment_s_tuple_cross_a_break(
    check: Any, breaks: SimpleNamespace, rand: Any, program: Program
) -> None:
    """The same for tuples made by torch itself (vllm-project/vllm#37361)."""
    check(lambda x: program(breaks, x), [(rand(4, 6),) for _ in range(2)])


def _nested(x: Tensor) -> dict[str, Any]:
    return {"b": x * 2, "a": (x + 1, [x.sum(-1), None]), "none": None, "list": [x - 1], "empty": ()}


def _nested_like(x: Tensor) -> dict[str, Any]:
    return torch.utils._pytree.tree_map_only(Tensor, torch.empty_like, _nested(x))


def _other_order(x: Tensor) -> dict[str, Tensor]:
    return {"b": x * 2, "a": x + 100}


def _order_of_the_fake(x: Tensor) -> dict[str, Tensor]:
    return {"a": torch.empty_like(x), "b": torch.empty_like(x)}


def call_of(form: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """``body`` as a break of one of the two forms that need no schema."""
    if form == "eager_break":
        return bcg.eager_break(fake=fake)(body)
    return lambda x: bcg.call_with_break(body, x, fake=fake)


@FUNCTION_FORMS
def test_nested_results_keep_their_structure(check: Any, rand: Any, form: str) -> None:
    """Items of nested results were mixed up (vllm-project/vllm#37361)."""
    nested = call_of(form, _nested, lambda x: _nested_like(x))

    def program(x: Tensor) -> Any:
        found = nested(x.sin())
        return found["a"][0].cos() + found["b"], found["a"][1][0], found["list"][0].sin(), found["none"], found

    check(program, [(rand(3, 4),) for _ in range(2)])


def _narrower(x: Tensor) -> Tensor:
    return x[:1] + 0


def _wider_type(x: Tensor) -> Tensor:
    return x.double()


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0, x + 1


def _one_in_a_list(x: Tensor) -> list[Tensor]:
    return [x + 0]


def _nothing(x: Tensor) -> None:
    return None


@FUNCTION_FORMS
@pytest.mark.parametrize(
    ("body", "fake"),
    [
        (_narrower, torch.empty_like),
        (_wider_type, torch.empty_like),
        (_pair, torch.empty_like),
        (_one_in_a_list, torch.empty_like),
        (_nothing, torch.empty_like),
        (_other_order, _order_of_the_fake),
    ],
    ids=lambda f: f.__name__[1:] if f.__name__.startswith("_") else "",
)
def test_result_unlike_its_fake_is_an_error_that_names_the_break(rand: Any, form: str, body: Any, fake: Any) -> None:
    """A result of another shape was broadcast, one of another structure taken apart, the values of a dictionary went to
    each other's keys, without a word: what was compiled relied on the fake (vllm-project/vllm#53915, #37361).
    """
    broken = call_of(form, body, lambda x: fake(x))

    def program(x: Tensor) -> Tensor:
        found = broken(x.sin())
        return found["a"].cos() if fake is _order_of_the_fake else found + x.shape[0]

    compiled = torch.compile(program, backend="bcg", fullgraph=True)
    for _ in range(2):
        with pytest.raises(bcg.BcgError, match=rf"{body.__name__}'.*fake="):
            compiled(rand(4))


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def sometimes_the_argument(x: Tensor) -> Tensor:
    return x if bcg.current_context().hand_back else x.clone()


def test_result_that_is_the_argument_in_later_calls_only(compile_pair: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """What the first call showed was trusted: a copy in a bridge did not follow a write through the other value."""

    def program(x: Tensor) -> Any:
        h = breaks.mix(x)
        y = h.sin()
        k = sometimes_the_argument(h)
        k.add_(1)
        return breaks.mix(y) * 2, h.cos(), k.sin()

    pair = compile_pair(program)
    for hand_back in (False, False, True, False, True):
        with bcg.forward_context(hand_back=hand_back):
            pair(rand(3, 4))


def _with_its_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y[1:]


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


SHARED = {
    "with_its_rows": bcg.eager_break(fake=lambda x: (lambda t: (t, t[1:]))(torch.empty_like(x)))(_with_its_rows),
    "twice": bcg.eager_break(fake=lambda x: (torch.empty_like(x),) * 2)(_twice),
}


TAKEN_APART = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="results of one break that only the caller writes are copied one by one"
)


@pytest.mark.parametrize("split", list(SHARED.values()), ids=list(SHARED))
@pytest.mark.parametrize("written", [0, 1, None], ids=["first", "second", "by_the_caller"])
def test_results_of_one_break_that_share_memory(
    compile_pair: Any, rand: Any, way: dict[str, Any], split: Any, written: int | None, request: Any
) -> None:
    """Two results over one memory were copied each to a place of its own: a write into one did not show in the other,
    and the caller was handed two tensors.
    """
    if written is None and way["capture"] != "off":
        request.applymarker(TAKEN_APART)

    def program(x: Tensor) -> Any:
        parts = split(x.sin())
        if written is not None:
            parts[written].add_(1)
        return parts[0].cos(), parts[1].cos(), parts

    pair = compile_pair(program)
    for _ in range(3):
        pair.write_results((rand(3, 4),))


class _KeepsWork(nn.Module):
    """Its break returns a buffer that the graph reads and writes, too."""

    work: Tensor

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("work", torch.zeros(4))
        self.body = body

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def run(self, x: Tensor) -> Tensor:
        self.work.add_(x)
        return self.work

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def _result_is_written(m: _KeepsWork, x: Tensor) -> Any:
    y = m.run(x.sin())
    y.mul_(2)
    return y.cos(), m.work.sin()


def _buffer_is_written(m: _KeepsWork, x: Tensor) -> Any:
    y = m.run(x.sin())
    z = y.cos()
    m.work.mul_(2)
    return z + 1, y.cos()


@pytest.mark.parametrize("body", [_result_is_written, _buffer_is_written], ids=lambda f: f.__name__[1:])
def test_result_that_is_a_buffer_of_the_module(
    check: Any, rand: Any, way: dict[str, Any], body: Callable[..., Any]
) -> None:
    """A copy of the buffer was read and written in its place: wrong numbers, and a wrong state of the module."""
    pair = check(_KeepsWork(body), [(rand(4),) for _ in range(2)])
    if way["capture"] != "off":
        assert "break_alias" in bcg.stats(pair.compiled).eager_runs


UNREAD = pytest.mark.xfail(
    strict=True, raises=pytest.fail.Exception, reason="what no segment reads is not checked at a replay"
)


@pytest.mark.parametrize("reader", [pytest.param("caller", marks=UNREAD), "segment"])
@pytest.mark.parametrize("body", [_narrower, _wider_type, _one_in_a_list, _nothing], ids=lambda f: f.__name__[1:])
def test_result_unlike_its_fake_in_later_calls_only(rand: Any, body: Callable[..., Any], reader: str) -> None:
    """A replay trusted what the first call showed: the caller got what the fake never said, and ``None`` in a segment
    ended in an ``AttributeError``.
    """
    chosen: Callable[..., Any] = torch.neg

    @bcg.eager_break(fake=lambda x: torch.empty_like(x))
    def broken(x: Tensor) -> Any:
        return chosen(x)

    def program(x: Tensor) -> Any:
        found = broken(x.sin())
        return found.cos() if reader == "segment" else (found, x.cos())

    compiled = torch.compile(program, backend="bcg", fullgraph=True, options={"min_segment_kernels": 1})
    for _ in range(3):
        compiled(rand(4))
    chosen = body
    with pytest.raises(bcg.BcgError, match="return"):
        compiled(rand(4))
