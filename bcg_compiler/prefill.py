"""A prefill over ranks: what is admitted, captured and replayed of one rank's share of a model, and what is not.

Note [Body and tail]
    Captured is the *body*: the layers of this rank's pipeline stage, from embedded rows to rows. Around it everything
    is eager: looking ids up, sharing rows out over context-parallel ranks, receiving from the stage before and sending
    to the next one, gathering, and the *tail*, which makes logits of the live batch. So no graph holds a collective,
    and none depends on how a batch is made up of requests.

    Whether a batch replays, and in which bucket, is decided once (``admit``, and the vote of the ranks that share a
    plan), and told to the program by ``forward_context(admission=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from bcg_compiler.aot import AotProgram, aot_compile
from bcg_compiler.buckets import Admission, Batch, Ladder, admit
from bcg_compiler.buckets.admission import HiddenStates, Limits
from bcg_compiler.context import forward_context
from bcg_compiler.distributed.pipeline import PipelineProxy, receive, send
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.replay_vote import ReplayVote, Terms, Voter, cast
from bcg_compiler.errors import LadderError, RankError
from bcg_compiler.plan import plan_hash
from bcg_compiler.proxies import ProxyForm
from bcg_compiler.runtime import CaptureReport, capture

#: Dynamo makes a graph of its own for one row, and for none: fewer live rows are padded to as many.
FEWEST = 2

Logits = Literal["none", "last", "all"]


class RowsOfBatch(Protocol):
    """What a runner needs to know of a batch: ``models.layers.batch.PrefillBatch`` is one."""

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    positions: Tensor
    tokens: int

    def published(self) -> AbstractContextManager[None]:
        """Publish it to the bodies of breaks."""

    def context_parallel(self, layout: Any, gather: Any) -> Any:
        """The part of it that one context-parallel rank computes, with ``share.split`` and ``share.restore``."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is wanted of a batch besides its keys and values in the cache.

    ``logits``: of the last token of each request, of all tokens, or none. ``logprobs``: what each prompt token got from
    the tokens before it. ``hidden_states``: of the last layer, normed, of the last or of all tokens.
    """

    logits: Logits = "last"
    logprobs: bool = False
    hidden_states: HiddenStates = "none"

    def __post_init__(self) -> None:
        for name, words in (("logits", get_args(Logits)), ("hidden_states", get_args(HiddenStates))):
            if getattr(self, name) not in words:
                raise RankError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(map(repr, words))}.")


@dataclass(frozen=True)
class Prefilled:
    """What came of a batch.

    Ranks that are not the last stage of a pipeline have no logits, and of hidden states the rows that they hold.

    Attributes:
        admission: whether it was replayed, in a bucket of tokens of the whole batch.
        logits: ``[requests or tokens, vocab]``.
        logprobs: float32 for each request ``[its new tokens - 1]``: of each token but the first of the chunk.
        hidden_states: ``[requests or tokens, hidden]``.
        auxiliary: ``[tokens, hidden]`` of each layer that the body hands out besides, in its order.
    """

    admission: Admission
    logits: Tensor | None = None
    logprobs: tuple[Tensor, ...] | None = None
    hidden_states: Tensor | None = None
    auxiliary: tuple[Tensor, ...] = ()


class PrefillRunner:
    """Runs the batches of one rank.

    Args:
        body: ``(PipelineProxy, positions) -> PipelineProxy``, or a pair of that and a tuple of auxiliary rows: the
            layers of this rank's stage. Its rows must be independent of each other but for what breaks do.
        embed: ids ``[tokens]`` to rows ``[tokens, hidden]``; needed on the first stage.
        tail: rows ``[n, hidden]`` to logits ``[n, vocab]``; needed on the last stage, for what asks for logits.
        ladder: buckets, in tokens of whole batches.
        ranks: the groups that this rank works in; alone unless given.
        takes: on stages behind the first, the form of what the stage before sends; ``gives``: of what this one sends.
        limits: what else a batch must be; alike on all ranks.
        options: of the compiler, without a ladder.
        timeout: seconds that a rank waits for the votes of the others.
        config: names and values that must be the same on all ranks, besides versions, ladder, limits and layout.

    ``capture`` once, on all ranks together, then call it with batches. Raises ``LadderError`` if no bucket can be used,
    ``RankError`` if ranks do not agree, on all of them.
    """

    def __init__(
        self,
        body: Callable[[PipelineProxy, Tensor], Any],
        *,
        ladder: Ladder | Iterable[int],
        embed: Callable[[Tensor], Tensor] | None = None,
        tail: Callable[[Tensor], Tensor] | None = None,
        ranks: Ranks | None = None,
        takes: ProxyForm | None = None,
        gives: ProxyForm | None = None,
        limits: Limits | None = None,
        options: dict[str, Any] | None = None,
        timeout: float = 60.0,
        config: dict[str, str] | None = None,
    ) -> None:
        self.ranks = ranks = Ranks() if ranks is None else ranks
        self._body, self._embed, self._tail = body, embed, tail
        self._takes, self._gives = takes, gives
        self._options = dict(options or {})
        asked = ladder if isinstance(ladder, Ladder) else Ladder(tuple(ladder))
        layout = ranks.layout
        self.buckets = tuple(asked.buckets) if layout is None else layout.usable(asked.buckets)
        #: Bucket → rows of this rank, for which the body is captured.
        self.rows = {b: b for b in self.buckets} if layout is None else layout.capacities(self.buckets)
        self.limits = limits = Limits() if limits is None else limits
        if layout is not None:
            self.limits = replace(limits, captured_rows=self.rows)
        if tail is None:
            self.limits = replace(self.limits, logprobs=False)
        self._refusal = ranks.refusal
        self._program: AotProgram | None = None
        self.vote: ReplayVote | None = None
        self._timeout, self._config = timeout, {"layout": ranks.parallel.digest(), **(config or {})}
        self._failed: set[int] = set()

    # -- set-up

    @torch.inference_mode()
    def capture(self, idle: RowsOfBatch) -> CaptureReport:
        """Compile the body and capture all buckets, the largest first. All ranks together.

        ``idle``: a batch of no request (``PagePool.idle``). The body runs once with it, eagerly: nothing is written.
        """
        proxy, positions = self._example(idle)
        for _, tensor in proxy.tensors():
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(positions, 0)
        options = {**self._options, "ladder": sorted(set(self.rows.values()))}
        local = self._local(idle)
        with local.published():
            self._program = aot_compile(self._body, (proxy, positions), options=options)
        self._check(self._program)
        if self._refusal is None:
            # The first call runs eagerly, and shows what breaks make.
            with local.published(), _admitted(Admission(min(self.rows.values()), "", "", 0)):
                self._program(proxy, positions)
            with forward_context(lined_up=True):
                report = capture(self._program, progress=False)
            lost = {rung.rows for rung in report.rungs if rung.error}
            self._failed |= {bucket for bucket, rows in self.rows.items() if rows in lost}
        else:
            report = CaptureReport((), 0.0, 0, 0, 0)
        if self.ranks.vote is not None:
            terms = Terms(buckets=self.buckets, limits=self.limits)
            self.vote = ReplayVote(self.ranks.vote, terms, self._timeout, self._config)
            self.vote.failed = frozenset(self._failed)
        return report

    def _check(self, compiled: AotProgram) -> None:
        plan = compiled.program.plan
        if plan.padding is None:
            why = plan.unpadded.text if plan.unpadded is not None else "no size of its inputs is open"
            raise LadderError(f"The body cannot be padded: {why}.")
        if missing := sorted(set(self.rows.values()) - set(plan.padding.buckets)):
            raise LadderError(
                f"The body has no bucket of {', '.join(map(str, missing))} rows, but {list(plan.padding.buckets)}: "
                "make the ladder of multiples of what its breaks declare (bucket_multiple)."
            )

    def close(self) -> None:
        """Let go of captures and of the group, before ``destroy_process_group``."""
        if self.vote is not None:
            self.vote.close()
            self.vote = None
        if self._program is not None:
            self._program.program.release()
            self._program = None

    # -- one batch

    def record(self, batch: RowsOfBatch, wanted: Wanted | None = None, embeddings: Tensor | None = None) -> Batch:
        """What admission is told of a batch: a scheduler asks with the same."""
        wanted = Wanted() if wanted is None else wanted
        layout = self.ranks.layout
        return Batch(
            rows=batch.tokens,
            local_rows=None if layout is None else layout.required(batch.lengths),
            requests=len(batch.lengths),
            prefix_lengths=batch.prefixes,
            embeddings="none" if embeddings is None else "given",
            adapters=(),
            target_verify=False,
            hidden_states=wanted.hidden_states,
            logprobs=wanted.logprobs,
        )

    def admit(self, record: Batch) -> Admission:
        """Whether a batch would replay, as far as this rank knows: the vote of others is not asked."""
        if self._refusal is not None:
            return Admission(None, *self._refusal, record.rows)
        return admit(record, [b for b in self.buckets if b not in self._failed], self.limits)

    @torch.inference_mode()
    def __call__(
        self,
        batch: RowsOfBatch,
        ids: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        wanted: Wanted | None = None,
    ) -> Prefilled:
        """Run a batch: all ranks that work together call it together.

        A rank that has no batch while others work gives one of no request (``PagePool.idle``). ``ids`` int64
        ``[tokens]``, or ``embeddings`` ``[tokens, hidden]`` in their place, of the whole batch; the first stage needs
        one of them, and so does the last one for ``logprobs`` (ids).
        """
        wanted = Wanted() if wanted is None else wanted
        if self._program is None:
            raise RankError("Nothing is compiled yet: call capture() first, on all ranks.")
        for name, given in (("ids", ids), ("embeddings", embeddings)):
            if given is not None and len(given) != batch.tokens:
                raise RankError(f"The batch has {batch.tokens} tokens, and {name} has {len(given)} rows.")
        if wanted.logprobs and ids is None:
            raise RankError("logprobs are those of the ids of the batch: give ids.")
        admission = self._agreed(self.record(batch, wanted, embeddings), idle=not batch.lengths)
        local = self._local(batch)
        proxy = self._proxy(local, batch, ids, embeddings)
        positions = _padded(local.positions)
        rows = local.tokens
        bucket = None if admission.bucket is None else self.rows[admission.bucket]
        with local.published(), _admitted(replace(admission, bucket=bucket, rows=rows)):
            result = self._program(_padded_proxy(proxy), positions)
        made, auxiliary = result if isinstance(result, tuple) else (result, ())
        made, auxiliary = made.cut(rows), tuple(rows_of[:rows] for rows_of in auxiliary)
        if self.ranks.after is not None:
            assert self._gives is not None
            send(made, self._gives, self.ranks.after, group=self.ranks.pipeline)
            return Prefilled(admission, hidden_states=made.hidden_states, auxiliary=auxiliary)
        return self._finish(batch, local, admission, made.hidden_states, auxiliary, ids, wanted)

    def _agreed(self, record: Batch, idle: bool) -> Admission:
        """What all ranks do with their batches."""
        if self.vote is None or self._refusal is not None:
            return self.admit(record)
        program = self._program
        assert program is not None
        voter = Voter(plan=plan_hash(program.program.plan))

        def vote(failed: frozenset[int]) -> Any:
            self._failed |= failed
            mode: Literal["idle", "prefill"] = "idle" if idle else "prefill"
            return cast(voter, self.vote.terms, mode, None if idle else record, failed=failed)  # type: ignore[union-attr]

        verdict = self.vote.step(vote, lambda bucket: None)
        self._failed |= verdict.failed
        return verdict.admission(self.vote.place, record.rows)

    def _local(self, batch: RowsOfBatch) -> Any:
        return batch if self.ranks.layout is None else batch.context_parallel(self.ranks.layout, self.ranks.gather)

    def _proxy(self, local: Any, batch: RowsOfBatch, ids: Tensor | None, embeddings: Tensor | None) -> PipelineProxy:
        """The rows that go into the body."""
        if self.ranks.before is not None:
            assert self._takes is not None
            return receive(
                self._takes,
                local.tokens,
                self.ranks.before,
                device=local.positions.device,
                group=self.ranks.pipeline,
            )
        if embeddings is None:
            if ids is None or self._embed is None:
                raise RankError("The first stage needs ids and an embed=, or embeddings.")
            embeddings = self._embed(ids)
        return PipelineProxy(embeddings if self.ranks.layout is None else local.share.split(embeddings))

    def _example(self, idle: RowsOfBatch) -> tuple[PipelineProxy, Tensor]:
        if idle.tokens:
            raise RankError(f"capture() takes a batch of no request, and this one has {idle.tokens} tokens.")
        local = self._local(idle)
        if self._takes is not None:
            proxy = self._takes.empty(0, idle.positions.device)
        elif self._embed is not None:
            proxy = PipelineProxy(self._embed(idle.positions))
        else:
            raise RankError("The first stage needs embed=, and a later one takes=.")
        return _padded_proxy(proxy), _padded(local.positions)

    def _finish(
        self,
        batch: RowsOfBatch,
        local: Any,
        admission: Admission,
        hidden: Tensor,
        auxiliary: tuple[Tensor, ...],
        ids: Tensor | None,
        wanted: Wanted,
    ) -> Prefilled:
        """The tail: eager, on the live rows of the whole batch."""
        if self.ranks.layout is not None:
            hidden = local.share.restore(hidden)
            auxiliary = tuple(local.share.restore(rows) for rows in auxiliary)
        last = torch.tensor([end - 1 for end in accumulate(batch.lengths)], dtype=torch.int64, device=hidden.device)
        logits = logprobs = states = None
        if (wanted.logits != "none" or wanted.logprobs) and self._tail is None:
            raise RankError("Logits are wanted of a runner without tail=.")
        every = self._tail(hidden) if self._tail is not None and (wanted.logits == "all" or wanted.logprobs) else None
        if wanted.logits == "all":
            logits = every
        elif wanted.logits == "last":
            assert self._tail is not None
            logits = self._tail(hidden[last]) if every is None else every[last]
        if wanted.logprobs:
            assert every is not None and ids is not None
            logprobs = _logprobs(every, ids, batch.lengths)
        if wanted.hidden_states != "none":
            states = hidden if wanted.hidden_states == "all" else hidden[last]
        return Prefilled(admission, logits, logprobs, states, auxiliary)


def _admitted(admission: Admission) -> AbstractContextManager[Any]:
    # The ranks vote before and after captures: at barriers of single breaks they would wait for one that has failed.
    return forward_context(admission=admission, lined_up=True)


def _padded(rows: Tensor) -> Tensor:
    """At least ``FEWEST`` rows, and always memory of its own."""
    more = FEWEST - len(rows)
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])]) if more > 0 else rows.clone()


def _padded_proxy(proxy: PipelineProxy) -> PipelineProxy:
    return PipelineProxy(**{name: _padded(rows) for name, rows in proxy.tensors()})


def _logprobs(logits: Tensor, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    found, start = [], 0
    for length in lengths:
        rows = logits[start : start + length - 1].float().log_softmax(-1)
        found.append(rows.gather(1, ids[start + 1 : start + length, None])[:, 0])
        start += length
    return tuple(found)
