"""A vote as int64 numbers, all of one length, for one all-gather.

A set of buckets is a bit for each bucket of the ladder, 63 in a number, so that no sign is in the way.
"""

from collections.abc import Sequence
from typing import get_args

import torch

from bcg_compiler.distributed.votes import Mode, Vote, VoteReason
from bcg_compiler.errors import RankError, nearest

MODES = get_args(Mode)
REASONS = ("", *get_args(VoteReason))
BITS = 63

#: The numbers before the two sets.
FIELDS = 7


def encode(vote: Vote, buckets: Sequence[int]) -> torch.Tensor:
    """int64 ``[FIELDS + 2 * words]``, with a word for each 63 ``buckets``: those of the ladder."""
    if vote.reason not in REASONS:
        raise RankError(
            f"A vote gives the reason {vote.reason!r}, which cannot be sent. {nearest(vote.reason, REASONS)}"
        )
    plan = int(vote.plan or "0", 16)
    numbers = [
        MODES.index(vote.mode),
        vote.rows,
        vote.bucket,
        REASONS.index(vote.reason),
        int(vote.may_replay_decode),
        vote.prefix,
        plan - (1 << 64) if plan >> 63 else plan,
    ]
    return torch.tensor([*numbers, *_words(vote.uncaptured, buckets), *_words(vote.failed, buckets)])


def decode(numbers: Sequence[int], buckets: Sequence[int]) -> Vote:
    """The vote that ``encode`` made the numbers of, on whatever rank, with the same ladder."""
    mode, rows, bucket, reason, decodes, prefix, plan, *words = numbers
    half = len(words) // 2
    return Vote(
        mode=MODES[mode],
        rows=rows,
        bucket=bucket,
        reason=REASONS[reason],
        may_replay_decode=bool(decodes),
        prefix=prefix,
        plan=f"{plan % (1 << 64):016x}" if plan else "",
        uncaptured=_set(words[:half], buckets),
        failed=_set(words[half:], buckets),
    )


def _words(which: frozenset[int], buckets: Sequence[int]) -> list[int]:
    words = [0] * -(-len(buckets) // BITS)
    if which:
        if unknown := which.difference(buckets):
            raise RankError(f"A vote names {sorted(unknown)}, and the ladder of its group is {list(buckets)}.")
        for at, bucket in enumerate(buckets):
            words[at // BITS] |= (bucket in which) << at % BITS
    return words


def _set(words: Sequence[int], buckets: Sequence[int]) -> frozenset[int]:
    if not any(words):
        return frozenset()
    return frozenset(bucket for at, bucket in enumerate(buckets) if words[at // BITS] >> at % BITS & 1)
