"""What two plans differ in: counted, folded, and with the user's lines."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.debug.diff import DiffError, GraphDiff, diff_plans, diff_view, plans_of, read_plans
from bcg_compiler.plan import Plan, plan_to_json
from bcg_compiler.plan.plan import Value
from bcg_compiler.runtime import programs_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(8, 8)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x).relu()).relu()


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plan_of(rows: int = 16, *, open_rows: bool = False, **options: Any) -> Plan:
    bcg.reset()
    compiled = torch.compile(Layered(), backend="bcg", options={"min_segment_kernels": 1, **options})
    x = torch.rand(rows, 8)
    if open_rows:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.inference_mode():
        compiled(x)
    (program,) = programs_of(compiled)
    assert program.plan is not None
    return program.plan


@pytest.fixture(scope="module")
def whole() -> Plan:
    return plan_of()


@pytest.fixture(scope="module")
def broken() -> Plan:
    return plan_of(breaks=["module:layers.*.attn"])


def printed(graphs: Sequence[GraphDiff]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(diff_view(graphs))
    return cast(io.StringIO, console.file).getvalue()


def numbers(graph: GraphDiff) -> dict[str, tuple[int | None, int | None]]:
    return {number.name: (number.before, number.after) for number in graph.numbers if number.differs}


def test_a_plan_is_the_same_as_itself_also_from_json(whole: Plan, tmp_path: Path) -> None:
    (tmp_path / "plans.json").write_text(f"[{plan_to_json(whole)}, null]")
    found = diff_plans([whole, None], read_plans(tmp_path / "plans.json"))
    assert [graph.equal for graph in found] == [True, True]
    assert "THE SAME  2 graphs" in printed(found)


def test_new_breaks_of_all_layers_are_one_change_with_the_users_line(whole: Plan, broken: Plan) -> None:
    (graph,) = found = diff_plans([whole], [broken])
    assert numbers(graph)["breaks"] == (0, 5)
    assert numbers(graph)["segments"] == (1, 5)
    (change,) = graph.reasons
    assert (change.before, change.after, change.times) == ("", "user_rule", 5)
    assert (change.what, change.where) == ("linear", "layers.{0…4}.attn")
    text = printed(found)
    assert "+ user_rule: linear in layers.{0…4}.attn, 5 times" in text
    assert "test_diff.py" in text and "return self.mlp(self.attn(x).relu()).relu()" in text
    assert "To change it: Drop the rule" in text
    assert "pass mark_rules: 0 changes → 5 changes" in text
    assert "DIFFERENT  1 of 1 graph" in text


def test_breaks_that_are_gone_and_those_with_another_reason(whole: Plan, broken: Plan) -> None:
    (gone,) = diff_plans([broken], [whole])[0].reasons
    assert (gone.before, gone.after) == ("user_rule", "")
    steps = [
        replace(step, reasons=tuple(replace(reason, code="host_sync") for reason in step.reasons))
        if step.kind == "break" and step.index > 3
        else step
        for step in broken.steps
    ]
    (other,) = diff_plans([broken], [replace(broken, steps=tuple(steps))])[0].reasons
    assert (other.before, other.after, other.times) == ("user_rule", "host_sync", 3)
    assert "To change it: Drop" not in printed(diff_plans([broken], [whole]))


def test_buckets_and_bytes_are_compared() -> None:
    few, many = (plan_of(open_rows=True, ladder=ladder) for ladder in ([32, 64], [32, 64, 1 << 20]))
    (graph,) = diff_plans([few], [many])
    assert numbers(graph)["buckets"] == (2, 3)
    before, after = numbers(graph)["bytes forecast"]
    assert before and after and after > before
    assert "buckets: 32, 64 → 32, 64, 1048576" in graph.others
    assert not graph.reasons and not graph.units


def test_a_difference_that_nothing_counts_is_shown_as_text(whole: Plan) -> None:
    """Two plans of different hashes are never the same."""
    slot = replace(whole.slots[0], written=True)
    (graph,) = diff_plans([whole], [replace(whole, slots=(slot,))])
    assert not graph.equal
    assert any(line.startswith("+slot") and "written" in line for line in graph.others)


def test_graphs_that_only_one_has(whole: Plan) -> None:
    found = diff_plans([whole], [whole, whole])
    assert [graph.equal for graph in found] == [True, False]
    assert "before there is no such graph" in printed(found)
    assert not diff_plans([whole], [None])[0].equal


def test_of_a_dump_the_last_plan_of_each_graph_counts(whole: Plan, broken: Plan, tmp_path: Path) -> None:
    for name, plan in (
        ("000_forward", whole),
        ("000_forward/again_2", whole),
        ("000_forward/again_10", broken),
        ("001_forward", whole),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "plan.json").write_text(plan_to_json(plan))
    found = plans_of(str(tmp_path), lambda name: pytest.fail("no model is meant"))
    assert [plan and len(plan.breaks) for plan in found] == [5, 0]


def test_what_is_no_plan_is_told(whole: Plan, tmp_path: Path) -> None:
    old = json.loads(plan_to_json(whole))
    old["steps"][0]["colour"] = "red"
    for name, text, said in (
        ("text.json", "no json", "is not JSON"),
        ("old.json", json.dumps([old]), "no plans of this version"),
        ("list.json", "[1]", "no plans of this version"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DiffError, match=said):
            read_plans(tmp_path / name)
    with pytest.raises(DiffError, match="Cannot read plans from"):
        plans_of(str(tmp_path / "missing.json"), lambda name: pytest.fail("a file is meant"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DiffError, match=r"holds no plan\.json"):
        read_plans(tmp_path / "empty")
    assert plans_of("llama", lambda name: [None]) == [None]


def test_values_that_differ_only_in_what_a_user_calls_them_are_the_same(whole: Plan) -> None:
    """Names of local variables are not part of a plan."""
    renamed: list[Value] = [replace(value, argument="other") for value in whole.values]
    assert diff_plans([whole], [replace(whole, values=tuple(renamed))])[0].equal
