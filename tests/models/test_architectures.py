"""Models nobody here wrote: transformers architectures, compiled, give eager's bits at every call."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import bcg_compiler as bcg
from bcg_compiler.models import zoo
from bcg_compiler.runtime import Stats

# Lengths that repeat, grow, shrink, and cross what mamba2 and qwen3_next take as one chunk.
LENGTHS = (24, 40, 40, 7, 24, 24)
CHUNKED = ("mamba2", "qwen3_next")

ARCHITECTURES = (
    "llama",
    "qwen3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "qwen3_next",
    "mamba2",
    "bert",
    "whisper",
    "longcat_flash",
)


#: Half a minute each, and one dtype takes the way of the other.
SLOW = ("qwen3_next", "mamba2", "longcat_flash")
NIGHTLY = [pytest.mark.nightly, pytest.mark.eager_segments("routing of experts may flip")]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    bcg.reset()
    torch._dynamo.utils.counters.clear()  # they are of the process: tests before this one may have hit a limit


def tensors(output: Any) -> list[torch.Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


#: Under Inductor a router's scores may round to another expert.
DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.eager_segments("routing of experts may flip")),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@torch.inference_mode()
def check_against_eager(model: zoo.ZooModel, lengths: tuple[int, ...]) -> Stats:
    """Run every length through both; each result must be eager's, bit for bit."""
    compiled = torch.compile(model.model, backend="bcg")
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        inputs = model.make_inputs(length, generator)
        wanted, seen = tensors(model.model(**inputs)), tensors(compiled(**inputs))
        assert len(wanted) == len(seen)
        for index, (want, got) in enumerate(zip(wanted, seen, strict=True)):
            assert torch.equal(want, got), f"{model.label}, {length} tokens, output {index} differs from eager"
    return bcg.stats(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in SLOW])
@pytest.mark.parametrize("device", DEVICES)
def test_prefill_gives_the_bits_of_eager(name: str, dtype: torch.dtype, device: str) -> None:
    lengths = (*LENGTHS, 70, 70) if name in CHUNKED else LENGTHS
    stats = check_against_eager(zoo.build(name, dtype=dtype, device=device), lengths)
    # Every call went through programs: none was left to Dynamo's own eager fallback.
    assert stats.graphs > 0 and sum(stats.eager_runs.values()) + stats.replays >= len(lengths)
    assert set(stats.eager_runs) <= {"warm_up", "no_segment"}
    assert stats.replays > 0
    assert stats.recompile_limit_hits == 0


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(torch.bfloat16, id="bfloat16", marks=NIGHTLY)])
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("device", DEVICES)
def test_slow_architectures_give_the_bits_of_eager(name: str, dtype: torch.dtype, device: str) -> None:
    test_prefill_gives_the_bits_of_eager(name, dtype, device)


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_expert_loops_with_nonzero_give_the_bits_of_eager(device: str) -> None:
    """Dynamo itself breaks at the ``nonzero`` of every MoE layer: many small graphs, each a program."""
    model = zoo.build("deepseek_v3", config={"experts_implementation": "eager"}, device=device)
    stats = check_against_eager(model, LENGTHS)
    assert stats.graphs > 2
    assert any("nonzero" in reason or "Dynamic shape" in reason for reason in stats.dynamo_graph_breaks)


def test_the_synchronising_expert_fallback_is_a_break() -> None:
    """``transformers.grouped_mm_fallback`` reads the expert offsets on the host; no tag says so."""
    stats = check_against_eager(zoo.build("deepseek_v3"), (24,))
    assert stats.reasons == {"host_sync": 2}
