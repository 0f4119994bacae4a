"""The vote of a group of ranks: one all-gather a step, and the captures that the ranks make together.

    vote = ReplayVote(group, terms, timeout=30, config={"model": "glm5"})  # on all ranks
    verdict = vote.step(lambda failed: cast(voter(), terms, "prefill", batch, failed=failed), capture)
    verdict.admission(vote.place, batch.rows)  # replay in its bucket, or run eagerly
    vote.close()  # before destroy_process_group

``Vote``, ``Verdict``, ``Terms``, ``cast`` and ``decide`` are those of ``votes``.
"""

import datetime
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType

import torch.distributed as dist

from bcg_compiler.distributed.agreement import agree, versions
from bcg_compiler.distributed.exchange import Exchange
from bcg_compiler.distributed.vote_wire import decode, encode
from bcg_compiler.distributed.votes import Terms, Verdict, Vote, Voter, cast, decide
from bcg_compiler.errors import RankError

__all__ = ["ReplayVote", "Terms", "Verdict", "Vote", "Voter", "cast", "decide"]


class ReplayVote:
    """Ranks that replay together, or run eagerly together.

    Args:
        group: the ranks; ``None``: all. All of them make one, in the same order. It needs a backend for CPU tensors.
        terms: the same on all ranks.
        timeout: seconds that a rank waits for the others, at each vote.
        config: what else must be the same on all ranks: names and values. The versions of torch, Python and this
            package and the ``terms`` are compared anyway.

    Raises ``RankError`` on all ranks if they do not agree on these, or if one of them does not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        terms: Terms,
        timeout: float | datetime.timedelta,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.terms = terms
        self.failed: frozenset[int] = frozenset()
        """The buckets that the group has dropped, as their capture failed on some rank."""
        self._exchange = Exchange(group, timeout, "replay vote")
        agree(self._exchange, {**versions(), **terms.configuration(), **(config or {})})

    @property
    def place(self) -> int:
        """This rank's place in the group."""
        return self._exchange.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global numbers of the ranks of the group."""
        return self._exchange.ranks

    def __call__(self, vote: Vote) -> Verdict:
        """The verdict on this vote and those of the other ranks: one all-gather.

        Raises what ``decide`` raises, and ``RankError`` if a rank does not come within the timeout.
        """
        buckets = self.terms.buckets
        numbers = self._exchange.gather(encode(vote, buckets)).tolist()
        return decide([decode(row, buckets) for row in numbers], self.terms, self._exchange.ranks)

    def step(self, cast_vote: Callable[[frozenset[int]], Vote], capture: Callable[[int], object]) -> Verdict:
        """Vote; capture what the ranks need, all of them, and vote again, until nothing has to be captured any more.

        Args:
            cast_vote: gives this rank's vote; it is told which buckets the group has dropped.
            capture: captures a bucket. Where that fails on this rank it raises, once it has passed all the barriers of
                this bucket, for which the other ranks wait.

        A failed capture is a warning on its rank, and in the verdict on all of them.
        """
        captured: set[int] = set()
        while True:
            verdict = self(cast_vote(self.failed))
            self.failed = verdict.failed
            if not verdict.again:
                return verdict
            if again := captured.intersection(verdict.captures):
                raise RankError(
                    f"{verdict.text} But all ranks have captured {sorted(again)} in this step, and no capture failed: "
                    "Voter.uncaptured is wrong there."
                )
            for bucket in verdict.captures:
                captured.add(bucket)
                try:
                    capture(bucket)
                except Exception as error:
                    self.failed |= {bucket}
                    rank = self.ranks[self.place]
                    warnings.warn(
                        f"Bucket {bucket} could not be captured on rank {rank}, so no rank uses it (capture_failed): "
                        f"{type(error).__name__}: {error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def missing(self, error: RuntimeError) -> RankError:
        """What to raise for a collective that failed on this rank between two votes: it names the ranks that are gone.

        Waits for a sign of the others, until the timeout. No vote can follow.
        """
        return self._exchange.missing(error)

    def close(self) -> None:
        """Let go of the group, before ``destroy_process_group``. Further votes are errors."""
        self._exchange.close()

    def __enter__(self) -> "ReplayVote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
