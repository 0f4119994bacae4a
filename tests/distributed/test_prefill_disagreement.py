"""Ranks of a prefill that differ: all do the same, with the right numbers, or all are told who differs. None hangs."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler import Limits, PrefillRunner, Wanted
from bcg_compiler.distributed.pipeline import PipelineProxy, ProxyForm
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.errors import BcgError, PipelineError, RankError
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.runtime.program import Program

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]

SIZES = dict(pages=64, page_size=8)
LADDER = (8, 16, 32)
OPTIONS = {"capture": "emulated", "segment_compiler": "eager", "min_segment_kernels": 1}

#: Seconds: far more than a step takes, and few for a test that waits for a dead rank.
TIMEOUT = 4.0


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def sums(x: Tensor, out: Tensor) -> None:
    """Of each row, what all rows of its request up to it add up to; under context parallelism those of all ranks."""
    context = bcg.current_context()
    batch, live = context.prefill, context.live_rows
    if batch.share is not None:
        share = batch.share
        out[:live] = share.split(summed(share.restore(x[:live]), share.whole.lengths))
        return
    if peers:  # ranks that talk in a break, as experts make them
        dist.all_reduce(torch.zeros(1), group=peers[0])
    out[:live] = summed(x[:live], batch.lengths)


def summed(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([rows[:0], *(part.cumsum(0) for part in rows.split(lengths))])


peers: list[Any] = []


class Toy(nn.Module):
    """A body that is quickly compiled, with the same weights on all ranks, and the parts around it."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 + more))
        self.embed, self.tail = nn.Embedding(96, 8), nn.Linear(8, 96)
        self.requires_grad_(False)

    def forward(self, proxy: PipelineProxy, positions: Tensor) -> PipelineProxy:
        x = self.layers[0](proxy.hidden_states) + positions[:, None] / 64
        out = torch.empty_like(x)
        sums(x, out)
        for layer in self.layers[1:]:
            out = layer(out)
        return PipelineProxy(out)


class Broken(Toy):
    def forward(self, proxy: PipelineProxy, positions: Tensor) -> PipelineProxy:
        raise ValueError("Broken has no layers")


class Rank:
    """A runner on this rank, and its batches."""

    def __init__(self, joined: Ranks, toy: Toy | None = None, **how: Any) -> None:
        self.ranks, self.toy, self.pool = joined, toy or Toy(), PagePool(**SIZES)
        parts = dict(embed=self.toy.embed, tail=self.toy.tail, ladder=LADDER, options=OPTIONS, timeout=TIMEOUT)
        self.runner = PrefillRunner(self.toy, ranks=joined, **{**parts, **how})

    def capture(self) -> None:
        self.report = self.runner.capture(self.pool.idle())

    def step(self, *lengths: int, asked: Wanted | None = None) -> tuple[int | None, str]:
        """A batch has the right logits; what all ranks said of it is the same. Its bucket and the reason."""
        batch = self.pool.prefill(dict(enumerate(lengths))) if lengths else self.pool.idle()
        ids = (torch.arange(batch.tokens) * 7) % 96
        made = self.runner(batch, ids, wanted=asked)
        x = self.toy.layers[0](self.toy.embed(ids)) + batch.positions[:, None] / 64
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
        wanted = self.toy.tail(self.toy.layers[1](summed(x, lengths)[ends]))
        torch.testing.assert_close(made.logits, wanted, rtol=1e-4, atol=1e-4)
        for request in range(len(lengths)):
            self.pool.free(request)
        return made.admission.bucket, made.admission.reason


def same_on_all(value: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(other == value for other in found)


def refused(kind: type[BcgError], says: str, call: Callable[[], object], same: bool = True) -> None:
    """All ranks are told the same."""
    with pytest.raises(kind, match=says) as raised:
        call()
    assert not same or same_on_all(str(raised.value))


def no_room(rows: int) -> Any:
    """Captures of a bucket fail."""
    real = Program._record

    def record(self: Any, device: Any, args: Any, forms: Any, bucket: Any) -> Any:
        if bucket.rows == rows:
            raise torch.OutOfMemoryError("no room for it")
        return real(self, device, args, forms, bucket)

    return mock.patch.object(Program, "_record", record)


def move_weights(toy: Toy) -> list[Tensor]:
    """Other memory for the weights of the layers. What they lay in holds nonsense, and whoever keeps it keeps it so."""
    old = []
    for parameter in toy.layers.parameters():
        old.append(parameter.data)
        parameter.data = parameter.data.clone()
        old[-1].fill_(float("nan"))
    return old


def context_parallel(rank: int, ranks: int, folder: Path) -> None:
    one = Rank(Ranks.join(Parallel(cp=2, attention_does_cp=True)))
    one.capture()
    assert one.runner.rows == {8: 4, 16: 8, 32: 16}
    assert one.step(8) == (8, "") and one.step(3, 5) == (8, "")
    # Requests of one token are all rank 0's: of eight rows it holds eight, and a bucket of 8 tokens has room for four.
    assert one.step(*[1] * 8) == (16, "")
    assert one.step(*[1] * 5) == (None, "cp_capacity")  # and 16 is more than twice 5
    assert one.step(*[1] * 9) == (None, "cp_capacity")
    assert one.step(1) == (8, "") and one.step(2) == (8, "") and one.step() == (None, "few_rows")
    assert one.step(40) == (None, "too_long")
    one.runner.close()


def idle_and_experts(rank: int, ranks: int, folder: Path) -> None:
    """Ranks that talk in each call: one without a batch talks with the other."""
    joined = Ranks.join(Parallel(dp=2, ep=2))
    peers.append(joined.experts)
    one = Rank(joined)
    one.capture()
    assert one.step(*(8,) if rank else (30,)) == (8 if rank else 32, "")
    assert one.step(*() if rank else (8,)) == (None, "few_rows")
    assert one.step(*(9,) if rank else (9, 40)) == (None, "too_long")
    one.runner.close()
    one = Rank(joined, limits=Limits(least=0))
    one.capture()
    assert one.step(*() if rank else (8,)) == (8, "")
    one.runner.close()


def failed_capture(rank: int, ranks: int, folder: Path) -> None:
    joined = Ranks.join(Parallel(dp=2, ep=2))
    peers.append(joined.experts)
    one = Rank(joined)
    with no_room(16 if rank else 0):
        one.capture()
    assert [rung.rows for rung in one.report.dropped] == ([16] if rank else [])
    assert one.runner.failed == {16} and same_on_all(one.runner.admit(bcg.Batch(rows=12)).reason)
    assert one.step(12) == (None, "padding") and one.step(20) == (32, "") and one.step(8) == (8, "")
    # Later, the weights of rank 0 lie elsewhere: it captures again, alone, and nobody waits.
    _old = move_weights(one.toy) if rank == 0 else None
    assert one.step(8) == (8, "")
    _older = move_weights(one.toy) if rank == 0 else None
    with no_room(32 if rank == 0 else 0):
        assert one.step(32) == ((None, "capture_failed") if rank == 0 else (32, ""))
    assert one.step(32) == (None, "too_long") and one.runner.failed == {16, 32}
    one.runner.close()


def uncompiled() -> Callable[..., Any]:
    def as_is(graph: Any, fakes: Any) -> Any:
        return graph

    return as_is


def disagreement(rank: int, ranks: int, folder: Path) -> None:
    joined = Ranks.join(Parallel(dp=2))
    odd = rank == 1
    refused(
        RankError,
        r"ladder: \[8, 16, 32\] on rank 0; \[8\] on rank 1",
        Rank(joined, ladder=(8,) if odd else LADDER).capture,
    )
    refused(
        RankError,
        "limits.prefixes: True on rank 0; False on rank 1",
        Rank(joined, limits=Limits(prefixes=not odd)).capture,
    )
    refused(
        RankError,
        "options.dual_stream: nothing on rank 0; True on rank 1",
        Rank(joined, options={**OPTIONS, **({"dual_stream": True} if odd else {})}).capture,
    )
    refused(RankError, "model: a on rank 0; b on rank 1", Rank(joined, config={"model": "ab"[rank]}).capture)
    refused(RankError, "plan: [0-9a-f]{16} on rank 0; [0-9a-f]{16} on rank 1", Rank(joined, Toy(more=rank)).capture)
    # A rank that cannot compile says why, and the other one at once that it could not.
    says = "Broken has no layers" if odd else "The set-up failed on rank 1: their own output says why"
    with pytest.raises(Exception, match=says):
        Rank(joined, Broken() if odd else Toy()).capture()
    refused(RankError, r"dp=3, pp=1 and cp=1 are 3 ranks, and there are 2", lambda: Ranks.join(Parallel(dp=3)))
    refused(RankError, r"ep=3 does not divide the 2 ranks", lambda: Ranks.join(Parallel(dp=2, ep=3)))
    # A function among the options is the same one wherever it lies in memory.
    as_is = [uncompiled() for _ in range(1 + rank)][-1]
    one = Rank(joined, options={**OPTIONS, "segment_compiler": as_is})
    one.capture()
    batch, ids = one.pool.prefill({0: 5}), torch.arange(5)
    refused(RankError, "batch has 5 tokens, and ids has 4 rows", lambda: one.runner(batch, ids[:4]))
    wrong = dataclasses.replace(batch, lengths=(3,))
    refused(RankError, "add up to 3, .* 5 positions", lambda: one.runner(wrong, ids[:3]))
    one.pool.free(0)
    assert one.step(8) == (8, "")
    # A broken rule: all run eagerly, and say why.
    ruled = Rank(Ranks.join(Parallel(dp=2, two_batch_overlap=True)))
    ruled.capture()
    assert ruled.report.rungs == () and ruled.step(*() if rank else (8,)) == (None, "two_batch_overlap")
    for runner in (one, ruled):
        runner.runner.close()


def rules_of_context_parallel(rank: int, ranks: int, folder: Path) -> None:
    one = Rank(Ranks.join(Parallel(cp=2)))
    one.capture()
    assert one.step(8) == (None, "cp_attention") and one.step(3, 5) == (None, "cp_attention")
    assert "does not declare" in one.runner.admit(bcg.Batch(rows=8)).text
    one.runner.close()


def stages(rank: int, ranks: int, folder: Path) -> None:
    joined = Ranks.join(Parallel(pp=2), timeout=TIMEOUT)
    form = ProxyForm("stages 0 and 1 of 2", 8, torch.float32)

    def stage(form: ProxyForm, **how: Any) -> Rank:
        ends = dict(takes=form) if rank else dict(gives=form)
        return Rank(joined, **ends, **how)

    double = dataclasses.replace(form, dtype=torch.float64)
    refused(
        PipelineError, "gives a proxy of the form .*float32.* takes .*float64", stage(double if rank else form).capture
    )
    refused(RankError, "ladder: .* on rank 0; .* on rank 1", stage(form, ladder=LADDER[:2] if rank else LADDER).capture)
    one = stage(form)
    with no_room(16 if rank == 0 else 0):
        one.capture()
    assert one.runner.failed == {16}  # on both stages
    batch, ids = one.pool.prefill({0: 8}), torch.arange(8)
    made = one.runner(batch, ids)
    assert made.admission.bucket == 8 and (made.logits is not None) == (rank == 1)
    assert one.runner(one.pool.idle(), ids[:0]).admission.reason == "few_rows"
    # Logarithms of probabilities are the last stage's: they are no reason for the first one to run eagerly.
    more, all_ids = one.pool.prefill({0: 8}), torch.arange(8)
    assert one.runner(more, all_ids, wanted=Wanted(logprobs=True)).admission.bucket == 8
    dist.barrier()
    if rank == 0:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RankError, match="Stage 1 got no word from stage 0, rank 0"):
        one.runner(one.pool.prefill({0: 8}), ids)
    assert time.monotonic() - began < 3 * TIMEOUT
    os._exit(0)


def dying(rank: int, ranks: int, folder: Path) -> None:
    """Rank 1 dies in a break, while the other one waits for it there."""
    joined = Ranks.join(Parallel(cp=2, attention_does_cp=True), timeout=TIMEOUT)
    one = Rank(joined)
    one.capture()
    assert one.step(8) == (8, "")
    batch, ids = one.pool.prefill({0: 8}), torch.arange(8)
    gather = joined.gather
    assert gather is not None
    if rank == 1:
        with mock.patch.object(type(gather), "all_gather", lambda *a: os._exit(0)):
            one.runner(batch, ids)
    with pytest.raises(RankError, match=r"no word from other ranks within 4 seconds: rank 1\."):
        one.runner(batch, ids)
    with pytest.raises(RankError, match=r"cannot go on after it failed: .*rank 1\."):
        one.runner(batch, ids)
    os._exit(0)


def gone(rank: int, ranks: int, folder: Path) -> None:
    """The process group is another one, or none, when a batch comes."""
    one = Rank(Ranks.join(Parallel(dp=2)))
    one.capture()
    assert one.step(8) == (8, "")
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RankError, match=r"The process group is destroyed, .* 2 ranks"):
        one.step(8)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"alone{rank}"), 1), rank=0, world_size=1)
    with pytest.raises(RankError, match="another one now, of 1 ranks, than a group of 2 ranks"):
        one.step(8)
    with pytest.raises(RankError, match="another one now"):
        one.capture()


@pytest.mark.parametrize(
    "function",
    [
        context_parallel,
        idle_and_experts,
        failed_capture,
        disagreement,
        rules_of_context_parallel,
        stages,
        dying,
        gone,
    ],
)
def test_two_ranks(function: Callable[[int, int, Path], None], on_ranks: OnRanks) -> None:
    on_ranks(2, function)


def other_layouts(rank: int, ranks: int, folder: Path) -> None:
    with pytest.raises(RankError, match=r"cp: 2 on rank 0; 1 on rank 1") as told:
        Ranks.join(Parallel(cp=2) if rank == 0 else Parallel(pp=2), timeout=20)
    assert "pp" in str(told.value)


def test_ranks_of_other_layouts_are_told_before_they_make_groups(on_ranks: OnRanks) -> None:
    """They made groups of other ranks, and waited for each other."""
    on_ranks(2, other_layouts)
