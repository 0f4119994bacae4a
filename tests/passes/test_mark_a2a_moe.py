"""Expert parallelism: dispatch, experts and combine are one break; a declared one is told what it lacks."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

import bcg_compiler as bcg
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.mark_a2a_moe import mark_a2a_moe

GraphOf = Callable[..., AnnotatedGraph]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def send(x: Tensor) -> Tensor:
    return all_to_all_single(x, None, None, dist.group.WORLD)


class Dispatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return send(x)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dispatch, self.experts = Dispatch(), nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))
        self.combine = Dispatch()

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self.experts(self.dispatch(x))) + x


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Moe(), Moe()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.cos().sin())
        return x * x.exp()


@pytest.mark.usefixtures("one_rank")
def test_each_mixture_of_experts_is_one_break_with_eager_s_bits() -> None:
    """Dispatch and combine are modules of their own: each layer is a region, not all of them one."""
    model = Layers()
    compiled = torch.compile(model, backend="bcg", options={"mark": ["a2a_moe"], "min_segment_kernels": 1})
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(compiled(x), model(x))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and bcg.stats(compiled).replays == 2
    assert [step.kind for step in program.plan.steps] == ["segment", "break"] * 2 + ["segment"]
    assert set(program.plan.reasons()) == {"a2a_moe"}
    assert "linear" in {node.op for step in program.plan.breaks for node in step.nodes}


@pytest.mark.usefixtures("one_rank")
def test_unasked_only_the_collectives_are_breaks(graph_of: GraphOf) -> None:
    graph = graph_of(Layers(), torch.randn(6, 4))
    assert mark_a2a_moe(graph, wanted=False).changes == 0 and graph.marks == {}


@pytest.mark.usefixtures("one_rank")
def test_one_all_to_all_is_no_mixture_of_experts(graph_of: GraphOf) -> None:
    graph = graph_of(lambda x: send(x) + 1, torch.randn(6, 4))
    result = mark_a2a_moe(graph, wanted=True)
    assert (result.changes, graph.marks) == (0, {}) and "no all-to-all" in result.notes[0]


def lacks(graph_of: GraphOf, fn: Callable[[Tensor], Tensor]) -> list[str]:
    graph = graph_of(fn, torch.randn(4, 4))
    result = mark_a2a_moe(graph, wanted=False)
    assert (result.changes, graph.marks) == (0, {})
    return [note.partition(": ")[2].partition(":")[0] for note in result.notes]


def stub(x: Tensor, out: Tensor) -> None:
    out.zero_()


def body(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


DECLARED = dict(reason="a2a_moe", mutates_args=("out",))
complete = bcg.eager_break(capture_stub=stub, barrier=lambda: None, **DECLARED)(body)
bare = bcg.eager_break(**DECLARED)(body)
other = bcg.eager_break(mutates_args=("out",))(body)


@bcg.eager_break(reason="a2a_moe", fake=torch.empty_like, capture_stub=torch.zeros_like, barrier=lambda: None)
def returning(x: Tensor) -> Tensor:
    return x.sin()


held = torch.zeros(4, 4)


def test_a_declared_break_is_told_what_it_lacks(graph_of: GraphOf) -> None:
    def into_own(break_function: Callable[..., None]) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            break_function(x + 1, out)
            return out + out.cos()

        return fn

    def into_held(x: Tensor) -> Tensor:
        complete(x + 1, held)
        return held + 1

    assert lacks(graph_of, into_own(complete)) == []
    assert lacks(graph_of, into_own(bare)) == ["it has no capture_stub", "it has no barrier"]
    assert lacks(graph_of, into_own(other)) == []
    assert lacks(graph_of, lambda x: returning(x + 1) + 1) == ["it returns its result, which each replay copies"]
    assert lacks(graph_of, into_held) == ["it writes into memory from outside of the call"]
