"""The text of a plan and its hash: what they depend on, and what not; and JSON."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.plan import Plan, plan_from_json, plan_hash, plan_text, plan_to_json
from bcg_compiler.runtime import programs_of


@bcg.eager_break(mutates_args=("out",))
def write(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


def plan_of(fn: Callable[..., Any], *args: Any, again: tuple[Any, ...] = (), **options: Any) -> Plan:
    """The plan of ``fn(*args)``; that of the recompile for ``again`` if given."""
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options={"min_segment_kernels": 1, **options})
    compiled(*args)
    if again:
        compiled(*again)
    plan = programs_of(compiled)[-1].plan
    assert plan is not None
    return plan


def from_source(source: str, path: str = "user.py", **given: Any) -> Callable[..., Any]:
    """The function ``fn`` of a source text, as if it stood in the file ``path``."""
    scope = {"torch": torch, "cosine": cosine, "write": write, **given}
    exec(compile(source, path, "exec"), scope)
    return scope["fn"]


def x(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 4))


# -- golden ------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(2, 4))

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        projected = torch.relu(self.proj(hidden)) + 1
        write(projected, self.cache)
        return (self.cache * 3 * 3 + projected) * count


def test_the_text_of_a_small_module() -> None:
    """Everything that a text can hold, once. Hashes and keys are masked: they depend on the version of torch."""
    plan = plan_of(Block(), x(2, 4), 5, again=(x(2, 4), 6), min_segment_kernels=2)
    name = f"{write.__module__}.write"
    expected = f"""\
plan …: 2 segments (2 different), 2 breaks
pass mark_break_functions: 1
pass mark_uncapturable: 1
given proj.weight static float32[4, 4]
given proj.bias static float32[4]
given in2 input float32[2, 4]
given cache static float32[2, 4]
given in4 number
slot in2
step 0 segment unit …: 3 ops, 3 kernels
  reads in2, proj.weight, proj.bias
  proj: linear
  .: relu add
  gives %7 float32[2, 4]
step 1 break: 1 op, 0 kernels
  reads %7, cache
  .: {name}
  eager_break: %8 {name}: {name} is declared a break
step 2 segment unit …: 3 ops, 3 kernels
  reads cache, %7
  .: mul*2 add
  gives %11 float32[2, 4]
  frees %7
step 3 break: 1 op, 1 kernels
  reads %11, in4
  .: mul
  host_number: %12 mul: a Python number changes between calls: a recording would freeze it
  gives %12 float32[2, 4]
  frees %11
return %12
"""
    assert re.sub(r"\b[0-9a-f]{12,16}\b", "…", plan_text(plan)).splitlines() == expected.splitlines()


# -- what the text does not depend on ----------------------------------------------------------------------------------

SOURCE = """
def fn(a, b):
    c = torch.relu(a) + b
    d = cosine(c)
    e = torch.sin(c)
    return (cosine(e) + d, e.view(-1))
"""
PLAIN = from_source(SOURCE)


def test_names_of_variables_do_not_show() -> None:
    renamed = re.sub(r"\b([abcde])\b", r"other_\1", SOURCE)
    assert plan_text(plan_of(from_source(renamed), x(), x())) == plan_text(plan_of(PLAIN, x(), x()))


def test_names_of_variables_do_not_show_in_symbolic_sizes() -> None:
    """Torch numbers its symbols by the names of the variables they come from."""
    texts = {
        plan_text(plan_of(from_source(source), x(4, 4), x(4, 4), again=(x(6, 4), x(6, 4))))
        for source in (SOURCE, re.sub(r"\ba\b", "zz", SOURCE), re.sub(r"\bb\b", "q", SOURCE))
    }
    assert len(texts) == 1
    assert "float32[s0, 4]" in texts.pop()


@pytest.mark.parametrize("result", ["torch.cat([b, a])", "(a[:, None] * b[None]).view(-1)"])
def test_names_of_variables_do_not_order_the_terms_of_a_size(result: str) -> None:
    """``s0 + s1`` became ``s1 + s0``, and the hash another, when variables were renamed."""
    source = f"def fn(a, b):\n    return {result}\n"
    texts = set()
    for name in "abxyqk":
        if name == "b":
            continue
        fn = from_source(re.sub(r"\ba\b", name, source))
        texts.add(plan_text(plan_of(fn, x(3), x(5), again=(x(6), x(7)))))
    assert len(texts) == 1


def test_names_of_variables_do_not_order_the_numbers_of_a_reason() -> None:
    """``the Python number s0, s1`` became ``s1, s0``."""
    source = "def fn(a, b):\n    return torch.ones(3) * a * b * (a + b)\n"
    texts = set()
    for name in "axyqk":
        fn = from_source(re.sub(r"\ba\b", name, source))
        texts.add(plan_text(plan_of(fn, 3, 4, again=(5, 6))))
    assert len(texts) == 1


def test_lines_and_files_do_not_show() -> None:
    moved = from_source("# A comment.\n\n\n" + SOURCE, path="/another/folder/of_the_user.py")
    first, second = plan_of(PLAIN, x(), x()), plan_of(moved, x(), x())
    assert plan_text(first) == plan_text(second)
    assert first != second  # the plan itself has them, for people
    assert "another" in plan_to_json(second)
    assert "another" not in plan_text(second)


def test_values_of_inputs_do_not_show() -> None:
    assert plan_text(plan_of(PLAIN, x(), x())) == plan_text(plan_of(PLAIN, -x(), torch.randn(4, 4)))


def test_names_of_passes_that_ran_are_not_in_the_hash() -> None:
    """The hash is what ranks compare: what runs, not what led there."""
    first = plan_of(PLAIN, x(), x())
    second = plan_of(PLAIN, x(), x(), disable_passes=["mark_uncapturable"])
    assert plan_text(first) != plan_text(second)
    assert plan_hash(first) == plan_hash(second)


# A folder and a hash seed of its own, and variables of other names, for each of two processes.
SCRIPT = """
import json
import sys

import torch

import bcg_compiler as bcg
from bcg_compiler.plan import plan_hash, plan_text
from bcg_compiler.runtime import programs_of


@bcg.eager_break(fake=lambda x: {"a": torch.empty_like(x), "b": [x]})
def attention(x):
    return {"a": x.cos(), "b": [x]}


@torch.library.custom_op("bcg_tests_text::negative", mutates_args=())
def negative(x: torch.Tensor) -> torch.Tensor:
    return -x


@negative.register_fake
def _(x):
    return torch.empty_like(x)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, HIDDEN, COUNT):
        INNER = torch.nn.functional.gelu(self.up(HIDDEN))
        RESULT = attention(self.down(INNER))
        self.seen.add_(RESULT["a"].sum(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            SCALED = (INNER.t() @ RESULT["b"][0]).float() * COUNT
        HEAD, TAIL = SCALED.split([3, 5])
        return negative(HEAD), torch.nn.functional.dropout(TAIL, 0.5, True) + self.seen, HIDDEN.shape[0] // 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, HIDDEN, COUNT):
        return [LAYER(HIDDEN, COUNT) for LAYER in self.layers]


MODEL = torch.compile(Model(), backend="bcg", fullgraph=True, options={"breaks": ["op:aten::gelu"]})
with torch.no_grad():
    for LENGTH, COUNT in ((3, 2), (5, 7)):
        MODEL(torch.ones(LENGTH, 4), COUNT)
json.dump([[plan_text(p.plan), plan_hash(p.plan)] for p in programs_of(MODEL)], sys.stdout)
"""


def test_the_text_is_the_same_in_another_process_folder_and_file(tmp_path: Path) -> None:
    """Ranks compare hashes: nothing of a process may get into them."""
    running = []
    for index, prefix in enumerate(("", "z_")):
        folder = tmp_path / "".join("ab"[: index + 1]) / "models"
        folder.mkdir(parents=True)
        script = folder / f"script{index}.py"
        script.write_text("\n" * 7 * index + re.sub(r"\b([A-Z]{4,})\b", rf"{prefix}\1", SCRIPT))
        environment = {**os.environ, "PYTHONHASHSEED": str(index + 1)}
        command = [sys.executable, str(script)]
        running.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True))
    first, second = (json.loads(process.communicate()[0]) for process in running)
    assert first == second
    text, _ = first[-1]
    for part in ("layers.1.up.weight", "bcg_tests_text::negative", "user_rule", "s0", "number"):
        assert part in text
    assert str(tmp_path) not in text


# -- what the hash depends on ------------------------------------------------------------------------------------------

BASE = "def fn(a, b):\n    return cosine(torch.relu(a) * 2) - b\n"
CHANGED = {
    "an op": BASE.replace("relu", "sin"),
    "a constant": BASE.replace("* 2", "* 3"),
    "the type of a constant": BASE.replace("* 2", "* 2.0"),
    "which argument": BASE.replace("relu(a)", "relu(b)"),
    "an op more": BASE.replace("- b", "- b - b"),
    "the order of ops": BASE.replace("torch.relu(a) * 2", "torch.relu(a * 2)"),
    "no break": BASE.replace("cosine", "torch.cos"),
    "what is returned": BASE.replace("return ", "return a - b, "),
}


@pytest.mark.parametrize("source", CHANGED.values(), ids=CHANGED)
def test_the_hash_changes_with_what_is_computed(source: str) -> None:
    base = plan_of(from_source(BASE), x(), x())
    assert plan_hash(plan_of(from_source(source), x(), x())) != plan_hash(base)


def test_the_order_of_what_is_returned_is_in_the_hash() -> None:
    one = from_source("def fn(a, b):\n    return cosine(a), torch.sin(b)\n")
    other = from_source("def fn(a, b):\n    c = cosine(a)\n    return torch.sin(b), c\n")
    assert plan_hash(plan_of(one, x(), x())) != plan_hash(plan_of(other, x(), x()))


def test_the_order_of_arguments_is_in_the_hash() -> None:
    """``b - c`` and ``c - b`` had equal plans."""
    one = from_source("def fn(a, b):\n    return cosine(a) - b\n")
    other = from_source("def fn(a, b):\n    return b - cosine(a)\n")
    assert plan_hash(plan_of(one, x(), x())) != plan_hash(plan_of(other, x(), x()))


OTHER = {
    "shape": x(4, 8),
    "dtype": x().double(),
    "number of dimensions": x(2, 4, 4),
    "strides of a transposed view": x(4, 4).t().contiguous().t(),
    "strides of rows left out": x(8, 4)[::2],
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_the_hash_changes_with_shape_dtype_and_strides(other: Tensor) -> None:
    fn = from_source("def fn(a):\n    return cosine(torch.relu(a) * 2)\n")
    assert plan_hash(plan_of(fn, other)) != plan_hash(plan_of(fn, x()))


def test_the_hash_changes_where_a_size_is_symbolic() -> None:
    fn = from_source("def fn(a):\n    return cosine(torch.relu(a) * 2)\n")
    assert plan_hash(plan_of(fn, x(3, 4), again=(x(4, 4),))) != plan_hash(plan_of(fn, x(4, 4)))


def test_the_order_of_two_breaks_is_in_the_hash() -> None:
    """The steps have the same ops."""
    one = from_source("def fn(a, b):\n    write(a, b)\n    return cosine(a)\n")
    other = from_source("def fn(a, b):\n    c = cosine(a)\n    write(a, b)\n    return c\n")
    assert plan_hash(plan_of(one, x(), x())) != plan_hash(plan_of(other, x(), x()))


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_json_gives_the_same_plan_back() -> None:
    """With symbols, modes, reasons, and values of every kind."""

    def fn(x: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = cosine(x @ x.t())
        return y * count, torch.tensor([1.0, 2.0]) + 1, x.shape[0]

    plan = plan_of(fn, x(3, 4), 2, again=(x(5, 4), 7))
    back = plan_from_json(plan_to_json(plan))
    assert back == plan
    assert plan_text(back) == plan_text(plan)
    assert hash(back) == hash(plan)  # tuples are tuples again, at every depth


def test_json_of_a_plan_without_a_segment() -> None:
    plan = plan_of(lambda a: a.t(), x())
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_slot_that_is_copied_back_says_so() -> None:
    def fn(kept: Tensor, changed: Tensor) -> Tensor:
        h = kept.sin()
        changed.add_(1)
        return h + changed

    assert "\nslot in0\nslot in1 written\n" in plan_text(plan_of(fn, x(), x()))
