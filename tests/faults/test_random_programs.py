"""Random programs, called in random ways: whatever is captured and replayed, a caller sees what eager shows.

A *program* is a module whose ``forward`` is a few lines of ``LINES`` and returns a few values in the forms of
``RETURNS``. It is called four to six times; a ``Turn`` says how one call differs from the one before: other row counts
(which come back), other values, other addresses, other numbers, other weights. ``Pair`` compares each call with eager:
results, arguments and the memory around them, the module, the random state, the log of break bodies, and all earlier
results.

Hypothesis draws programs and calls and makes a failing one small; the text of the program is printed with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg
from bcg_compiler.plan import build
from bcg_compiler.plan.units import whole_groups

WAYS = ("captured",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# -- programs ---------------------------------------------------------------------------------------------------------

#: ``{x}`` and ``{y}`` are values of n×4, ``{z}`` any value that may be written; ``{new}`` is a new value of n×4 and
#: ``{view}`` one of another shape. Each line works for any n.
#:
#: Left out, as eager itself refuses it: a write into an expanded value, one from a value that overlaps the target, and
#: one into an argument that a break does not declare (``grow`` writes the buffer that its argument may be a view of).
#: Sizes that depend on data are in test_sizes.py, inference regions and vmap in test_modes.py.
LINES = (
    "{new} = torch.relu({x}) + {y}",
    "{new} = {x} * 0.5 - {y}.sum(0)",
    "{new} = {x} @ self.weight",
    "{new} = {x} + {z}.sum()",
    "{new} = torch.cat([{x}[1:], {y}[:1]])",
    "with torch.autocast(DEVICE, dtype=torch.bfloat16): {new} = ({x} @ self.weight).float()",
    # numbers: sizes, the caller's, one that is read from data
    "{new} = {x} / {y}.shape[0]",
    "{new} = {x} * number",
    "{new} = {x}.roll(number, 0)",
    "{new} = {x} * {y}.sum().item()",
    # random numbers
    "{new} = {x} + torch.rand_like({y})",
    "{new} = torch.nn.functional.dropout({x}, 0.5, True)",
    # views
    "{new} = {x}[:, :]",
    "{new} = {x}.split(1)[0].expand({y}.shape[0], -1) + {y}",
    "{view} = {x}.t()",
    "{view} = {x}[1:]",
    "{view} = {x}.unbind(1)[2]",
    "{new} = self.state[: {x}.shape[0]]",
    # writes
    "{x}.add_({y} + 1)",
    "{x}.copy_({y} / 2)",
    "{x}[:1] = {y}[1:2].clone()",
    "{z}.mul_(0.5)",
    "self.state.add_({x}.sum(0))",
    # breaks
    "fill({x}, {y})",
    "accumulate({y}, into={x})",
    "draw({z})",
    "{new} = cosine({x})",
    "{new} = scaled({x})",
    "{new} = halve({x})",
    "{new} = given_back({x})",
    "{new}, {view} = parts({x}, [{y}])",
    "{new} = torch.sin({x})",  # by rule
    "{new} = self.grow({x} * 1)",
    "self.read_state({x})",
    # what one call leaves for the next
    "{new} = {x} + self.last.sum(0)",
    "self.last = {x}",
)

RETURNS = ("{x}", "{z}", "({x}, {x})", "{x}[1:]", "{x}.t()", "{x}[None].expand(2, -1, -1)", "{{'value': [{z}, {x}]}}")


def logged(name: str) -> float:
    """What differs from call to call: the context's scale, as a number. Each body says that it ran, and with what."""
    context = bcg.current_context()
    context.bodies.append((name, context.scale))
    return context.scale


@bcg.eager_break(mutates_args=("out",))
def fill(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2 + logged("fill"))


@bcg.eager_break(mutates_args=("into",))
def accumulate(x: Tensor, *, into: Tensor) -> None:
    into.copy_(into * 0.5 + x)
    logged("accumulate")


@bcg.eager_break(mutates_args=("out",))
def draw(out: Tensor) -> None:
    out.copy_(torch.rand(out.shape, device=out.device) * logged("draw"))


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    logged("cosine")
    return x.cos()


@bcg.eager_break(fake=torch.empty_like)
def scaled(x: Tensor) -> Tensor:
    return x * logged("scaled")


@bcg.eager_break(fake=lambda x: x, mutates_args=("x",))
def halve(x: Tensor) -> Tensor:
    logged("halve")
    return x.mul_(0.5)


@bcg.eager_break(fake=lambda x: x)
def given_back(x: Tensor) -> Tensor:
    """Its argument in each call. In some calls only, against its fake, is left out: a write into such a result by a
    segment then reaches the bridge and not the argument.
    """
    logged("given_back")
    return x


@bcg.eager_break(fake=lambda x, others: (torch.empty_like(x), others[0].new_empty(4)))
def parts(x: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
    return x + logged("parts"), others[0].sum(0)


class Base(nn.Module):
    state: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 17.0).view(4, 4) / 9, requires_grad=False)
        self.register_buffer("state", torch.arange(1.0, 33.0).view(8, 4) / 7)
        self.last = torch.ones(2, 4, device=DEVICE)

    @bcg.eager_break(fake=lambda self, x: torch.empty_like(x))
    def grow(self, x: Tensor) -> Tensor:
        self.state.mul_(0.5).add_(x.sum(0))
        return x + logged("grow")

    @bcg.eager_break(mutates_args=("out",))
    def read_state(self, out: Tensor) -> None:
        out.sub_(self.state[0] * logged("read_state"))


@st.composite
def programs(draw: st.DrawFn) -> str:
    """The text of a ``forward``. Values are chosen by their place from the newest back: each line may be left out."""
    values, views, text = ["a", "b", "c"], ["part"], ["c = more['c'][0]", "part = more['part']"]
    place = st.integers(0, 7)

    def chosen(names: list[str]) -> str:
        return names[-1 - draw(place) % len(names)]

    for line in draw(st.lists(st.sampled_from(LINES), min_size=3, max_size=9)):
        new, view = f"v{len(text)}", f"w{len(text)}"
        text.append(line.format(x=chosen(values), y=chosen(values), z=chosen(values + views), new=new, view=view))
        values += [new] if "{new}" in line else []
        views += [view] if "{view}" in line else []
    forms = draw(st.lists(st.sampled_from(RETURNS), min_size=1, max_size=4))
    returned = [form.format(x=chosen(values), z=chosen(values + views)) for form in forms]
    text.append(f"return [{', '.join(returned)}]")
    return "\n".join(["def forward(self, a, b, more, number):", *(f"    {line}" for line in text)]) + "\n"


def module_of(text: str) -> Base:
    scope: dict[str, Any] = {}
    exec(text, globals(), scope)
    return type("Random", (Base,), {"forward": scope["forward"]})()


# -- calls ------------------------------------------------------------------------------------------------------------

Inputs = tuple[Tensor, Tensor, Tensor]


def separate(n: int, home: Tensor) -> Inputs:
    return home[:n].clone(), home[n : 2 * n].clone(), home[-n:].clone()


def odd_offsets(n: int, home: Tensor) -> Inputs:
    a, b, c = (home.view(-1)[start : start + 4 * n].view(n, 4) for start in (1, 41, 83))
    return a, b, c


def columns(n: int, home: Tensor) -> Inputs:
    wide = home.view(-1, 8)
    return wide[:n, 1:5], wide[n : 2 * n, 3:7], home[-n:].clone()


def turned(n: int, home: Tensor) -> Inputs:
    return home.view(4, -1)[:, :n].t(), home[:n].t().contiguous().t(), home[-n:]


def overlapping(n: int, home: Tensor) -> Inputs:
    return home[:n], home[1 : n + 1], home[-n:]


def one_twice(n: int, home: Tensor) -> Inputs:
    return home[:n], home[:n], home[-n:]


@dataclass(frozen=True)
class Turn:
    """One call: how many rows, where its inputs lie, its numbers, and what happens to the module before it.

    ``chained``  the last result of the right shape is the first input
    """

    rows: int
    inputs: Callable[[int, Tensor], Inputs]
    number: int
    scale: float
    chained: bool
    before: Callable[[Base], None]


def nothing(module: Base) -> None:
    """The module stays as it is."""


def fill_weights(module: Base) -> None:
    module.weight.data.mul_(-0.5)
    module.state.mul_(0.25)


def replace_buffer(module: Base) -> None:
    module.state = module.state * 0.5 + 1


def replace_weight(module: Base) -> None:
    module.weight = nn.Parameter(module.weight * 0.5 + 1, requires_grad=False)


def rebind_weight(module: Base) -> None:
    module.weight.data = module.weight.data * 0.5 - 1


#: The more often something is named, the more often it is drawn; an example is made small towards what comes first.
BEFORE = [nothing] * 4 + [fill_weights, replace_buffer, replace_weight, rebind_weight]
INPUTS = [separate, separate, odd_offsets, odd_offsets, columns, turned, overlapping, one_twice]


@st.composite
def turns(draw: st.DrawFn) -> list[Turn]:
    """Few shapes and layouts, and each comes back: the second call of a shape is the first that replays."""
    places = draw(st.lists(st.tuples(st.sampled_from([3, 5, 2]), st.sampled_from(INPUTS)), min_size=1, max_size=2))
    turn = st.builds(
        lambda place, *rest: Turn(*place, *rest),
        st.sampled_from(places),
        st.sampled_from([2, 2, 3, 5]),
        st.sampled_from([1.5, 0.5, 3.0]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from(BEFORE),
    )
    return draw(st.lists(turn, min_size=4, max_size=6))


modes = st.sampled_from([torch.no_grad, torch.inference_mode])
min_segment_kernels = st.sampled_from([1, 1, 1, 2, 4])


def arguments(turn: Turn, seed: int, last: Tensor | None) -> tuple[Any, ...]:
    """The arguments of one side, eager or compiled: equal values, memory of its own; ``last`` comes first if given."""
    home = torch.randn(32, 4, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)
    a, b, c = turn.inputs(turn.rows, home)
    a = a if last is None else last
    return a, b, {"c": [c], "part": home[20:22].clone()}, turn.number


def is_whole(result: Tensor, rows: int) -> bool:
    """Whether it can be an input, and is all of its memory: around a part, eager has what a caller's copy lacks."""
    return result.shape == (rows, 4) and result.untyped_storage().nbytes() == result.nbytes


# -- the test ---------------------------------------------------------------------------------------------------------


def agree(text: str, calls: list[Turn], kernels: int, pair_of: Callable[..., Any], bodies: list[Any]) -> None:
    """Make the calls with eager and with the compiled module, each of which must agree."""
    torch.manual_seed(5)
    options: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": kernels}
    if "torch.sin" in text:  # a rule must match something
        options["breaks"] = ["op:aten::sin"]
    pair = pair_of(module_of(text), options=options, dynamic=True)
    for seed, turn in enumerate(calls):
        pair.both(turn.before)
        compiled, eager = (tree_leaves(result) for result in (pair.kept[-1] if pair.kept else ((), ())))
        usable = [i for i, result in enumerate(eager) if turn.chained and is_whole(result, turn.rows)]
        sides = iter([arguments(turn, seed, side[usable[0]] if usable else None) for side in (eager, compiled)])
        with bcg.forward_context(bodies=bodies, scale=turn.scale):
            pair.call(lambda sides=sides: next(sides))


def holds(examples: int, compile_pair: Callable[..., Any], bodies: list[Any]) -> None:
    """So many examples agree, and enough of them replay that it shows something."""
    replays: list[int] = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],  # an explanation would take longer than all examples
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(programs(), turns(), min_segment_kernels, modes)
    def example(text: str, calls: list[Turn], kernels: int, mode: Callable[[], Any]) -> None:
        note(text)
        torch.compiler.reset()
        before = bcg.counters.replays
        with mode():
            agree(text, calls, kernels, compile_pair, bodies)
        replays.append(bcg.counters.replays - before)

    with torch._dynamo.config.patch(capture_scalar_outputs=True, recompile_limit=64):
        example()
    assert sum(count >= 2 for count in replays) > len(replays) / 3, f"too few replays to show anything: {replays}"


def test_random_programs_give_what_eager_gives(compile_pair: Callable[..., Any], bodies: list[Any]) -> None:
    holds(100, compile_pair, bodies)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_random_programs_in_compiled_units_give_what_eager_gives(
    compile_pair: Callable[..., Any], bodies: list[Any], monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Wherever units are cut, and though a compiler takes each input for memory of its own."""

    def compiler(module: Any, fakes: Any) -> Callable[..., Any]:
        return aot_module_simplified(module, list(fakes), fw_compiler=lambda inner, _: make_boxed_func(inner.forward))

    def pair_of(module: Any, *, options: dict[str, Any], **given: Any) -> Any:
        return compile_pair(module, options={**options, "segment_compiler": compiler}, **given)

    def cut_units(nodes: Any, facts: Any, key: Any) -> Any:
        return whole_groups([list(nodes[at : at + cut]) for at in range(0, len(nodes), cut)], facts)

    if cut:
        monkeypatch.setattr(build, "cut_units", cut_units)
    holds(12, pair_of, bodies)


@pytest.mark.nightly
def test_many_random_programs_give_what_eager_gives(compile_pair: Callable[..., Any], bodies: list[Any]) -> None:
    holds(2000, compile_pair, bodies)
