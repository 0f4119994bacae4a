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

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bcg_compiler.aot import AotProgram, aot_compile
from bcg_compiler.buckets import Admission, Batch, Ladder, admit
from bcg_compiler.buckets.admission import Limits
from bcg_compiler.context import forward_context
from bcg_compiler.distributed.pipeline import PipelineProxy, receive, send
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.replay_vote import ReplayVote, Terms, Voter, cast
from bcg_compiler.distributed.set_up import SetUp
from bcg_compiler.errors import BcgError, LadderError, OptionError, PipelineError, RankError
from bcg_compiler.plan import Plan, plan_hash
from bcg_compiler.proxies import ProxyForm
from bcg_compiler.runtime import CaptureReport, Program, capture
from bcg_compiler.runtime.program import Rung
from bcg_compiler.wanted import Prefilled, Wanted, finish

#: Dynamo makes a graph of its own for one row, and for none: fewer live rows are padded to as many.
FEWEST = 2


class RowsOfBatch(Protocol):
    """What a runner needs to know of a batch: ``models.layers.batch.PrefillBatch`` is one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each request."""

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Tokens of each request that the cache holds already."""

    @property
    def positions(self) -> Tensor:
        """Int64 ``[tokens]``: the place of each new token in its request."""

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""

    def published(self) -> AbstractContextManager[None]:
        """Publish it to the bodies of breaks."""

    def context_parallel(self, layout: Any, gather: Any) -> Any:
        """The part of it that one context-parallel rank computes, with ``share.split`` and ``share.restore``."""


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
        options: of the compiler, without a ladder and limits.
        timeout: seconds that a rank waits for the votes of the others.
        set_up_timeout: the same while they compile and capture, which takes some longer than others.
        config: names and values that must be the same on all ranks, besides versions, ladder, limits, options and
            layout.

    ``capture`` once, on all ranks together, then call it with batches. Raises ``LadderError`` if no bucket can be used,
    ``PipelineError`` for a stage that has not what it needs at its ends, and ``RankError`` if ranks do not agree, on
    all of them, or if one of them is gone: it is named within the timeout of the vote, or of the collective.
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
        set_up_timeout: float = 1800.0,
        config: dict[str, str] | None = None,
    ) -> None:
        self.ranks = ranks = Ranks() if ranks is None else ranks
        self._body, self._embed, self._tail = body, embed, tail
        self._takes, self._gives = takes, gives
        self._check_stage()
        self._options = dict(options or {})
        for name, instead in (("ladder", "ladder"), ("limits", "limits"), ("max_padding_factor", "limits")):
            if name in self._options:
                raise OptionError(f"Option {name!r} is the runner's to decide: give it {instead}= itself.")
        asked = ladder if isinstance(ladder, Ladder) else Ladder(tuple(ladder))
        layout = ranks.layout
        self.buckets = tuple(asked.buckets) if layout is None else layout.usable(asked.buckets)
        self.buckets = tuple(bucket for bucket in self.buckets if bucket >= FEWEST)
        if not self.buckets:
            raise LadderError(f"The ladder {list(asked.buckets)} has no bucket of {FEWEST} tokens or more.")
        #: Bucket → rows of this rank, for which the body is captured.
        self.rows = {b: b for b in self.buckets} if layout is None else layout.capacities(self.buckets)
        limits = Limits() if limits is None else limits
        if layout is not None:
            limits = replace(limits, captured_rows=self.rows)
        #: The same on all ranks. Stages before the last one have no tail, and none is asked of them.
        self._shared = Terms(buckets=self.buckets, limits=limits)
        self.limits = limits if tail is not None or ranks.after is not None else replace(limits, logprobs=False)
        self._refusal = ranks.refusal
        self._bound: list[tuple[dict[str, Any], str, Any, str]] = []
        self._row: tuple[torch.Size, torch.dtype] = (torch.Size(), torch.float32)
        self._program: AotProgram | None = None
        self.vote: ReplayVote | None = None
        self._timeout, self._set_up_timeout, self._config = timeout, set_up_timeout, dict(config or {})
        #: Buckets that no rank uses, as one of them could not capture them.
        self.failed: frozenset[int] = frozenset()
        self._hashed: tuple[Plan | None, str] = (None, "")

    def _check_stage(self) -> None:
        """What a stage has at its ends."""
        ranks, who = self.ranks, f"Stage {self.ranks.stage} of {self.ranks.parallel.pp}"
        if ranks.before is None and self._embed is None:
            raise PipelineError(f"{who} begins with ids: give embed=.")
        for name, form, there in (("takes", self._takes, ranks.before), ("gives", self._gives, ranks.after)):
            if (form is None) != (there is None):
                what = "no stage there, and is given" if there is None else f"stage {there} there, and is not given"
                raise PipelineError(f"{who} has {what} {name}=, the form of the proxy between the two.")

    # -- set-up

    @torch.inference_mode()
    def compile(self, idle: RowsOfBatch) -> Plan:
        """Compile the body for this rank alone, and run nothing: its plan. ``capture`` does not need it.

        ``idle``: a batch of no request (``PagePool.idle``).
        """
        return self._compile(idle)[0].program.plan

    @torch.inference_mode()
    def capture(self, idle: RowsOfBatch) -> CaptureReport:
        """Compile the body and capture all buckets, the largest first. All ranks together.

        ``idle``: a batch of no request (``PagePool.idle``). The body runs with it, eagerly: nothing is written. A
        bucket that could not be captured on some rank is used on none.
        """
        if idle.tokens:
            raise RankError(f"capture() takes a batch of no request, and this one has {idle.tokens} tokens.")
        self.close()
        self.ranks.check()
        told = {f"options.{name}": _told(value) for name, value in self._options.items()}
        config = {**told, **self._config, **self._shared.configuration(), "layout": self.ranks.parallel.digest()}
        with SetUp(self.ranks, self._set_up_timeout, config, self._takes, self._gives) as together:
            compiled, arguments = together.run(lambda: self._compile(idle))
            program = compiled.program
            if self.ranks.vote is not None:
                terms = replace(self._shared, limits=self.limits)
                self.vote = ReplayVote(self.ranks.vote, terms, self._timeout, {"plan": plan_hash(program.plan)})
            report, again, failed = CaptureReport((), 0.0, 0, 0, 0), self._refusal is None, frozenset[int]()
            while again:
                plan = program.plan
                report = together.run(lambda: self._capture(compiled, idle, arguments))
                # What a capture shows may change the plan: then all begin again.
                again, failed = together.share(program.plan is not plan, self._lost(program), self.buckets)
        if self.vote is not None:
            self.vote.failed = failed
        self.failed, self._program = failed, compiled
        given: PipelineProxy = arguments[0]
        self._row, self._bound = (given.hidden_states.shape[1:], given.hidden_states.dtype), _parts(self._body)
        return report

    def _capture(self, compiled: AotProgram, idle: RowsOfBatch, arguments: tuple[Any, ...]) -> CaptureReport:
        program, plan = compiled.program, compiled.program.plan
        # The first call of a plan runs eagerly, and shows what breaks make; the smallest bucket is captured after it.
        with self._local(idle).published(), _admitted(Admission(min(self.rows.values()), "", "", 0)):
            compiled(*arguments)
        report = CaptureReport((), 0.0, 0, 0, 0)
        if program.plan is plan and program.never is None:
            with forward_context(lined_up=True):
                report = capture(compiled, progress=False)
        told = {rung.rows for rung in report.rungs}
        early = [Rung(rows, (), 0.0, program.measured_bytes, why) for rows, why in program.lost.items()]
        return replace(report, rungs=(*report.rungs, *(rung for rung in early if rung.rows not in told)))

    def _compile(self, idle: RowsOfBatch) -> tuple[AotProgram, tuple[PipelineProxy, Tensor]]:
        """The body, and what it was compiled with."""
        local = self._local(idle)
        if self._takes is not None:
            given = self._takes.empty(0, idle.positions.device)
        else:
            assert self._embed is not None
            given = PipelineProxy(self._embed(idle.positions))
        proxy, positions = _padded_proxy(given), _padded(local.positions)
        for tensor in (*(tensor for _, tensor in proxy.tensors()), positions):
            torch._dynamo.mark_dynamic(tensor, 0)
        with local.published():
            options = {**self._options, "ladder": sorted(set(self.rows.values()))}
            compiled = aot_compile(self._body, (proxy, positions), options=options)
        plan = compiled.program.plan
        if plan.padding is None:
            why = plan.unpadded.text if plan.unpadded is not None else "no size of its inputs is open"
            raise LadderError(f"The body cannot be padded: {why}.")
        if missing := sorted(set(self.rows.values()) - set(plan.padding.buckets)):
            raise LadderError(
                f"The body has no bucket of {', '.join(map(str, missing))} rows, but {list(plan.padding.buckets)}, as "
                "its breaks take multiples only (bucket_multiple): make a ladder of multiples, and over "
                "context-parallel ranks an alignment (Ranks.join)."
            )
        return compiled, (proxy, positions)

    def _lost(self, program: Program) -> frozenset[int]:
        """The buckets that this rank has no capture of and cannot make one of."""
        never, lost = program.never is not None, program.lost
        return frozenset(bucket for bucket, rows in self.rows.items() if never or rows in lost)

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
        failed = self.failed
        if self._program is not None:
            program = self._program.program
            if program.never is not None:
                return Admission(None, program.never, "The body is not captured.", record.rows)
            failed |= self._lost(program)
        return admit(record, [bucket for bucket in self.buckets if bucket not in failed], self.limits)

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
        self.ranks.check()
        self._check(batch, ids, embeddings, wanted)
        admission = self._agreed(self._program.program, self.record(batch, wanted, embeddings), idle=not batch.lengths)
        try:
            return self._run(self._program, admission, batch, ids, embeddings, wanted)
        except RuntimeError as error:
            if self.vote is None or isinstance(error, BcgError) or not _is_of_ranks(error):
                raise
            raise self.vote.missing(error) from error

    def _check(self, batch: RowsOfBatch, ids: Tensor | None, embeddings: Tensor | None, wanted: Wanted) -> None:
        """Before ranks begin to wait for each other."""
        moved = next((name for held, key, value, name in self._bound if held.get(key) is not value), None)
        if moved is not None:
            raise RankError(
                f"{moved} of the body is another object than when it was captured, which the captures do not read. "
                "Write into the tensors that are there, or call capture() again, on all ranks."
            )
        counts = sum(batch.lengths), batch.tokens, len(batch.positions)
        if len(set(counts)) > 1 or len(batch.prefixes) != len(batch.lengths):
            raise RankError(
                f"The batch is not one: its lengths {list(batch.lengths)} add up to {counts[0]}, and it has "
                f"{counts[1]} tokens, {counts[2]} positions and {len(batch.prefixes)} prefixes."
            )
        for name, given in (("ids", ids), ("embeddings", embeddings)):
            if given is not None and len(given) != batch.tokens:
                raise RankError(f"The batch has {batch.tokens} tokens, and {name} has {len(given)} rows.")
        if embeddings is not None and (embeddings.shape[1:], embeddings.dtype) != self._row:
            row, dtype = self._row
            raise RankError(
                f"embeddings are {embeddings.dtype}{list(embeddings.shape)}, and the body takes {dtype} rows of "
                f"{list(row)}."
            )
        if self.ranks.before is None and ids is None and embeddings is None:
            raise RankError("The first stage needs ids, or embeddings in their place.")
        if self.ranks.after is not None:
            return
        if (wanted.logits != "none" or wanted.logprobs) and self._tail is None:
            raise RankError("Logits are wanted of a runner without tail=: give one, or Wanted(logits='none').")
        if wanted.logprobs and ids is None:
            raise RankError("logprobs are those of the ids of the batch: give ids.")

    def _run(
        self,
        program: AotProgram,
        admission: Admission,
        batch: RowsOfBatch,
        ids: Tensor | None,
        embeddings: Tensor | None,
        wanted: Wanted,
    ) -> Prefilled:
        local = self._local(batch)
        proxy, positions, rows = self._proxy(local, ids, embeddings), _padded(local.positions), local.tokens
        bucket = None if admission.bucket is None else self.rows[admission.bucket]
        replays, before = program.program.replays, program.program.eager_runs.copy()
        with local.published(), _admitted(replace(admission, bucket=bucket, rows=rows)):
            result = program(_padded_proxy(proxy), positions)
        if bucket is not None and program.program.replays == replays:
            # Of this rank alone: a graph that holds no collective leaves the others to replay.
            (reason,) = program.program.eager_runs - before
            admission = Admission(None, reason, "The program could not replay what was admitted.", admission.rows)
        made, auxiliary = result if isinstance(result, tuple) else (result, ())
        made, auxiliary = made.cut(rows), tuple(rows_of[:rows] for rows_of in auxiliary)
        if self.ranks.after is not None:
            assert self._gives is not None
            self._gives.check(made, rows)
            if rows:
                with self._talks_to(self.ranks.after):
                    send(made, self._gives, self.ranks.after, group=self.ranks.pipeline)
            return Prefilled(admission, hidden_states=made.hidden_states, auxiliary=auxiliary)
        hidden = made.hidden_states
        if self.ranks.layout is not None:
            hidden, *auxiliary = (local.share.restore(rows_of) for rows_of in (hidden, *auxiliary))
        return finish(admission, hidden, tuple(auxiliary), batch.lengths, ids, wanted, self._tail)

    def _agreed(self, program: Program, record: Batch, idle: bool) -> Admission:
        """What all ranks do with their batches."""
        vote = self.vote
        if vote is None or self._refusal is not None:
            return self.admit(record)
        if self._hashed[0] is not program.plan:
            self._hashed = program.plan, plan_hash(program.plan)
        voter, lost = Voter(plan=self._hashed[1]), self._lost(program)
        mode: Literal["idle", "prefill"] = "idle" if idle else "prefill"
        batch = None if idle else record
        # Nothing has to be captured together: no graph holds a collective.
        verdict = vote.step(lambda failed: cast(voter, vote.terms, mode, batch, failed=failed | lost), lambda _: None)
        self.failed = verdict.failed
        return verdict.admission(vote.place, record.rows)

    @contextmanager
    def _talks_to(self, stage: int) -> Iterator[None]:
        """Name the rank of a stage that is not there."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, BcgError) or not _is_of_ranks(error):
                raise
            assert self.ranks.pipeline is not None
            rank = dist.get_global_rank(self.ranks.pipeline, stage)
            raise RankError(
                f"Stage {self.ranks.stage} got no word from stage {stage}, rank {rank}: it died, hangs, or runs "
                "something else; its own output says which. Restart all ranks."
            ) from error

    def _local(self, batch: RowsOfBatch) -> Any:
        return batch if self.ranks.layout is None else batch.context_parallel(self.ranks.layout, self.ranks.gather)

    def _proxy(self, local: Any, ids: Tensor | None, embeddings: Tensor | None) -> PipelineProxy:
        """The rows that go into the body."""
        if self.ranks.before is not None:
            assert self._takes is not None
            if not local.tokens:
                return self._takes.empty(0, local.positions.device)
            with self._talks_to(self.ranks.before):
                return receive(
                    self._takes,
                    local.tokens,
                    self.ranks.before,
                    device=local.positions.device,
                    group=self.ranks.pipeline,
                )
        if embeddings is None:
            assert ids is not None and self._embed is not None
            embeddings = self._embed(ids)
        return PipelineProxy(embeddings if self.ranks.layout is None else local.share.split(embeddings))


def _admitted(admission: Admission) -> AbstractContextManager[Any]:
    # The ranks vote before and after captures: at barriers of single breaks they would wait for one that has failed.
    return forward_context(admission=admission, lined_up=True)


def _is_of_ranks(error: RuntimeError) -> bool:
    """Whether a collective has failed. Gloo raises plain errors, which begin with the path of its source."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def _told(value: Any) -> str:
    """An option as ranks compare it: a function by its name, as its address differs."""
    if isinstance(value, dict):
        return str({name: _told(given) for name, given in sorted(value.items())})
    if isinstance(value, list | tuple):
        return str([_told(given) for given in value])
    return getattr(value, "__qualname__", None) or str(value)


def _parts(body: Any) -> list[tuple[dict[str, Any], str, Any, str]]:
    """All that a body is made of: where each part is held, under which key, the part, and its full name."""
    found = []
    for path, module in body.named_modules() if isinstance(body, torch.nn.Module) else ():
        for held in (module._parameters, module._buffers, module._modules):
            found += [(held, key, value, f"{path}.{key}".lstrip(".")) for key, value in held.items()]
    return found


def _padded(rows: Tensor) -> Tensor:
    """At least ``FEWEST`` rows, and always memory of its own."""
    more = FEWEST - len(rows)
    if more > 0:
        return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
    return rows.clone(memory_format=torch.contiguous_format)


def _padded_proxy(proxy: PipelineProxy) -> PipelineProxy:
    return PipelineProxy(**{name: _padded(rows) for name, rows in proxy.tensors()})
