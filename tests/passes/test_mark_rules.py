"""What the user's rules mark, and how they say that they are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.errors import RuleError
from bcg_compiler.facts import AnnotatedGraph, NodeFacts
from bcg_compiler.passes.mark_rules import mark_rules
from bcg_compiler.runtime import programs_of

GraphOf = Callable[..., AnnotatedGraph]


@torch.library.custom_op("bcg_tests_rules::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    return -x


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) @ x.t()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class GatedMlp(Mlp):
    pass


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), mlp

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.mlp(self.attn(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(Mlp()), Layer(GatedMlp())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + 1


def x() -> Tensor:
    return torch.ones(4, 4)


@pytest.fixture
def model(graph_of: GraphOf) -> AnnotatedGraph:
    return graph_of(Model(), x())


def marked(graph: AnnotatedGraph) -> list[str]:
    """``op@module`` of what is marked, in order."""
    return [f"{graph.facts[node].op}@{graph.facts[node].module}" for node in graph.nodes if node in graph.marks]


# -- what a rule matches -----------------------------------------------------------------------------------------------

RULES: dict[str, tuple[Any, list[str]]] = {
    "an op": ("op:aten::sin", ["sin@layers.0.attn", "sin@layers.1.attn"]),
    "an overload": ("op:aten::sin.default", ["sin@layers.0.attn", "sin@layers.1.attn"]),
    "a composite op": ("op:aten::matmul", ["matmul@layers.0.attn", "matmul@layers.1.attn"]),
    "a part of a composite op": ("op:aten::mm", ["matmul@layers.0.attn", "matmul@layers.1.attn"]),
    "one module": ("module:layers.1.mlp.up", ["linear@layers.1.mlp.up"]),
    "modules by a pattern": ("module:layers.*.mlp.up", ["linear@layers.0.mlp.up", "linear@layers.1.mlp.up"]),
    "all that is in a module": (
        "module:layers.0.mlp",
        ["linear@layers.0.mlp.up", "relu@layers.0.mlp", "linear@layers.0.mlp.down"],
    ),
    "a class": (
        "class:GatedMlp",
        ["linear@layers.1.mlp.up", "relu@layers.1.mlp", "linear@layers.1.mlp.down"],
    ),
    "classes by a pattern": (
        "class:Att*",
        [f"{op}@layers.{layer}.attn" for layer in (0, 1) for op in ("sin", ".t", "matmul")],
    ),
    "a predicate": (lambda facts: facts.op == "exp" and facts.module == "layers.1", ["exp@layers.1"]),
}


@pytest.mark.parametrize("rule, expected", RULES.values(), ids=RULES)
def test_a_rule_marks_what_it_names(model: AnnotatedGraph, rule: Any, expected: list[str]) -> None:
    result = mark_rules(model, rules=(rule,))
    assert marked(model) == expected
    assert (result.name, result.changes, result.notes) == ("mark_rules", len(expected), ())


def test_the_reason_names_the_rule(model: AnnotatedGraph) -> None:
    def is_exp(facts: NodeFacts) -> bool:
        return facts.op == "exp"

    mark_rules(model, rules=("op:aten::sin", is_exp))
    reasons = {(reason.code, reason.text.rpartition(".")[2]) for reason in model.marks.values()}
    assert reasons == {("user_rule", "rule 'op:aten::sin'"), ("user_rule", "is_exp'")}


def test_several_rules_mark_a_node_once(model: AnnotatedGraph) -> None:
    """The first one gives the reason; the count is that of nodes."""
    result = mark_rules(model, rules=("op:aten::sin", "class:Attention", "op:aten::exp"))
    assert result.changes == 2 * 3 + 2
    texts = [reason.text for reason in model.marks.values()]
    assert texts.count("rule 'op:aten::sin'") == 2
    assert texts.count("rule 'class:Attention'") == 4


def test_an_earlier_mark_keeps_its_reason(model: AnnotatedGraph) -> None:
    first = next(node for node in model.nodes if model.facts[node].op == "sin")
    model.mark(first, "attention", "marked by an earlier pass")
    assert mark_rules(model, rules=("op:aten::sin",)).changes == 1
    assert model.marks[first].code == "attention"


def test_an_overload_is_not_another_one(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: torch.sum(x) + torch.sum(x, 0), x())
    mark_rules(graph, rules=("op:aten::sum.dim_IntList",))
    assert [graph.facts[node].specs[0].shape for node in graph.marks] == [("4",)]


def test_a_custom_op_is_named_like_any_other(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: negative(x) + 1, x())
    assert mark_rules(graph, rules=("op:bcg_tests_rules::negative",)).changes == 1


def test_arithmetic_on_sizes_is_not_matched(graph_of: GraphOf) -> None:
    """A predicate that matches everything marks what works on tensors."""
    given = x()
    torch._dynamo.mark_dynamic(given, 0)
    graph = graph_of(lambda x: x.view(x.shape[0] * 2, -1) + 1, given)
    assert any(facts.host_only for facts in graph.facts.values())
    mark_rules(graph, rules=(lambda facts: True,))
    assert all(not graph.facts[node].host_only for node in graph.marks)


def test_no_rule_marks_nothing(model: AnnotatedGraph) -> None:
    before = model.module.code
    result = mark_rules(model, rules=())
    assert (result.changes, result.notes, model.marks) == (0, (), {})
    assert model.module.code == before


def test_marking_does_not_change_the_graph(model: AnnotatedGraph) -> None:
    before = model.module.code, list(model.facts.items())
    mark_rules(model, rules=("op:aten::sin", "class:Mlp"))
    assert (model.module.code, list(model.facts.items())) == before


# -- wrong rules -------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, str]] = {
    "an unknown op": ("op:aten::sinn", r"names an op that is not registered. Did you mean .*'aten::sin'"),
    "an unknown overload": ("op:aten::sin.dflt", r"names an op that is not registered. Did you mean .*'aten::sin'"),
    "an unknown namespace": ("op:atn::sin", r"names an op that is not registered. Did you mean .*'aten::sin'"),
    "an op without a namespace": ("op:sin", r"names an op that is not registered"),
    "an op that is not in the graph": ("op:aten::cos", r"matches nothing in this graph. Did you mean 'aten::"),
    "an overload that is not in the graph": (
        "op:aten::sin.out",
        r"matches nothing in this graph. Did you mean 'aten::sin'",
    ),
    "a module that is not there": ("module:layers.2.mlp", r"matches nothing .* Did you mean 'layers.[01].mlp'"),
    "a pattern of modules": ("module:model.layers.*.mlp", r"matches nothing .* Did you mean 'layers.[01].mlp'"),
    "a class that is not there": ("class:Atention", r"matches nothing in this graph. Did you mean 'Attention'"),
    "a class in small letters": ("class:attention", r"matches nothing in this graph. Did you mean 'Attention'"),
    "an unknown kind": (
        "layer:0",
        r"Rule 'layer:0' is none of 'op:ns::name\[.overload\]', 'module:<glob>', 'class:<glob>'",
    ),
    "no kind": ("aten::sin", r"Rule 'aten::sin' is none of"),
    "nothing after the kind": ("module:", r"Rule 'module:' is none of"),
}


@pytest.mark.parametrize("rule, message", WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_an_error_with_the_nearest_names(model: AnnotatedGraph, rule: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        mark_rules(model, rules=(rule,))


def test_a_predicate_that_matches_nothing_is_an_error_that_names_it(model: AnnotatedGraph) -> None:
    def never(facts: NodeFacts) -> bool:
        return False

    with pytest.raises(RuleError, match="never' matches nothing in this graph"):
        mark_rules(model, rules=(never,))


def test_an_error_in_a_predicate_surfaces(model: AnnotatedGraph) -> None:
    def faulty(facts: NodeFacts) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mark_rules(model, rules=(faulty,))


def test_compiling_with_a_wrong_rule_fails_with_the_error_inside() -> None:
    compiled = torch.compile(Model(), backend="bcg", options={"breaks": ["class:Atention"]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Did you mean 'Attention'") as caught:
        compiled(x())
    assert isinstance(caught.value.inner_exception, RuleError)


def test_a_rule_for_another_of_dynamo_s_graphs_is_noted() -> None:
    """``tolist`` ends a graph: each rule matches in one of the two only."""

    def fn(x: Tensor) -> Tensor:
        number = torch.sin(x).sum().tolist()
        return torch.exp(x) + number

    compiled = torch.compile(fn, backend="bcg", options={"breaks": ["op:aten::sin", "op:aten::exp"]})
    assert torch.equal(compiled(x()), fn(x()))
    plans = [program.plan for program in programs_of(compiled)]
    assert len(plans) == 2
    notes = [{p.name: p.notes for p in plan.passes}["mark_rules"] for plan in plans if plan is not None]
    assert notes == [
        ("Rule 'op:aten::exp' matches nothing in this graph.",),
        ("Rule 'op:aten::sin' matches nothing in this graph.",),
    ]


def test_an_unknown_op_is_an_error_in_any_graph() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.exp(x) + torch.sin(x).sum().tolist()

    compiled = torch.compile(fn, backend="bcg", options={"breaks": ["op:aten::sinn"]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not registered"):
        compiled(x())
