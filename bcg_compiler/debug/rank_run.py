"""Runs a serving model over ranks against the whole model in one process: every batch is compared, on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bcg_compiler.buckets import Ladder
from bcg_compiler.debug.compare import Difference, tensor_difference
from bcg_compiler.debug.errors import call_eager
from bcg_compiler.debug.served import PAGE_SIZE, ServedModel
from bcg_compiler.debug.traffic import Requests, ended, pages_needed, schedule
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.models import serving
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.prefill import PrefillRunner, Wanted
from bcg_compiler.runtime import counters


@dataclass(frozen=True)
class BatchMismatch:
    """A batch, counted from 0, whose logits are not those of the whole model; ``None``: a cache after all batches."""

    batch: int | None
    difference: Difference


@dataclass(frozen=True)
class RankReport:
    """What one rank saw.

    Attributes:
        replica, stage, place: where it is: its number among the replicas, the pipeline stages, and the context-parallel
            ranks of its stage.
        layers: the first of its layers, and the one behind the last.
        captures: buckets that are captured.
        replays: batches that were replayed; ``eager_runs`` of the others, by reason code.
        compared: tensors, logits of batches and caches afterwards; ``exact`` of them are equal bit for bit.
        largest: the largest absolute difference, those within the tolerance too.
        mismatches: what differs by more.
    """

    replica: int
    stage: int
    place: int
    layers: tuple[int, int]
    captures: int
    replays: int
    eager_runs: Mapping[str, int]
    compared: int
    exact: int
    largest: float
    mismatches: tuple[BatchMismatch, ...]


@dataclass(frozen=True)
class RanksReport:
    """What all ranks saw, in their order, and the buckets that they use: tokens → rows of a rank."""

    buckets: Mapping[int, int]
    batches: int
    ranks: tuple[RankReport, ...]

    @property
    def equal(self) -> bool:
        """Whether all that was compared on all ranks is the same, within the tolerance of the dtype."""
        return not any(rank.mismatches for rank in self.ranks)


def compare_over_ranks(
    model: ServedModel,
    prompts: Sequence[int],
    *,
    parallel: Parallel,
    ladder: Ladder,
    options: Mapping[str, Any],
    timeout: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RanksReport:
    """Prefill prompts of these lengths over the ranks of the process group; all of them call this together.

    The replicas take the prompts in turn, each makes batches of its own (``traffic.schedule``), and one that has no
    prompts left is idle until the others are done. After each batch the last stage compares logits with those of the
    whole model, which is called uncompiled in the same process; after all batches each rank compares its caches.

    ``timeout``: seconds that a rank waits for the votes of the others, which compare with eager in between.

    Raises what ``Ranks.join``, ``PrefillRunner`` and the model raise; ``ModelFailed`` where the uncompiled one fails.
    """
    ranks = Ranks.join(parallel)
    traffic = [schedule(prompts[at :: parallel.dp], ladder.ceiling, model.seed + at) for at in range(parallel.dp)]
    # As many on all ranks: the size of the caches is a part of what is compiled.
    pages = max(pages_needed(batches, PAGE_SIZE) for batches in traffic)
    rank = dist.get_rank()
    replica, place = rank // (parallel.pp * parallel.cp), rank % parallel.cp
    whole, held = model.build(pages), model.build(pages, ranks)
    runner = serving.runner(
        held,
        ladder=ladder,
        ranks=ranks,
        options={"segment_compiler": "eager", **options},
        timeout=timeout,
        config={"model": model.label, "options": repr(sorted(options.items()))},
    )
    with closing(runner):
        run = _Run(runner, whole, PagePool(pages, PAGE_SIZE, model.device), model.seed + replica)
        total = max(map(len, traffic))
        batches = [*traffic[replica], *[{}] * (total - len(traffic[replica]))]
        for at, (requests, done) in enumerate(zip(batches, ended(batches), strict=True)):
            run.batch(at, requests)
            for request in done:
                run.pool.free(request)
            progress(at + 1, total)
        run.caches(held)
    saw = RankReport(
        replica=replica,
        stage=ranks.stage,
        place=place,
        layers=(held.stage.start, held.stage.end),
        captures=run.captures,
        replays=run.replays,
        eager_runs=dict(run.eager_runs),
        compared=run.compared,
        exact=run.exact,
        largest=run.largest,
        mismatches=tuple(run.mismatches),
    )
    return RanksReport(runner.rows, total, tuple(gathered(saw)))


class _Run:
    """The batches of one rank."""

    def __init__(self, runner: PrefillRunner, whole: Any, pool: PagePool, seed: int) -> None:
        self.runner, self.whole, self.pool = runner, whole, pool
        self.generator = torch.Generator().manual_seed(seed)
        self.replays = self.compared = self.exact = 0
        self.eager_runs: Counter[str] = Counter()
        self.largest = 0.0
        self.mismatches: list[BatchMismatch] = []
        self.captures = sum(not rung.error for rung in runner.capture(pool.idle()).rungs)

    def batch(self, at: int, requests: Requests) -> None:
        """One batch, by the ranks and by the whole model; idle without requests."""
        batch = self.pool.prefill(requests) if requests else self.pool.idle()
        vocab = self.whole.model.vocab
        ids = torch.randint(vocab, (batch.tokens,), generator=self.generator).to(batch.positions.device)
        before = counters.snapshot()
        made = self.runner(batch, ids, wanted=Wanted(logits="all"))
        self.replays += counters.replays - before.replays
        self.eager_runs += counters.eager_runs - before.eager_runs
        if not requests:
            return
        with batch.published():
            expected = call_eager(self.whole, dict(input_ids=ids, positions=batch.positions), batch.tokens)
        if made.logits is not None:
            self._compare(at, made.logits, expected, "logits")

    def caches(self, held: Any) -> None:
        """What the calls have left in the caches of the layers that are here."""
        expected = dict(self.whole.named_buffers())
        for name, cache in held.named_buffers():
            if name.endswith("_cache"):
                self._compare(None, cache, expected[name], name)

    def _compare(self, at: int | None, got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        self.compared += 1
        difference = tensor_difference(got, expected, where)
        if difference is None:
            self.exact += 1
            return
        self.largest = max(self.largest, difference.largest)
        if not difference.close:
            self.mismatches.append(BatchMismatch(at, difference))


def gathered(mine: Any) -> list[Any]:
    """What each rank has, in their order."""
    all_of_them = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return all_of_them
