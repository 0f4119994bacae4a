"""Models over context-parallel ranks give what one process gives, chunk by chunk, compiled or not."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.buckets.admission import admit
from bcg_compiler.distributed import GroupRows, Zigzag
from bcg_compiler.errors import ParallelError
from bcg_compiler.models import serving
from bcg_compiler.models.layers.batch import PrefillBatch

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]
Prepare = Callable[..., None]

SIZES = dict(pages=96, page_size=8)
#: Without and with chosen tokens (16 of each context), with layers that share them, with windows (16) and sinks.
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss")
LADDER = (16, 32, 64, 128)


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Write what the ranks read: how many rounds, and the configurations, so that they need not load transformers."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import zoo

    def write(rounds: int, families: tuple[str, ...] = FAMILIES) -> None:
        models: Any = {name: zoo.build(name, device="meta").model for name in families}
        fields = {name: model.config.to_dict() for name, model in models.items()}
        (tmp_path / "given.json").write_text(json.dumps({"rounds": rounds, "fields": fields}, default=str))

    return write


def batches(pool: Any, rounds: int, seed: int = 0) -> Iterator[tuple[PrefillBatch, torch.Tensor]]:
    """Batches of further tokens of some requests, and their ids: the same on all ranks.

    The first one has one token, which one rank holds; then come requests of fewer tokens than there are parts, and
    requests that go on behind what earlier batches wrote.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    had: dict[int, int] = {}
    for step in range(rounds):
        requests = {step: 1} if not step else {step: draw.randint(1, 40)}
        if step > 1:
            # One goes on, long enough for two rows on each of four ranks; others go on or end as it comes.
            requests[draw.choice(list(had))] = draw.randint(16, 30)
            requests |= {request: draw.choice((1, 2, 5, 9)) for request in had if draw.random() < 0.5}
        batch = pool.prefill(requests)
        had = {request: had.get(request, 0) + requests.get(request, 0) for request in {**had, **requests}}
        yield batch, torch.randint(3, 256, (batch.tokens,), generator=generator)
        for request in [request for request, tokens in had.items() if tokens > 60 or (len(had) > 4 and request < step)]:
            pool.free(request)
            del had[request]


def models(fields: Any) -> tuple[Any, Any]:
    """The model of one process, and that of a rank: with the same weights."""
    return serving.build(fields, **SIZES), serving.build(fields, context_parallel=True, **SIZES)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def assert_as_alone(model: Any, alone: Any, batch: PrefillBatch, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The logits of all tokens, and all that the layers have kept, are those of one process."""
    with batch.published():
        wanted = alone(ids, batch.positions)
    assert logits.shape == wanted.shape
    assert_close(logits, wanted)
    kept = dict(alone.named_buffers())
    for name, buffer in model.named_buffers():
        if name.endswith("_cache"):
            assert_close(buffer, kept[name])


def uncompiled(rank: int, ranks: int, folder: Path) -> None:
    given = json.loads((folder / "given.json").read_text())
    layout, gather = Zigzag(ranks), GroupRows()
    for fields in given["fields"].values():
        alone, model = models(fields)
        held = []
        for batch, ids in batches(serving.page_pool(model), given["rounds"]):
            local = batch.context_parallel(layout, gather)
            with local.published():
                logits = model(local.share.split(ids), local.positions)
            assert_as_alone(model, alone, batch, ids, logits)
            held.append(local.tokens)
        assert held[0] == (rank == 0) and max(held) > 8


def compiled(rank: int, ranks: int, folder: Path) -> None:
    """The body replays in buckets of local rows; the gather at its end, and the logits, are one eager step."""
    given = json.loads((folder / "given.json").read_text())
    layout, gather = Zigzag(ranks, alignment=1), GroupRows()
    captured = layout.capacities(LADDER)
    for fields in given["fields"].values():
        bcg.reset()
        torch.compiler.reset()
        alone, model = models(fields)
        options = dict(capture="emulated", segment_compiler="eager", ladder=list(captured.values()))
        whole = torch.compile(model, backend="bcg", fullgraph=True, options=options)
        for batch, ids in batches(serving.page_pool(model), given["rounds"]):
            local = batch.context_parallel(layout, gather)
            # Dynamo makes graphs of their own for one row, and for none: two are computed.
            missing = (0, max(2 - local.tokens, 0))
            given_ids = nn.functional.pad(local.share.split(ids), missing)
            positions = nn.functional.pad(local.positions, missing)
            torch._dynamo.mark_dynamic(given_ids, 0)
            torch._dynamo.mark_dynamic(positions, 0)
            with local.published():
                admission = admit(bcg.current_context().batch, LADDER, bcg.Limits(captured_rows=captured))
                bucket = None if admission.bucket is None else captured[admission.bucket]
                with bcg.forward_context(admission=replace(admission, bucket=bucket, rows=local.tokens)):
                    logits = whole(given_ids, positions)
            assert_as_alone(model, alone, batch, ids, logits)
            said: list[Any] = [None] * ranks
            dist.all_gather_object(said, (admission, local.tokens))
            assert {found for found, _ in said} == {admission}, "all ranks are told the same"
            if bucket is not None:
                assert max(tokens for _, tokens in said) <= bucket
        (program,) = bcg.programs_of(whole)
        assert program.plan is not None and program.replays >= given["rounds"] - 3
        assert {reason.code for reason in program.plan.steps[-1].reasons} == {"cp_gather_tail"}


def gathered(rank: int, ranks: int, folder: Path) -> None:
    gather = GroupRows()
    rows = torch.full((rank + 1, 2), rank + 5, dtype=torch.uint8)
    assert gather.all_gather(rows, 3).tolist() == [[[5, 5], [0, 0], [0, 0]], [[6, 6], [6, 6], [0, 0]]]
    assert gather.all_gather(rows[:rank], 1).tolist() == [[[0, 0]], [[6, 6]]], "a rank may have none"
    with pytest.raises(ParallelError, match=f"Rank {rank} has 4 rows, and the longest rank is said to have 3"):
        gather.all_gather(torch.zeros(4), 3)
    alone: Any = dist.new_group([0])
    if rank:
        with pytest.raises(ParallelError, match="Rank 1 is not in the group"):
            GroupRows(alone)
    else:
        assert GroupRows(alone).all_gather(rows, 1).tolist() == [[[5, 5]]]


def test_rows_of_all_ranks_are_filled_up_to_the_longest(on_ranks: OnRanks) -> None:
    on_ranks(2, gathered)


def test_without_a_group_nothing_is_gathered() -> None:
    with pytest.raises(ParallelError, match=r"call torch\.distributed\.init_process_group"):
        GroupRows()


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_caches_are_those_of_one_process(ranks: int, prepare: Prepare, on_ranks: OnRanks) -> None:
    prepare(5)
    on_ranks(ranks, uncompiled)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_compiled_models_of_ranks_replay_and_agree(ranks: int, prepare: Prepare, on_ranks: OnRanks) -> None:
    prepare(6, ("deepseek_v3",))
    on_ranks(ranks, compiled)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_batches_are_those_of_one_process(ranks: int, prepare: Prepare, on_ranks: OnRanks) -> None:
    prepare(50)
    on_ranks(ranks, uncompiled)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_compiled_batches_agree(ranks: int, prepare: Prepare, on_ranks: OnRanks) -> None:
    prepare(50)
    on_ranks(ranks, compiled)
