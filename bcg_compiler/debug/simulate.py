"""A fleet of ranks on paper: what votes, one bucket for all and the slowest rank cost, from measured times.

The ranks ask the same ``admit`` and come to their verdicts by the same ``decide`` as real ones do; only the model and
the network are left out.

Note [Where the time of a fleet goes]
A step ends when its slowest rank does, so that a step of ``d`` µs on ``n`` ranks is ``n * d`` µs of rank time. The
share of each rank is split into what adds up to ``d`` exactly:

    alone    what it would take by itself, by its own admission: a replay in its own bucket, or an eager run; nothing
             for a rank that has no batch
    bucket   how much more the bucket of the group takes than its own one
    vote     how much more an eager run takes, where it would have replayed but for another rank
    slowest  what it waits for the slowest rank

``bucket`` is below 0 for a rank to whom the group does good: it replays what it would run eagerly by itself, as too
much of its own bucket would be padding.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bcg_compiler.buckets import Batch, Ladder, Limits
from bcg_compiler.debug.bucket_times import BucketTimes
from bcg_compiler.distributed.votes import Terms, Vote, Voter, cast, decide
from bcg_compiler.errors import RankError

#: All ranks have one plan.
PLAN = f"{1:016x}"

#: What the rank time of a step is for, see Note [Where the time of a fleet goes].
SHARES = {
    "alone": "what each rank needs by itself",
    "bucket": "lost to the bucket of the group",
    "vote": "lost to the no of another rank",
    "slowest": "lost to the slowest rank",
}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated. Raises ``RankError`` for sizes that no fleet has."""

    ranks: int
    steps: int = 200
    requests: int = 1
    """Prompts of a batch."""
    chunk: int | None = None
    """Tokens that a step takes of a batch at most, the rest being for the steps after it; ``None``: all of them."""
    idle: float = 0.0
    """How likely a rank that is done with a batch has none for a step."""
    max_padding_factor: float = 2.0
    tolerates_idle: bool = True
    """Whether the graph takes a batch of no rows."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "requests", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RankError(f"{name} is {value}; it must be at least 1.")
        if not 0 <= self.idle < 1:
            raise RankError(f"idle is {self.idle}; it is a part of the steps, from 0 to below 1.")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of all steps, under one kind of verdict."""

    replays: int
    """Batches with rows that replay, of ``batches``."""
    batches: int
    buckets: Counter[int]
    """How many of them, and of the idle ranks beside them, replay in each bucket."""
    reasons: Counter[str]
    """Steps that run eagerly, by the reason of the rank that says no."""
    live: int
    """Tokens that replay."""
    padded: int
    """Tokens of padding beside them, those of idle ranks included."""
    shares: dict[str, float]
    """Microseconds of rank time, by ``SHARES``."""

    @property
    def time(self) -> float:
        """Microseconds of rank time, all in all."""
        return sum(self.shares.values())


@dataclass(frozen=True)
class Simulation:
    """A fleet where each rank has its own bucket, and the same batches where all have the same one."""

    fleet: Fleet
    ladder: Ladder
    own: Outcome
    same: Outcome


def simulate(fleet: Fleet, lengths: Sequence[int], ladder: Ladder, times: BucketTimes) -> Simulation:
    """Draw the batches of a fleet from prompt lengths (seeded, with repetition), and let its ranks vote on each."""
    times.replay(ladder.ceiling)  # An error, whether a batch of this length comes or not.
    steps = draw_batches(fleet, lengths)
    own, same = (_run(fleet, steps, ladder, times, same_bucket) for same_bucket in (False, True))
    return Simulation(fleet, ladder, own, same)


def draw_batches(fleet: Fleet, lengths: Sequence[int]) -> list[list[int]]:
    """The rows of each rank, step by step."""
    draw = random.Random(fleet.seed)
    left = [0] * fleet.ranks  # of batches that are longer than a chunk
    steps = []
    for _ in range(fleet.steps):
        for rank in range(fleet.ranks):
            if not left[rank] and draw.random() >= fleet.idle:
                left[rank] = sum(draw.choices(lengths, k=fleet.requests))
        rows = [tokens if fleet.chunk is None else min(tokens, fleet.chunk) for tokens in left]
        left = [tokens - taken for tokens, taken in zip(left, rows, strict=True)]
        steps.append(rows)
    return steps


def _run(
    fleet: Fleet, steps: Sequence[Sequence[int]], ladder: Ladder, times: BucketTimes, same_bucket: bool
) -> Outcome:
    limits = Limits(max_padding_factor=fleet.max_padding_factor, least=0 if fleet.tolerates_idle else 1)
    terms = Terms(buckets=ladder.buckets, limits=limits, same_bucket=same_bucket)
    alone_terms = Terms(buckets=ladder.buckets, limits=limits)
    voter = Voter(plan=PLAN)
    replay = cache(times.replay)

    @cache
    def vote(rows: int) -> Vote:
        return cast(voter, terms, "prefill", Batch(rows=rows)) if rows else cast(voter, terms, "idle")

    @cache
    def alone(rows: int) -> float:
        """A rank without batch does nothing by itself."""
        bucket = alone_terms.admit(Batch(rows=rows)).bucket if rows else None
        return times.run_eagerly(rows) if bucket is None else replay(bucket)

    found, reasons, shares = Counter[int](), Counter[str](), dict.fromkeys(SHARES, 0.0)
    replays = live = 0
    for step in steps:
        verdict = decide([vote(rows) for rows in step], terms)
        if verdict.replay_prefill:
            taken = [replay(bucket) for bucket in verdict.buckets]
            found.update(verdict.buckets)
            replays += sum(rows > 0 for rows in step)
            live += sum(step)
        else:
            taken = [times.run_eagerly(rows) for rows in step]
            reasons[verdict.reason] += 1
        longest = max(taken)
        lost = "bucket" if verdict.replay_prefill else "vote"
        for rows, time in zip(step, taken, strict=True):
            shares["alone"] += alone(rows)
            shares[lost] += time - alone(rows)
            shares["slowest"] += longest - time
    return Outcome(
        replays=replays,
        batches=sum(rows > 0 for step in steps for rows in step),
        buckets=Counter(dict(sorted(found.items()))),
        reasons=reasons,
        live=live,
        padded=sum(bucket * count for bucket, count in found.items()) - live,
        shares=shares,
    )


def simulation_view(found: Simulation) -> Group:
    """Both outcomes side by side, for a terminal."""
    both = {"own buckets": found.own, "one bucket for all": found.same}
    table = Table("", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in both:
        table.add_column(name, justify="right", no_wrap=True)

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("batches that replay", *(f"{o.replays / max(o.batches, 1):.2%}" for o in both.values()))
    row("buckets used", *(f"{len(o.buckets)} of {len(found.ladder)}" for o in both.values()))
    row("padded over live tokens", *(f"{o.padded / o.live:.2%}" if o.live else "—" for o in both.values()))
    row("ms a step", *(f"{o.time / found.fleet.ranks / found.fleet.steps / 1e3:.2f}" for o in both.values()))
    for share, name in SHARES.items():
        row(f"  {name}", *(f"{o.shares[share] / o.time:.2%}" if o.time else "—" for o in both.values()))
    lines = [_reasons(name, outcome) for name, outcome in both.items() if outcome.reasons]
    used = [_used(name, outcome) for name, outcome in both.items() if outcome.buckets]
    return Group(table, "", *used, *lines)


def _used(name: str, outcome: Outcome) -> Text:
    most = outcome.buckets.most_common(8)
    told = ", ".join(f"{bucket} ({count / outcome.buckets.total():.1%})" for bucket, count in most)
    return Text(f"{name}, most used: {told}")


def _reasons(name: str, outcome: Outcome) -> Text:
    told = ", ".join(f"{reason} {count}" for reason, count in outcome.reasons.most_common())
    return Text(f"{name}, steps that run eagerly: {told}")
