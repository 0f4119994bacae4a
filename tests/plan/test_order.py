"""The order of effects, from the user's function to the steps: what the plan is, and that results are those of eager.

A docstring draws the function as nodes in the order of the program, breaks in brackets, and after the arrow the steps:
``relu [write] mul`` is a segment, a break and a segment. Where a node could be moved and must not be, the function is
made such that moving it changes a result.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.plan import Plan
from bcg_compiler.runtime import programs_of


@bcg.eager_break(mutates_args=("out",))
def write(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@bcg.eager_break(fake=lambda x: x)
def same(x: Tensor) -> Tensor:
    return x


@bcg.eager_break(fake=lambda x: x, mutates_args=("x",))
def double(x: Tensor) -> Tensor:
    return x.mul_(2)


@bcg.eager_break(mutates_args=("out",))
def draw(out: Tensor) -> None:
    out.copy_(torch.rand(out.shape))


ticks: list[str] = []


@bcg.eager_break
def tick() -> None:
    ticks.append("tick")


@torch.library.custom_op("bcg_tests_order::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("bcg_tests_order::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    return -x


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Checked:
    """A function, or module, and its compiled form, called together and compared."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        torch.compiler.reset()
        self.eager = copy.deepcopy(fn)
        options = {"min_segment_kernels": 1, **options}
        self.compiled = torch.compile(fn, backend="bcg", fullgraph=True, options=options)

    def __call__(self, *args: Any) -> "Checked":
        """Call both with equal arguments: results, arguments, state and random state must be equal after."""
        expected_args, seen_args = copy.deepcopy(args), copy.deepcopy(args)  # over one storage where ``args`` are
        expected = self._run(self.eager, expected_args)
        seen = self._run(self.compiled, seen_args)
        torch.testing.assert_close(seen, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(seen_args, expected_args, rtol=0, atol=0, equal_nan=True)
        return self

    @staticmethod
    def _run(fn: Any, args: Any) -> list[Any]:
        torch.manual_seed(11)
        state = dict(getattr(fn, "_orig_mod", fn).named_buffers()) if isinstance(fn, nn.Module) else {}
        return [fn(*args), state, torch.get_rng_state()]

    @property
    def plan(self) -> Plan:
        (program,) = programs_of(self.compiled)
        assert program.plan is not None
        return program.plan

    @property
    def steps(self) -> str:
        """The steps, breaks in brackets: ``relu [write] mul``."""
        shown = []
        for step in self.plan.steps:
            ops = " ".join(short(node.op) for node in step.nodes)
            shown.append(f"[{ops}]" if step.kind == "break" else ops)
        return " | ".join(shown)


def short(op: str) -> str:
    """The last part of a name: ``write`` of a function, ``bump`` of ``ns::bump.default``, ``view`` of ``.view``."""
    return op.partition("::")[2].partition(".")[0] if "::" in op else op.rpartition(".")[2]


def x(*shape: int) -> Tensor:
    """Numbers that differ from each other."""
    shape = shape or (4, 4)
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) / 7


# -- pure nodes --------------------------------------------------------------------------------------------------------


def test_pure_nodes_move_so_that_breaks_join() -> None:
    """``sin`` feeds the second break and takes nothing from the first; nothing needs ``exp`` before the end.

    relu [cosine] sin exp [cosine] add  →  relu sin | [cosine cosine] | exp add      sin─cosine, relu─exp
    """

    def fn(x: Tensor) -> Tensor:
        a = torch.relu(x)
        first = cosine(x)
        up = torch.sin(a)
        other = torch.exp(a)
        return cosine(up) + other + first

    assert Checked(fn)(x()).steps == "relu sin | [cosine getitem cosine getitem] | exp add add"


def test_what_a_break_returned_is_read_before_the_next_break() -> None:
    """A break may hand out memory that the next one overwrites: ``exp`` stays between them.

    relu [cosine] sin exp [cosine] add  →  as it is      cosine─exp
    """

    def fn(x: Tensor) -> Tensor:
        a = torch.relu(x)
        first = cosine(a)
        up = torch.sin(x)
        down = torch.exp(first)
        return cosine(up) + down

    assert Checked(fn)(x()).steps == "relu | [cosine getitem] | sin exp | [cosine getitem] | add"


def test_a_node_on_the_path_between_breaks_keeps_them_apart() -> None:
    """``sin`` takes from the first break and feeds the second; ``exp`` could move, and stays.

    relu [cosine] sin exp [cosine] add  →  as it is      cosine─sin─cosine
    """

    def fn(x: Tensor) -> Tensor:
        first = cosine(torch.relu(x))
        return cosine(torch.sin(first)) + torch.exp(first)

    assert Checked(fn)(x()).steps == "relu | [cosine getitem] | sin | [cosine getitem] | exp add"


def test_breaks_join_over_views() -> None:
    """A view has no kernel: there is nothing to capture between the breaks.

    relu [cosine] t [cosine] add  →  relu | [cosine t cosine] | add
    """

    def fn(x: Tensor) -> Tensor:
        first = cosine(torch.relu(x))
        return cosine(first.t()) + first

    assert Checked(fn)(x()).steps == "relu | [cosine getitem t cosine getitem] | add"


# -- writes in the graph between two breaks ----------------------------------------------------------------------------


def by_setitem(buffer: Tensor, value: Tensor) -> None:
    buffer[0] = value[1]


def by_setitem_of_a_number(buffer: Tensor, value: Tensor) -> None:
    buffer[1:, 0] = 3.0


def by_out(buffer: Tensor, value: Tensor) -> None:
    torch.sub(value, 1, out=buffer)


def by_copy(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


def by_operator(buffer: Tensor, value: Tensor) -> None:
    buffer += value


def through_a_slice(buffer: Tensor, value: Tensor) -> None:
    buffer[1:].add_(1)


def through_a_transposed_view(buffer: Tensor, value: Tensor) -> None:
    buffer.t().mul_(value)


def through_an_item_of_a_split(buffer: Tensor, value: Tensor) -> None:
    buffer.split(2)[1].zero_()


def through_a_view_of_a_view(buffer: Tensor, value: Tensor) -> None:
    buffer.view(16)[3:9].view(2, 3).mul_(5)


def by_index(buffer: Tensor, value: Tensor) -> None:
    buffer.index_add_(0, torch.arange(2), value[:2])


def by_a_vmapped_function(buffer: Tensor, value: Tensor) -> None:
    torch.vmap(lambda row: row.mul_(2))(buffer)


WRITES = [
    by_setitem,
    by_setitem_of_a_number,
    by_out,
    by_copy,
    by_operator,
    through_a_slice,
    through_a_transposed_view,
    through_an_item_of_a_split,
    through_a_view_of_a_view,
    by_index,
    by_a_vmapped_function,
]
each_write = pytest.mark.parametrize("change", WRITES)


@each_write
def test_a_write_stays_between_the_breaks_that_read(change: Callable[[Tensor, Tensor], None]) -> None:
    """Both breaks read the buffer: the first one before it is changed, the second one after.

    relu [cosine] change [cosine] add  →  as it is      relu~change
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        first = cosine(buffer)
        change(buffer, x)
        return first + cosine(buffer)

    checked = Checked(fn)(x())
    assert [step.kind for step in checked.plan.steps] == ["segment", "break", "segment", "break", "segment"]


@each_write
def test_a_write_waits_for_a_reader_that_waits_for_a_break(change: Callable[[Tensor, Tensor], None]) -> None:
    """``mul`` reads the buffer and takes from the first break; the change feeds the second one.

    relu [cosine] mul change [cosine] add  →  as it is      cosine─mul~change─cosine
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        read = cosine(x + 1) * buffer
        change(buffer, x)
        return read + cosine(buffer)

    checked = Checked(fn)(x())
    assert [step.kind for step in checked.plan.steps] == ["segment", "break", "segment", "break", "segment"]


@each_write
def test_a_read_that_feeds_a_break_waits_for_the_write_before_it(change: Callable[[Tensor, Tensor], None]) -> None:
    """``mul`` reads what was changed with a result of the first break, and feeds the second break.

    relu [cosine] change mul [cosine] add  →  as it is      cosine─change~mul─cosine
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        change(buffer, cosine(x))
        return buffer + cosine(buffer * 3)

    checked = Checked(fn)(x())
    assert checked.plan.steps[-2].kind == "break"
    assert "mul" in short(checked.plan.steps[-3].nodes[-1].op)


def test_a_custom_op_that_writes_is_a_break_in_its_place() -> None:
    """An op that no declaration says to be capturable. All three breaks touch one buffer and join.

    relu [cosine] [bump] [cosine] add  →  relu | [cosine bump cosine] | add
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        first = cosine(buffer)
        bump(buffer)
        return first + cosine(buffer)

    assert Checked(fn)(x()).steps == "relu | [cosine getitem bump cosine getitem] | add"


def test_a_capturable_custom_op_that_writes_stays_between_its_readers() -> None:
    """The same op, declared capturable.

    relu [cosine] bump [cosine] add  →  as it is
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        first = cosine(buffer)
        bump(buffer)
        return first + cosine(buffer)

    checked = Checked(fn, capturable=["bcg_tests_order::bump"])(x())
    assert checked.steps == "relu | [cosine getitem] | bump | [cosine getitem] | add"


# -- writes of a break -------------------------------------------------------------------------------------------------


def test_readers_stay_on_their_side_of_a_break_that_writes() -> None:
    """``mul`` reads before ``write``, ``exp`` after it, and neither needs a result of it. One waits for a break, the
    other one feeds a break.

    relu [cosine] mul [write] exp [cosine] add  →  as it is      cosine─mul~write~exp─cosine
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        before = buffer * cosine(x)
        write(x, buffer)
        return before + cosine(torch.exp(buffer))

    assert Checked(fn)(x()).steps == "relu | [cosine getitem] | mul | [write] | exp | [cosine getitem] | add"


@pytest.mark.parametrize("through", [lambda b: b.t(), lambda b: b[1:], lambda b: b.split(2)[0], lambda b: b.detach()])
def test_a_view_taken_before_a_break_shows_what_it_wrote(through: Callable[[Tensor], Tensor]) -> None:
    """The view has another name and was taken earlier; the reader needs no result of the break.

    relu view [write] exp [cosine] add  →  as it is      view~write~exp─cosine
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        view = through(buffer)
        write(x, buffer)
        return cosine(torch.exp(view)) + view

    checked = Checked(fn)(x())
    kinds = [step.kind for step in checked.plan.steps]
    assert kinds == ["segment", "break", "segment", "break", "segment"]
    assert checked.plan.steps[2].nodes[-1].op == "exp"


@pytest.mark.parametrize("through", [lambda b: b.t(), lambda b: b[1:], lambda b: b.split(2)[0], lambda b: b.detach()])
def test_a_break_that_writes_through_a_view_keeps_readers_of_the_buffer(through: Callable[[Tensor], Tensor]) -> None:
    """As above, with the roles changed: the break writes the view, the reader reads the buffer.

    relu view [write] exp [cosine] add  →  as it is      relu~view─write, relu~exp─cosine
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        view = through(buffer)
        write(view + 1, view)
        return cosine(torch.exp(buffer)) + buffer

    checked = Checked(fn)(x())
    assert [step.kind for step in checked.plan.steps] == ["segment", "break", "segment", "break", "segment"]


def test_a_break_that_writes_another_buffer_does_not_hold_back_readers() -> None:
    """``exp`` reads a buffer that no break writes: it moves up.

    relu sin [write] exp [cosine] add  →  relu sin exp | [write cosine] | add
    """

    def fn(x: Tensor) -> Tensor:
        buffer, other = torch.relu(x), torch.sin(x)
        write(x, other)
        return cosine(torch.exp(buffer)) + other

    assert Checked(fn)(x()).steps == "relu sin exp | [write cosine getitem] | add"


def test_a_result_that_is_an_argument_is_that_buffer() -> None:
    """``same`` hands its argument back; what is written into the result is read from the argument.

    relu [same] add_ exp [cosine] add  →  as it is      same─add_~exp─cosine
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        same(buffer).add_(1)
        return cosine(torch.exp(buffer)) + buffer

    assert Checked(fn)(x()).steps == "relu | [same getitem] | add_ exp | [cosine getitem] | add"


class Cached(nn.Module):
    """Its breaks reach the cache through ``self``: no argument shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", x())

    @bcg.eager_break(mutates_args=("out",))
    def read_cache(self, out: Tensor) -> None:
        out.copy_(self.cache)

    @bcg.eager_break
    def grow_cache(self, x: Tensor) -> None:
        self.cache.add_(x)


class GraphWrites(Cached):
    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.empty_like(x), torch.empty_like(x)
        self.read_cache(first)
        self.cache.mul_(x)
        self.read_cache(second)
        return first - second


def test_a_write_to_a_buffer_stays_between_breaks_that_read_it_unseen() -> None:
    """The breaks are given only what they write into.

    empty empty [read_cache] mul_ [read_cache] sub  →  [empty empty read_cache] | mul_ | [read_cache] | sub
    """
    checked = Checked(GraphWrites())(x())(x())
    assert checked.steps == "[empty_like empty_like read_cache] | mul_ | [read_cache] | sub"


class GraphReads(Cached):
    def forward(self, x: Tensor) -> Tensor:
        before = torch.sin(self.cache)
        self.grow_cache(x)
        after = torch.exp(self.cache)
        self.grow_cache(after)
        return before + self.cache


def test_reads_of_a_buffer_stay_on_their_side_of_breaks_that_write_it_unseen() -> None:
    """``exp`` takes no result of the first break and feeds the second.

    sin [grow_cache] exp [grow_cache] add  →  as it is
    """
    assert Checked(GraphReads())(x())(x()).steps == "sin | [grow_cache] | exp | [grow_cache] | add"


class BatchNorm(Cached):
    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.empty(4), torch.empty(4)
        self.read_cache(first)
        normal = F.batch_norm(x, self.cache, torch.ones(4), training=True)
        self.read_cache(second)
        return normal + first - second


def test_running_averages_advance_between_the_breaks_around_them() -> None:
    """``batch_norm`` writes its running mean, which is no result of it.

    [read_cache] batch_norm [read_cache] add sub  →  as it is
    """
    module = BatchNorm()
    module.cache = torch.ones(4)
    steps = Checked(module)(x())(x()).plan.steps
    assert [step.kind for step in steps][-4:] == ["break", "segment", "break", "segment"]
    assert "batch_norm" in [node.op for node in steps[-3].nodes]


# -- random numbers ----------------------------------------------------------------------------------------------------


def test_random_numbers_stay_between_breaks() -> None:
    """A break may draw numbers too: which comes first decides what each gets.

    relu [cosine] rand add [cosine] add  →  as it is
    """

    def fn(x: Tensor) -> Tensor:
        first = cosine(torch.relu(x))
        noise = torch.rand(4, 4) + x
        return first + cosine(noise)

    assert Checked(fn)(x()).steps == "relu | [cosine getitem] | rand add | [cosine getitem] | add"


def test_breaks_and_the_graph_draw_random_numbers_in_turn() -> None:
    """No value leads from one draw to the next.

    rand [draw] dropout [draw] rand_like add …  →  as it is
    """

    def fn(x: Tensor) -> list[Tensor]:
        a, b = torch.empty(4, 4), torch.empty(4, 4)
        first = torch.rand(4, 4)
        draw(a)
        second = F.dropout(x, 0.5, training=True)
        draw(b)
        return [first, a, second, b, torch.rand_like(x)]

    assert Checked(fn)(x()).steps == "empty empty rand | [draw] | dropout | [draw] | rand_like"


def test_a_custom_op_may_draw_random_numbers() -> None:
    """Nobody sees its body.

    rand [negative] rand [cosine] add  →  as it is
    """

    def fn(x: Tensor) -> Tensor:
        a = negative(torch.rand(4, 4))
        return cosine(torch.rand(4, 4)) + a

    assert Checked(fn)(x()).steps == "rand | [negative] | rand | [cosine getitem] | add"


def test_dropout_that_drops_nothing_may_move() -> None:
    """Without training, dropout draws nothing.

    relu [cosine] dropout add [cosine] add  →  relu dropout add | [cosine cosine] | add
    """

    def fn(x: Tensor) -> Tensor:
        first = cosine(torch.relu(x))
        return first + cosine(F.dropout(x, 0.5, training=False) + 1)

    assert Checked(fn)(x()).steps == "relu dropout add | [cosine getitem cosine getitem] | add"


# -- the caller's tensors ----------------------------------------------------------------------------------------------


def test_inputs_that_overlap_in_a_later_call_keep_their_order() -> None:
    """Compiled for separate inputs, called with overlapping ones: no guard tells, so a write to one counts for all.

    [cosine] add_ exp [cosine] add  →  as it is      add_~exp, if a and b overlap
    """

    def fn(a: Tensor, b: Tensor) -> Tensor:
        first = cosine(b)
        a.add_(first)
        return cosine(torch.exp(b)) + first

    checked = Checked(fn)(x(), x())
    memory = x(6, 4)
    checked(memory[:4], memory[2:])
    checked(memory[2:], memory[:4])
    same_tensor = x()
    checked(same_tensor[:], same_tensor[:])
    assert checked.steps == "[cosine getitem] | add_ exp | [cosine getitem] | add"


def test_an_input_may_overlap_a_buffer_of_the_module() -> None:
    """As above, with a slice of the module's own buffer handed in.

    [grow_cache] … →  reads of the input stay behind the break that writes the buffer
    """

    class Module(Cached):
        def forward(self, x: Tensor) -> Tensor:
            self.cache.mul_(2)
            first = cosine(x)
            self.cache.add_(first)
            return cosine(torch.exp(x)) + first

    module = Module()
    checked = Checked(module)(x())
    expected = checked.eager(checked.eager.cache[:])
    assert torch.equal(checked.compiled(module.cache[:]), expected)
    assert torch.equal(module.cache, checked.eager.cache)


def test_inputs_that_nobody_writes_do_not_matter() -> None:
    """As above without a write: whatever overlaps, ``exp`` may move.

    sin [cosine] exp [cosine] add  →  sin exp | [cosine cosine] | add
    """

    def fn(a: Tensor, b: Tensor) -> Tensor:
        first = cosine(torch.sin(a))
        return cosine(torch.exp(b)) + first

    memory = x(6, 4)
    checked = Checked(fn)(x(), x())(memory[:4], memory[2:])
    assert checked.steps == "sin exp | [cosine getitem cosine getitem] | add"


def test_a_break_writes_one_input_and_another_is_read_after() -> None:
    """``write`` is given a; b may overlap it.

    [write] exp [write] add  →  as it is
    """

    def fn(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        write(x, a)
        after = torch.exp(b)
        write(after, a)
        return after + b

    memory = x(6, 4)
    checked = Checked(fn)(x(), x(), x())(memory[:4], memory[2:], x())
    assert checked.steps == "[write] | exp | [write] | add"


# -- breaks without a tensor -------------------------------------------------------------------------------------------


def test_breaks_without_a_tensor_run_once_each() -> None:
    """They read and write whatever they like through Python."""

    def fn(x: Tensor) -> Tensor:
        tick()
        a = torch.relu(x)
        tick()
        return a + 1

    ticks.clear()
    Checked(fn)(x())
    assert len(ticks) == 2 * 2


class Ticking(Cached):
    @bcg.eager_break
    def double_cache(self) -> None:
        self.cache.mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.sin(self.cache)
        self.double_cache()
        self.cache.add_(x)
        self.double_cache()
        return before + self.cache


def test_a_break_without_a_tensor_keeps_its_place_among_reads_and_writes_of_its_module() -> None:
    """``double_cache`` has neither arguments nor results.

    sin [double_cache] add_ [double_cache] add  →  as it is
    """
    assert Checked(Ticking())(x())(x()).steps == "sin | [double_cache] | add_ | [double_cache] | add"


def test_a_break_without_a_tensor_moves_nothing() -> None:
    """It counted as arithmetic on numbers, so that ``sin`` was moved in front of it though no break could be joined.

    relu [tick] sin  →  as it is
    """

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.relu(x)
        tick()
        return a, torch.sin(x)

    assert Checked(fn)(x()).steps == "relu | [tick] | sin"


# -- regions -----------------------------------------------------------------------------------------------------------


def test_a_vmapped_function_stays_whole() -> None:
    """Its nodes are one unit: ``sin`` in it feeds the second break, so all of it moves up.

    relu [cosine] vmap(sin mul) [cosine] add  →  relu vmap(…) | [cosine cosine] | add
    """

    def fn(x: Tensor) -> Tensor:
        first = cosine(torch.relu(x))
        rows = torch.vmap(lambda row: torch.sin(row) * row.sum())(x)
        return first + cosine(rows)

    steps = Checked(fn)(x()).plan.steps
    assert [step.kind for step in steps] == ["segment", "break", "segment"]
    ops = [node.op for node in steps[0].nodes]
    assert ops.index("_vmap_increment_nesting") < ops.index("sin") < ops.index("_vmap_decrement_nesting")


def test_a_break_within_a_mode_runs_in_it_and_ends_no_region() -> None:
    """Autocast is entered before the break and left behind it; the nodes on both sides know their mode.

    autocast( matmul [cosine] matmul ) matmul  →  matmul | [cosine] | matmul matmul
    """

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = cosine(x @ x)
            b = a @ x
        return b, b.float() @ x

    assert Checked(fn)(x()).steps == "matmul | [cosine getitem] | matmul float matmul"


def test_items_of_a_tuple_stay_with_their_producer() -> None:
    """The second item is read behind the break only.

    topk item item [cosine] add  →  topk getitem getitem | [cosine] | add
    """

    def fn(x: Tensor) -> Tensor:
        values, indices = torch.topk(x, 2)
        return cosine(values) + indices

    assert Checked(fn)(x()).steps == "topk getitem getitem | [cosine getitem] | add"


def test_breaks_by_rule_are_ordered_as_declared_ones() -> None:
    """``exp`` is a break by rule and not opaque: what it does is seen, and only ``add_`` must wait for it.

    relu [exp] add_ [exp] add  →  as it is      relu~exp~add_~exp
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        first = torch.exp(buffer)
        buffer.add_(1)
        return first + torch.exp(buffer)

    assert Checked(fn, breaks=["op:aten::exp"])(x()).steps == "relu | [exp] | add_ | [exp] | add"


def test_numbers_that_change_join_the_break_that_uses_them() -> None:
    """``count // 2`` stands within a segment and does not split it.

    relu (count // 2) sin [mul] add  →  relu sin | [floordiv mul] | add
    """

    def fn(x: Tensor, count: int) -> Tensor:
        a = torch.relu(x)
        half = count // 2
        return (torch.sin(a) * half) + 1

    checked = Checked(fn)(x(), 6)
    checked(x(), 9)
    checked(x(), 12)
    program = programs_of(checked.compiled)[-1]
    assert program.plan is not None
    assert [[short(n.op) for n in step.nodes] for step in program.plan.steps] == [
        ["relu", "sin"],
        ["floordiv", "mul"],
        ["add"],
    ]


# -- known faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability, training", [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_is_an_alias(probability: float, training: bool) -> None:
    """Run eagerly, such a dropout hands its argument back; under fake tensors torch makes a copy instead. ``mul`` reads
    the buffer through it, and was moved behind the break that writes the buffer.

    relu dropout [cosine] mul [double] add  →  as it is      dropout─mul~double, cosine─mul
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        alias = F.dropout(buffer, probability, training)
        read = alias * cosine(x)
        return double(buffer) + read

    Checked(fn)(x())


class Pool:
    """Holds a tensor, and is no module."""

    def __init__(self) -> None:
        self.cache = x()


pool = Pool()


@bcg.eager_break(fake=torch.empty_like)
def grow_pool(x: Tensor) -> Tensor:
    pool.cache.add_(x)
    return x.cos()


def test_reads_of_a_pool_stay_on_their_side_of_breaks_that_write_it_unseen() -> None:
    """Key-value caches are often held by an object that is no module. ``exp`` reads it between two breaks that grow it.

    sin [grow_pool] exp [grow_pool] add  →  as it is
    """

    def fn(x: Tensor) -> Tensor:
        first = grow_pool(torch.sin(x))
        return grow_pool(torch.exp(pool.cache)) + first

    pool.cache = x()
    expected = fn(x())
    pool.cache = x()
    assert torch.equal(torch.compile(fn, backend="bcg", fullgraph=True)(x()), expected)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_failing_check_lets_nothing_after_it_happen() -> None:
    """A check of a number read from data has no result; it was moved behind the writes that it is to prevent.

    sum [item] [check] add_ [write]  →  sum | [item check] | add_ | [write]
    """

    def fn(x: Tensor, buffer: Tensor, out: Tensor) -> Tensor:
        count = x.sum().to(torch.int64).item()
        torch._check(count < 5)
        buffer.add_(1)
        write(buffer, out)
        return x * count

    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options={"min_segment_kernels": 1})
    buffer = torch.zeros(4)
    compiled(torch.ones(4), buffer, torch.zeros(4))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        compiled(torch.ones(4) * 2, buffer, torch.zeros(4))
    assert torch.equal(buffer, torch.ones(4))


def test_one_tensor_may_be_both_what_a_break_reads_and_what_it_writes() -> None:
    """``write`` declares that it writes ``out``; that ``x`` is the same tensor does not make it undeclared.

    relu [write] add  →  as it is
    """

    def fn(x: Tensor) -> Tensor:
        buffer = torch.relu(x)
        write(buffer, buffer)
        return buffer + 1

    assert Checked(fn)(x()).steps == "relu | [write] | add"
