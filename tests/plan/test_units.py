"""Where segments are cut into units, and which units are one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.debug.explain import plan_model
from bcg_compiler.plan import CompileUnit, Plan, build
from bcg_compiler.plan.units import whole_groups
from bcg_compiler.runtime import programs_of


def plan_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **options: Any) -> Plan:
    torch.compiler.reset()
    given = {"min_segment_kernels": 1, **options}
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, dynamic=dynamic, options=given)
    compiled(*args)
    plan = programs_of(compiled)[-1].plan
    assert plan is not None
    return plan


def units(plan: Plan) -> list[CompileUnit]:
    return [unit for step in plan.segments for unit in step.units]


def letters(plan: Plan) -> str:
    """The units in order, a letter for each key."""
    names: dict[str, str] = {}
    return "".join(names.setdefault(unit.key, chr(ord("a") + len(names))) for unit in units(plan))


class Layer(nn.Module):
    def __init__(self, width: int = 4, slope: float = 2.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))) * self.slope)


class Stack(nn.Module):
    """A head, layers, and a tail."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x) * 2
        for layer in self.layers:
            x = layer(x)
        return torch.cos(x).sum(-1)


# -- cuts --------------------------------------------------------------------------------------------------------------


def with_open_rows(*shape: int) -> Tensor:
    made = torch.ones(shape)
    torch._dynamo.mark_dynamic(made, 0)
    return made


@pytest.mark.parametrize("given", [torch.ones, with_open_rows])
def test_a_stack_is_its_head_a_layer_for_all_and_its_tail(given: Callable[..., Tensor]) -> None:
    plan = plan_of(Stack(*(Layer() for _ in range(5))), given(3, 4))
    assert letters(plan) == "abbbbbc"
    assert (len(plan.segments), plan.unique_units) == (1, 3)


class Normed(Stack):
    """A head, layers, the norm that layers begin with, and a product."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x) * 2
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[-1:])


@pytest.mark.parametrize("given", [torch.ones, with_open_rows])
def test_a_norm_is_in_one_unit_with_the_sum_that_it_is_of(given: Callable[..., Tensor]) -> None:
    """One kernel can do both. Cut between the layers the sum was written by one, and read by another."""
    plan = plan_of(Normed(*(Layer() for _ in range(5))), given(3, 4))
    ops = {node.ordinal: node.op for step in plan.segments for node in step.nodes}
    head, *layers, tail = ([ops[ordinal] for ordinal in unit.nodes] for unit in units(plan))
    assert head == ["sin", "mul", "layer_norm"]
    assert layers == [["linear", "relu", "mul", "linear", "add", "layer_norm"]] * 5
    assert tail == ["getitem", "linear"]
    assert letters(plan) == "abbbbbc"


def test_the_last_of_equal_layers_gives_what_the_others_give() -> None:
    """Its sum is taken by nobody behind the norm. Without it, the last layer would be one unit more to compile."""
    plan = plan_of(Normed(*(Layer() for _ in range(4))), torch.ones(3, 4))
    _, *layers, _ = units(plan)
    ops = {node.ordinal: node.op for step in plan.segments for node in step.nodes}
    assert [[ops[ordinal] for ordinal in unit.outputs] for unit in layers] == [["add", "layer_norm"]] * 4


def test_cuts_stay_between_layers_where_that_makes_fewer_units() -> None:
    """Behind the last layer there is no norm, so with the next one's norm in each layer the last would be alone."""
    first, *_ = units(plan_of(Stack(*(Layer() for _ in range(5))), torch.ones(3, 4)))
    assert len(first.nodes) == 2  # sin and mul


def test_layers_of_several_kinds_are_one_unit_each() -> None:
    layers = [Layer(), Layer(8), Layer(), Layer(8), Layer(), Layer(8), Layer(slope=3.0)]
    assert letters(plan_of(Stack(*layers), torch.ones(3, 4))) == "abcbcbcde"


def test_a_loop_over_weights_is_cut_where_its_operations_repeat() -> None:
    weights = [torch.ones(4, 4) for _ in range(6)]

    def fn(x: Tensor) -> Tensor:
        x = torch.sin(x)
        for weight in weights:
            x = torch.relu(x @ weight) * 2
        return x.sum()

    assert letters(plan_of(fn, torch.ones(3, 4))) == "abbbbbbc"


def test_one_layer_that_is_called_again_and_again_is_cut() -> None:
    """All its calls have one module path: they are no layers of different numbers."""

    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = self.layers[0](x)
            return x

    plan = plan_of(Again(Layer()), torch.ones(3, 4))
    assert len(set(letters(plan))) == 1 and len(letters(plan)) == 6


def test_a_segment_that_does_not_repeat_itself_stays_whole() -> None:
    layers = [Layer(width, slope) for width, slope in ((3, 1.0), (4, 2.0), (5, 3.0), (6, 4.0))]
    assert letters(plan_of(Stack(*layers), torch.ones(3, 4))) == "a"


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


def test_segments_that_repeat_stay_whole() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = cosine(torch.relu(x) * 2 + 1)
        return x

    plan = plan_of(fn, torch.ones(3, 4))
    assert [len(step.units) for step in plan.segments] == [1, 1, 1, 1]
    assert plan.unique_units == 1


def test_every_operation_is_in_one_unit_and_what_units_take_was_made_before() -> None:
    plan = plan_of(Stack(*(Layer() for _ in range(3))), with_open_rows(3, 4))
    made = set(plan.inputs)
    for step in plan.segments:
        inside = [ordinal for unit in step.units for ordinal in unit.nodes]
        assert len(inside) == len(set(inside))
        made |= {node.ordinal for node in step.nodes if node.ordinal not in set(inside)}
        for unit in step.units:
            assert set(unit.inputs) <= made
            assert set(unit.outputs) <= set(unit.nodes)
            made |= set(unit.outputs)
        assert set(step.outputs) <= made


def test_a_tuple_and_its_items_are_in_one_unit() -> None:
    def fn(x: Tensor) -> Tensor:
        most, where = torch.topk(x, 2)
        x = torch.cat([where * 2, most], -1)  # what follows repeats from the first item of a tuple on
        for _ in range(6):
            one, two = torch.split(x, 2, dim=-1)
            x = torch.cat([two * 2, one], -1)
        return x

    plan = plan_of(fn, torch.ones(3, 4))
    splits = {node.ordinal for step in plan.segments for node in step.nodes if "split" in node.op}
    assert len(units(plan)) > 2
    assert not splits & {ordinal for unit in units(plan) for ordinal in (*unit.inputs, *unit.outputs)}


def test_deep_models_have_as_many_units_as_different_layers_and_a_head_and_a_tail() -> None:
    pytest.importorskip("transformers")
    few, many = (plan_model("llama", layers=layers).plans[0] for layers in (4, 9))
    assert few is not None and many is not None
    assert [few.unique_units, many.unique_units] == [3, 3]
    assert len(units(many)) == len(units(few)) + 5


@pytest.mark.nightly
def test_61_layers_of_deepseek_v3_are_four_units() -> None:
    pytest.importorskip("transformers")
    (plan,) = plan_model("deepseek_v3", layers=61).plans
    assert plan is not None
    assert (len(plan.segments), plan.unique_units) == (121, 4)


# -- keys --------------------------------------------------------------------------------------------------------------


def cut_every(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    def cut(nodes: Sequence[Any], facts: Any, key: Any) -> Any:
        return whole_groups([list(nodes[at : at + count]) for at in range(0, len(nodes), count)], facts)

    monkeypatch.setattr(build, "cut_units", cut)


def adding(number: int) -> Callable[[Tensor], Tensor]:
    """A function of which nothing is known: each has the same name, and none is found under it."""

    def added(x: Tensor) -> Tensor:
        return x + number

    return torch.compiler.allow_in_graph(added)


OTHER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "ops": lambda a, b: (torch.sin(a), torch.cos(b)),
    "constants": lambda a, b: (a * 2, b * 3),
    "types of constants": lambda a, b: (a * 2, b * 2.0),
    "memory formats": lambda a, b: (
        a.clone(memory_format=torch.preserve_format),
        b.clone(memory_format=torch.contiguous_format),
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_units_that_compute_something_else_are_two(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    cut_every(monkeypatch, 1)
    assert letters(plan_of(OTHER[what], torch.ones(2, 4), torch.ones(2, 4))) == "ab"


OPERANDS = {
    "shapes": torch.ones(4, 2),
    "dtypes": torch.ones(2, 4).double(),
    "strides": torch.ones(4, 2).t(),
}


@pytest.mark.parametrize("other", OPERANDS.values(), ids=OPERANDS)
def test_units_on_other_forms_of_tensors_are_two(monkeypatch: pytest.MonkeyPatch, other: Tensor) -> None:
    cut_every(monkeypatch, 1)
    assert letters(plan_of(lambda a, b: (torch.sin(a), torch.sin(b)), torch.ones(2, 4), other)) == "ab"
    assert letters(plan_of(lambda a, b: (torch.sin(a), torch.sin(b)), torch.ones(2, 4), torch.ones(2, 4))) == "aa"


def test_units_in_other_modes_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_every(monkeypatch, 1)

    def fn(a: Tensor, b: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = torch.sin(a)
        with torch.enable_grad():
            second = torch.sin(a)
        return first, second, torch.sin(b)

    assert letters(plan_of(fn, torch.ones(2, 4), torch.ones(2, 4))) == "abc"


def test_units_with_other_objects_are_two_also_in_a_later_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects without a name are numbered as they are met. Numbered anew for each plan, the second of a graph had the
    key of the first as soon as that one was in no segment any more, and ran its code.
    """
    cut_every(monkeypatch, 1)

    def fn(a: Tensor, b: Tensor) -> Any:
        return one(a), two(b)

    one, two = adding(1), adding(2)
    options = {"capturable": [f"{one.__module__}.{one.__qualname__}"], "min_segment_kernels": 1}
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options=options)
    compiled(torch.ones(2), torch.ones(2))
    (program,) = programs_of(compiled)
    before = units(program.plan)  # type: ignore[arg-type]
    graph = program._compiled.graph  # type: ignore[union-attr]
    first = graph.nodes[0]
    assert graph.mark(first, "user_rule", "a test says so")
    again = program._again(graph, program._options).plan  # type: ignore[union-attr]
    (left,) = units(again)
    assert [unit.key for unit in before if unit.nodes == left.nodes] == [left.key]
    assert len({unit.key for unit in before}) == 2


def test_sizes_that_are_operands_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is given to a unit showed as nothing at all: twice the length and the length were one."""
    cut_every(monkeypatch, 1)

    def fn(a: Tensor, b: Tensor) -> Any:
        return torch.sin(a) / a.shape[0], torch.sin(b) / (a.shape[0] * 2)

    found = letters(plan_of(fn, torch.ones(3), torch.ones(3), dynamic=True))
    assert found == "abac"


def test_units_over_two_open_sizes_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is compiled for one size may hold what is known of that one, its divisors say, and ran for others."""
    cut_every(monkeypatch, 1)

    def fn(a: Tensor, b: Tensor) -> Any:
        return torch.sin(a), torch.sin(b)

    assert letters(plan_of(fn, torch.ones(3), torch.ones(5), dynamic=True)) == "ab"


def test_names_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_every(monkeypatch, 1)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zz, self.aa = (nn.Parameter(torch.ones(4)) for _ in range(2))

        def forward(self, later: Tensor, b: Tensor) -> Any:
            return later * self.zz, b * self.aa

    assert letters(plan_of(Named(), torch.ones(2, 4), torch.ones(2, 4))) == "aa"
