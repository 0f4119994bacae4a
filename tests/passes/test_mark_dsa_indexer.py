"""The indexer of sparse attention and the projection of its weights, of any model: one break where it is asked for."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.models import zoo
from bcg_compiler.passes.mark_dsa_indexer import mark_dsa_indexer
from bcg_compiler.passes.mark_logits_gate import mark_logits_gate

GraphOf = Callable[..., AnnotatedGraph]


class SparseIndexer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wk, self.weights_proj = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.wk(x).relu()
        return (self.weights_proj(x) @ keys.mT).topk(2).indices


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.indexer, self.weights_proj = SparseIndexer(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.weights_proj(x).sin()
        chosen = self.indexer(x)
        return x.cos() * chosen.sum(-1, keepdim=True) + chosen.amax()


@pytest.fixture
def graph(graph_of: GraphOf) -> AnnotatedGraph:
    return graph_of(Layer(), torch.randn(4, 8))


def marked(graph: AnnotatedGraph) -> list[str]:
    return [f"{r.code}: {graph.facts[n].op}@{graph.facts[n].module}" for n, r in graph.marks.items()]


def test_the_whole_module_is_marked_and_its_weights_projection_by_a_mark_of_its_own(graph: AnnotatedGraph) -> None:
    """A projection of that name outside of an indexer is none of it."""
    assert mark_logits_gate(graph, wanted=True).changes == 1
    assert marked(graph) == ["logits_gate: linear@indexer.weights_proj"]
    result = mark_dsa_indexer(graph, wanted=True)
    assert (result.changes, result.notes) == (6, ())
    inside = [facts for facts in graph.facts.values() if facts.module.startswith("indexer")]
    assert [graph.facts[node] for node in graph.nodes if node in graph.marks] == inside
    assert marked(graph).count("logits_gate: linear@indexer.weights_proj") == 1


@pytest.mark.parametrize("run", [mark_dsa_indexer, mark_logits_gate])
def test_a_graph_is_untouched_where_nothing_is_asked_or_found(
    graph: AnnotatedGraph, graph_of: GraphOf, run: Callable[..., object]
) -> None:
    assert run(graph, wanted=False).changes == 0 and graph.marks == {}  # type: ignore[attr-defined]
    other = graph_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    before = other.module.code, dict(other.facts)
    result = run(other, wanted=True)
    assert (result.changes, len(result.notes)) == (0, 1) and "no " in result.notes[0]  # type: ignore[attr-defined]
    assert (other.marks, (other.module.code, other.facts)) == ({}, before)


def inputs(built: zoo.ZooModel) -> Iterator[dict[str, Tensor]]:
    for seed in range(2):
        yield built.make_inputs(40, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "layers"), [("deepseek_v32", 1), pytest.param("glm_moe_dsa", 3, marks=pytest.mark.nightly)]
)
def test_the_indexers_of_transformers_are_one_break_a_layer_with_eager_s_bits(name: str, layers: int) -> None:
    """The result is read by the mask and, in GLM-5, by later layers that share it."""
    built = zoo.build(name, layers=layers, config={"experts_implementation": "batched_mm"})
    compiled = torch.compile(built.model, backend="bcg", options={"mark": ["dsa_indexer", "logits_gate"]})
    for given in inputs(built):
        assert torch.equal(compiled(**given).logits, built.model(**given).logits)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and bcg.stats(compiled).replays == 1
    assert len(program.plan.breaks) == layers and len(program.plan.segments) == layers + 1
    for step in program.plan.breaks:
        codes = [reason.code for reason in step.reasons]
        assert codes.count("logits_gate") == 1 and set(codes) == {"logits_gate", "dsa_indexer"}
