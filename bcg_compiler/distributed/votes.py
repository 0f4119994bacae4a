"""What ranks tell each other before a step, and what comes of it.

Note [No rank alone]
Where one rank replays and another one runs eagerly, they wait for each other in different collectives for ever; the
same where one captures and others do not. So a rank decides nothing by itself. Each step, every rank sends its ``Vote``
to all, and ``decide``, a pure function of all votes and of what the ranks agreed on before (``Terms``), says what all
of them do:

* All replay, or all run eagerly: the minimum. A rank that refuses names its reason, which is then everybody's.
* If the graph holds a collective over the rows, all use one bucket: the one that the largest live count needs, on which
  the padding factor is judged, too. Else each rank uses the bucket that ``admit`` gave it.
* If a rank is to use a bucket that it has no capture of, all ranks capture it, those that have it too, the largest
  bucket first; then all vote again. So a rank may lose captures whenever it has to.
* If a capture fails on a rank, that one says so in the vote after it, and all ranks drop the bucket for good.

A rank sends what it knows before the vote. In particular it does not know which bucket the group will use, so it names
all that it lacks (``Vote.uncaptured``) and not only its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bcg_compiler.buckets.admission import Admission, Batch, Limits, Refusal, admit
from bcg_compiler.distributed.exchange import rank_names
from bcg_compiler.errors import LateCaptureError, RankError

Mode = Literal["prefill", "decode", "idle"]

#: Why a rank votes no: ``""`` if it does not.
VoteReason = Literal[Refusal, "no_program", "other_mode"]

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all ranks of a group agreed on before their first vote.

    Raises ``RankError`` if ``on_late_capture`` is none of its values.
    """

    buckets: Sequence[int]
    """The ladder, ascending."""
    limits: Limits
    same_bucket: bool = False
    """Whether the graph holds a collective over the rows, so that all ranks need as many."""
    on_late_capture: Literal["capture", "eager", "error"] = "capture"
    """What happens if a bucket is needed that some rank has no capture of, as the option of that name says."""

    _own: Limits = field(init=False, repr=False, compare=False)
    _group: Limits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.on_late_capture not in ("capture", "eager", "error"):
            raise RankError(f"on_late_capture is {self.on_late_capture!r}; it is 'capture', 'eager' or 'error'.")
        object.__setattr__(self, "buckets", tuple(self.buckets))
        # One bucket for all: how much a rank pads is judged on the group's largest live count, by ``decide``.
        own = replace(self.limits, max_padding_factor=float("inf")) if self.same_bucket else self.limits
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_group", Limits(max_padding_factor=self.limits.max_padding_factor, least=0))

    def admit(self, batch: Batch, failed: frozenset[int] = NONE) -> Admission:
        """What one rank votes with; ``failed`` are the buckets that the group has dropped."""
        return admit(batch, self.without(failed), self._own)

    def admit_group(self, rows: int, failed: frozenset[int] = NONE) -> Admission:
        """The one bucket of all ranks, where the largest of them has so many live rows."""
        return admit(Batch(rows=rows), self.without(failed), self._group)

    def without(self, failed: frozenset[int]) -> Sequence[int]:
        """The buckets that are left."""
        return tuple(bucket for bucket in self.buckets if bucket not in failed) if failed else self.buckets

    def configuration(self) -> dict[str, str]:
        """As text, for ranks to compare. Of a veto only the name can be compared."""
        limits = {name: value for name, value in vars(self.limits).items() if not name.startswith("_")}
        limits["vetoes"] = [getattr(veto, "__qualname__", type(veto).__qualname__) for veto in self.limits.vetoes]
        told = {f"limits.{name}": str(_sorted(value)) for name, value in limits.items()}
        told |= {"ladder": str(list(self.buckets)), "same_bucket": str(self.same_bucket)}
        return {**told, "on_late_capture": self.on_late_capture}


@dataclass(frozen=True, kw_only=True)
class Voter:
    """The program of a rank, as its vote needs to know it."""

    plan: str = ""
    """``plan_hash`` of its plan, 16 hexadecimal digits; empty where there is no program."""
    uncaptured: frozenset[int] = NONE
    """The buckets that it holds no capture of."""
    target: "Voter | None" = None
    """Of a speculative worker: the program of its target model, which votes in its place."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What one rank says before a step. Raises ``RankError`` for what no vote can be."""

    mode: Mode
    rows: int = 0
    """Live tokens."""
    bucket: int = 0
    """The one that ``admit`` gave it; 0 if it does not replay a prefill."""
    reason: str = ""
    """Why it does not: a ``VoteReason``."""
    may_replay_decode: bool = False
    prefix: int = 0
    """Tokens of its longest prefix."""
    plan: str = ""
    """See ``Voter.plan``."""
    uncaptured: frozenset[int] = NONE
    """The buckets that it holds no capture of, its own or others."""
    failed: frozenset[int] = NONE
    """The buckets that it has dropped, as their capture failed, here or elsewhere."""

    def __post_init__(self) -> None:
        if (self.bucket > 0) == (self.reason != ""):
            raise RankError(f"A vote has a bucket, or a reason for having none, and not both or neither: {self}.")
        if self.bucket and (self.mode == "decode" or not self.plan):
            raise RankError(
                f"Only a rank with a program, and not with a batch for decoding, replays a prefill: {self}."
            )

    @property
    def may_replay_prefill(self) -> bool:
        return self.bucket > 0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks do: the same object on each of them."""

    replay_prefill: bool
    replay_decode: bool
    prefix: int
    """Tokens of the longest prefix on any rank."""
    buckets: tuple[int, ...] = ()
    """Of each rank; empty unless prefill replays."""
    captures: tuple[int, ...] = ()
    """All ranks capture these buckets, in this order, before they vote again."""
    failed: frozenset[int] = NONE
    """The buckets that no rank uses any more."""
    again: bool = False
    """Whether the ranks have to vote once more: after captures, and if some did not know yet what has failed."""
    reason: str = ""
    """Why prefill does not replay, a code of ``docs/reasons.md``."""
    text: str = ""
    """The same as a sentence, with the rank that says so."""

    def admission(self, place: int, rows: int) -> Admission:
        """The same as an admission, of the rank at that place in its group, which has so many live rows."""
        if not self.replay_prefill:
            return Admission(None, self.reason, self.text, rows)
        bucket = self.buckets[place]
        return Admission(bucket, "", f"rows is {rows}: all ranks replay, this one in bucket {bucket}.", rows)


def cast(
    voter: Voter,
    terms: Terms,
    mode: Mode,
    batch: Batch | None = None,
    *,
    may_replay_decode: bool = False,
    failed: frozenset[int] = NONE,
) -> Vote:
    """The vote of a rank.

    Args:
        voter: its program; of a speculative worker, one with a ``target``.
        terms: what the ranks agreed on.
        mode: what its batch is for; ``"idle"`` if it has none while others work.
        batch: of a rank that is not idle.
        may_replay_decode: what the engine says of its own graphs for decoding. A batch for prefill never may.
        failed: the buckets that the group has dropped.

    Raises ``RankError`` if there is no batch, and the rank is not idle.
    """
    while voter.target is not None:
        voter = voter.target
    if batch is None:
        if mode != "idle":
            raise RankError(f"A rank that votes for {mode} has a batch: give it, or vote as idle.")
        batch = _idle(terms.limits)
    bucket, reason = 0, ""
    if mode == "decode":
        reason = "other_mode"
    elif not voter.plan:
        reason = "no_program"
    else:
        admission = terms.admit(batch, failed)
        bucket, reason = admission.bucket or 0, admission.reason
    return Vote(
        mode=mode,
        rows=batch.rows,
        bucket=bucket,
        reason=reason,
        may_replay_decode=may_replay_decode and mode != "prefill",
        prefix=max(batch.prefix_lengths or (0,)),
        plan=voter.plan,
        uncaptured=voter.uncaptured,
        failed=failed,
    )


def decide(votes: Sequence[Vote], terms: Terms, names: Sequence[int] | None = None) -> Verdict:
    """What all ranks do, from the votes of all in the order of the group. See Note [No rank alone].

    ``names`` are the global numbers of the ranks, for what is said about them; their places in the group otherwise.

    Raises on all ranks alike: ``RankError`` if their plans differ, and ``LateCaptureError`` if a bucket would have to
    be captured and ``on_late_capture`` is ``"error"``.
    """
    names = range(len(votes)) if names is None else names
    _check_plans(votes, names)
    failed = NONE.union(*(vote.failed for vote in votes))
    eager = Verdict(
        replay_prefill=False,
        replay_decode=all(vote.may_replay_decode for vote in votes),
        prefix=max(vote.prefix for vote in votes),
        failed=failed,
    )
    if any(vote.failed != failed for vote in votes):
        text = f"{_buckets(failed)} could not be captured on all ranks, so no rank uses it."
        return replace(eager, again=True, reason="capture_failed", text=text)
    for name, vote in zip(names, votes, strict=True):
        if vote.reason:
            text = f"All ranks run eagerly: rank {name} votes no ({vote.reason})."
            return replace(eager, reason=vote.reason, text=text)
    if terms.same_bucket:
        admission = terms.admit_group(max(vote.rows for vote in votes), failed)
        if admission.bucket is None:
            text = f"All ranks run eagerly. Of the one with the most rows: {admission.text}"
            return replace(eager, reason=admission.reason, text=text)
        buckets = (admission.bucket,) * len(votes)
    else:
        buckets = tuple(vote.bucket for vote in votes)
    lacking = [
        (name, bucket) for name, bucket, vote in zip(names, buckets, votes, strict=True) if bucket in vote.uncaptured
    ]
    if lacking:
        captures = {bucket for _, bucket in lacking}
        text = f"{_buckets(captures)} is needed, and not captured on {rank_names(name for name, _ in lacking)}."
        if terms.on_late_capture == "error":
            raise LateCaptureError(f"{text} Capture it on all ranks before the first request, or set on_late_capture.")
        if terms.on_late_capture == "eager":
            return replace(eager, reason="late_capture", text=text)
        order = tuple(sorted(captures, reverse=True))
        return replace(eager, captures=order, again=True, reason="late_capture", text=text)
    return replace(eager, replay_prefill=True, buckets=buckets)


def _check_plans(votes: Sequence[Vote], names: Sequence[int]) -> None:
    by_plan: dict[str, list[int]] = {}
    for name, vote in zip(names, votes, strict=True):
        if vote.plan:
            by_plan.setdefault(vote.plan, []).append(name)
    if len(by_plan) > 1:
        told = ", ".join(f"{plan} on {rank_names(ranks)}" for plan, ranks in by_plan.items())
        raise RankError(
            f"Ranks that vote together have different plans: {told}. They would wait for each other in different "
            "collectives. Give them the same model, options and versions, and compare what bcg explain --text prints."
        )


def _idle(limits: Limits) -> Batch:
    """The batch of a rank that has none: within all limits but the one on the least rows."""
    return Batch(
        rows=0,
        requests=0,
        prefix_lengths=(),
        prefix_chunks=0,
        embeddings=min(limits.embeddings),
        adapters=(),
        target_verify=False,
        hidden_states="none",
        logprobs=False,
    )


def _buckets(which: Iterable[int]) -> str:
    *most, last = map(str, sorted(which))
    return f"Bucket {', '.join(most)} and {last}" if most else f"Bucket {last}"


def _sorted(value: Any) -> Any:
    """Sets in an order that is the same on all ranks."""
    return sorted(value) if isinstance(value, frozenset) else value
