"""Whether a small segment is worth a graph, by the costs of launches; what a plan says of it, and that results stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.plan import Plan
from bcg_compiler.plan.costs import Island, LaunchCosts

#: Breaks beside it, copies for its graph, copies without it → the fewest kernels that are worth a graph.
DECISIONS = {
    (1, 0, 0): 1,
    (2, 0, 0): 1,
    (2, 1, 0): 2,
    (2, 2, 0): 3,
    (2, 2, 1): 2,
    (2, 1, 1): 1,
    (1, 2, 0): 3,
}


@pytest.mark.parametrize("around, least", DECISIONS.items())
def test_more_kernels_are_worth_more(around: tuple[int, int, int], least: int) -> None:
    worth = [LaunchCosts().worth_a_graph(Island(frozenset(), kernels, *around)) for kernels in range(1, 40)]
    assert worth == [kernels >= least for kernels in range(1, 40)]


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


def chain(kernels: int) -> Callable[[Tensor], Tensor]:
    """Some kernels on the values of two breaks, then another break, then enough for a graph."""

    def fn(x: Tensor) -> Tensor:
        x = cosine(x) + cosine(x)
        for _ in range(kernels - 1):
            x = x.sin()
        return cosine(x).exp().relu() * 2 + 1 - x

    return fn


def planned(fn: Callable[..., Any], **options: Any) -> Plan:
    torch.compiler.reset()
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options={"capture": "emulated", **options})
    for _ in range(3):
        x = torch.randn(4, 4)
        assert torch.equal(compiled(x), fn(x))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None
    return program.plan


def test_results_are_eager_s_whatever_is_decided() -> None:
    """Two kernels are the fewest: a graph of them needs two copies; the last segment one, without that graph."""
    assert [len(planned(chain(kernels)).segments) for kernels in (1, 2, 3)] == [1, 2, 2]
    assert [len(planned(chain(2), min_segment_kernels=least).segments) for least in (1, 2, 3, 99)] == [2, 2, 1, 0]


def test_the_plan_says_what_both_would_cost() -> None:
    reasons = {r.text for step in planned(chain(1)).breaks for r in step.reasons if r.code == "small_segment"}
    assert reasons == {"a graph costs about 17.3 µs a call with 2 copies, its 1 eager kernel 13.0 µs with 1 copy"}
    reasons = {
        r.text
        for step in planned(chain(1), min_segment_kernels=9).breaks
        for r in step.reasons
        if r.code == "small_segment"
    }
    assert reasons == {"fewer kernels than min_segment_kernels=9"}


def test_results_that_are_handed_out_as_they_lie_are_not_copied() -> None:
    """A last segment of two kernels, on a break's value: 2.5 + 1.8 + 5.6, and 5.6 more for a copy of its result."""

    def fn(x: Tensor) -> Tensor:
        return cosine(x).exp().relu()

    assert [len(planned(fn, outputs=outputs).segments) for outputs in ("copy", "alias")] == [0, 1]
