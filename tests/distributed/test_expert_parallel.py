"""Routed experts over several ranks give the logits of one process, compiled or not; a capture talks to nobody."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bcg_compiler as bcg
from bcg_compiler.models import serving
from bcg_compiler.models.layers.all_to_all_torch import TorchAllToAll

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]

SIZES = dict(pages=32, page_size=8)
ROUNDS = 5
BUCKETS = (16, 64)


def batches(rank: int) -> list[dict[int, torch.Tensor]]:
    """The prompts of a rank, round by round: unlike those of other ranks in number and lengths; one token in round 0.

    There, most experts get nothing from anybody.
    """
    generator = torch.Generator().manual_seed(rank)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lengths = [[1], *([draw(2, 16) for _ in range(draw(1, 4))] for _ in range(ROUNDS - 1))]
    return [{i: torch.randint(3, 256, (n,), generator=generator) for i, n in enumerate(given)} for given in lengths]


def call(model: Any, prompts: dict[int, torch.Tensor], compiled: Any = None) -> torch.Tensor:
    """The logits of one batch of whole prompts, in pages of its own."""
    batch = serving.page_pool(model).prefill({i: len(prompt) for i, prompt in prompts.items()})
    ids, positions = torch.cat(list(prompts.values())), batch.positions
    for given in (ids, positions) if compiled is not None else ():
        torch._dynamo.mark_dynamic(given, 0)
    with batch.published():
        return (model if compiled is None else compiled)(ids, positions)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model of transformers in ``tmp_path``, and the logits of one process for what each rank is given.

    No token goes to the last two of its eight experts in its first sparse layer: of four ranks, the last one gets no
    row there at all.
    """
    pytest.importorskip("transformers")
    from bcg_compiler.models import zoo

    theirs: Any = zoo.build(
        "deepseek_v3", config=dict(first_k_dense_replace=0, topk_group=2, num_experts_per_tok=3)
    ).model
    biases = [buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    for bias in biases:
        bias.normal_(0, 0.1)
    biases[0][-2:] = -100
    theirs.save_pretrained(tmp_path)
    alone = serving.load(tmp_path, **SIZES)
    torch.save([[call(alone, prompts) for prompts in batches(rank)] for rank in range(4)], tmp_path / "wanted.pt")
    return tmp_path


def logits(rank: int, ranks: int, folder: Path) -> None:
    wanted = torch.load(folder / "wanted.pt")[rank]
    model: Any = serving.load(folder, all_to_all="torch", **SIZES)
    experts = [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "shard")]
    assert experts and all(len(m.gate_up_proj) == 8 // ranks for m in experts)
    arrived: list[int] = []
    combine = TorchAllToAll.combine

    def counted(self: Any, rows: torch.Tensor, *args: Any) -> None:
        arrived.append(len(rows))
        combine(self, rows, *args)

    with mock.patch.object(TorchAllToAll, "combine", counted):
        for prompts, expected in zip(batches(rank), wanted, strict=True):
            assert_close(call(model, prompts), expected)
    assert len(experts) == 2 and len(arrived) == ROUNDS * 2 and len(set(arrived)) > 2
    if rank == 3:
        assert set(arrived[::2]) == {0}


def compiled_logits(rank: int, ranks: int, folder: Path) -> None:
    wanted = torch.load(folder / "wanted.pt")[rank]
    model: Any = serving.load(folder, all_to_all="torch", **SIZES)
    options = dict(capture="emulated", ladder=bcg.Ladder(BUCKETS), max_padding_factor=64, on_late_capture="error")
    compiled = torch.compile(model, backend="bcg", fullgraph=True, options=options)
    rounds = list(zip(batches(rank), wanted, strict=True))[1:]  # one token would be another graph
    assert_close(call(model, rounds[-1][0], compiled), rounds[-1][1])

    talked: Counter[str] = Counter()

    def spied(name: str) -> Any:
        real = getattr(dist, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            talked[name] += 1
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, spy)

    with spied("all_to_all_single"), spied("barrier"):
        bcg.capture(compiled, progress=False)
        (program,) = bcg.programs_of(compiled)
        assert program.plan is not None
        breaks = program.plan.reasons()["a2a_moe"]
        assert breaks == 2 and talked == {"barrier": breaks * len(BUCKETS)}
        before = program.replays
        for prompts, expected in rounds:
            assert_close(call(model, prompts, compiled), expected)
        assert program.replays - before == len(rounds)
        # Sizes, rows, their experts and their weights there, and rows back.
        assert talked["all_to_all_single"] == 5 * breaks * len(rounds) and talked["barrier"] == breaks * len(BUCKETS)


def compiled_bits(rank: int, ranks: int, folder: Path) -> None:
    model: Any = serving.load(folder, all_to_all="torch", **SIZES)
    compiled = torch.compile(model, backend="bcg", fullgraph=True, options={"capture": "emulated"})
    for prompts in batches(rank)[1:3]:
        eager = call(model, prompts)
        for _ in range(3):  # all ranks warm up, capture and replay a shape together
            assert torch.equal(call(model, prompts, compiled), eager)
    (program,) = bcg.programs_of(compiled)
    assert (program.captures, program.replays) == (2, 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_are_those_of_one_process(ranks: int, checkpoint: Path, on_ranks: OnRanks) -> None:
    on_ranks(ranks, logits)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_compiled_logits_are_those_of_one_process_and_captures_run_no_collective(
    ranks: int, checkpoint: Path, on_ranks: OnRanks
) -> None:
    on_ranks(ranks, compiled_logits)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_compiled_equals_uncompiled_bit_for_bit(ranks: int, checkpoint: Path, on_ranks: OnRanks) -> None:
    on_ranks(ranks, compiled_bits)
