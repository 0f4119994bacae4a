"""The texts of a graph, and the picture of its plan, as a dump has them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


NAME = f"{__name__}.cosine"


def fn(x: Tensor) -> Tensor:
    h = x.neg()
    h.add_(x)
    return cosine(h[1:]).sum(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The dump of ``fn``."""
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(fn, backend="bcg", options={"dump": tmp_path, "capture": "off", "min_segment_kernels": 1})(
            torch.ones(2, 3)
        )
    return tmp_path / "000_fn"


def read(path: Path) -> str:
    """A text without the user's files and lines."""
    return "\n".join(line.partition("  # ")[0] for line in path.read_text().splitlines())


def test_a_line_for_each_node_with_what_is_a_break_and_why(folder: Path) -> None:
    before = """\
given l_x_ -> float32[2, 3]
h = .neg(l_x_) -> float32[2, 3]
add_ = .add_(h, l_x_) -> float32[2, 3]
x = getitem(h, slice(1, None, None)) -> float32[1, 3]
cosine = NAME(x) -> float32[1, 3]
getitem_1 = getitem(cosine, 0) -> float32[1, 3]
sum_1 = .sum(getitem_1, 0) -> float32[3]
return (sum_1)""".replace("NAME", NAME)
    assert read(folder / "passes/00_dynamo.txt") == before
    mark = f"       break: eager_break: {NAME} is declared a break"
    assert read(folder / "passes/03_mark_break_functions.txt") == before.replace("\ngetitem_1", f"\n{mark}\ngetitem_1")
    assert len(list((folder / "passes").iterdir())) == 3  # no other pass has changed anything


def test_facts_say_what_an_operation_touches_by_the_ordinals_of_the_plan(folder: Path) -> None:
    lines = read(folder / "graph.txt").splitlines()
    assert lines[3] == "%2     add_ = .add_(h, l_x_) -> float32[2, 3]"
    assert lines[4] == (
        "       aten::add_.Tensor; 1 kernel; reads memory outside, storage 0, storage 1; "
        "writes storage 1; lies in storage 1"
    )
    assert any("; writes memory outside, the random state; " in line for line in lines)
    named = {line.split()[1]: line.split()[0] for line in lines if line.startswith("%")}
    assert f"gives {named['sum_1']} float32[3]" in (folder / "plan.txt").read_text()


def test_the_picture_has_an_edge_for_what_one_step_gives_another(folder: Path) -> None:
    lines = (folder / "plan.dot").read_text().splitlines()
    assert [line for line in lines if "->" in line and "invis" not in line] == [
        '  given -> step_0 [label="in0 float32[2, 3]"];',
        '  step_0 -> step_1 [label="%3 float32[1, 3]"];',
        '  step_1 -> step_2 [label="%5 float32[1, 3]"];',
        '  step_2 -> returned [label="%6 float32[3]"];',
    ]
    label = f"1 break\\n2 ops, 0 kernels\\neager_break: {NAME}"
    assert f'  step_1 [label="{label}", fillcolor=orange];' in lines
