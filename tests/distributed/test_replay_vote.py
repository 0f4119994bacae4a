"""Votes over gloo: no forced disagreement hangs; each ends in a verdict, or an error that names the rank."""

import contextlib
import datetime
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bcg_compiler.buckets import Batch, Limits
from bcg_compiler.distributed.exchange import Exchange
from bcg_compiler.distributed.replay_vote import ReplayVote, Terms, Verdict, Vote, Voter, cast
from bcg_compiler.errors import RankError

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]

BUCKETS = (4, 16)
PLAN, OTHER = "00000000000000aa", "ffffffffffffff00"
NONE: frozenset[int] = frozenset()
TERMS = Terms(buckets=BUCKETS, limits=Limits(prefixes=False))
SHARED = Terms(buckets=BUCKETS, limits=Limits(prefixes=False), same_bucket=True)

#: Seconds: far more than a vote takes, and few for a test that waits for a dead rank.
TIMEOUT = 3.0


def prefill(rows: int = 3, prefix: int = 0, terms: Terms = TERMS, failed: frozenset[int] = NONE, **voter: Any) -> Vote:
    program = Voter(**{"plan": PLAN, **voter})
    return cast(program, terms, "prefill", Batch(rows=rows, prefix_lengths=(prefix,)), failed=failed)


def same_on_all(value: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(other == value for other in found)


def eager(verdict: Verdict, reason: str, rank: int) -> bool:
    return same_on_all(verdict) and verdict.reason == reason and f"rank {rank} " in verdict.text


def disagreement(rank: int, ranks: int, folder: Path) -> None:
    """Rank 1 is unlike the others, step after step, and the group goes on."""
    odd = rank == 1
    with ReplayVote(None, TERMS, 30) as vote:
        assert (vote.place, vote.ranks) == (rank, tuple(range(ranks)))
        for _ in range(2):
            verdict = vote(prefill(rows=12 if odd else 3))
            assert same_on_all(verdict) and verdict.buckets == (4, 16, 4)
            assert eager(vote(prefill(prefix=7 if odd else 0)), "prefix", 1)
            assert vote(prefill(prefix=7 if odd else 0)).prefix == 7
            assert eager(vote(prefill(rows=6 if odd else 12)), "padding", 1)
            assert eager(vote(cast(Voter(plan=PLAN), TERMS, "idle") if odd else prefill()), "few_rows", 1)
            draft = Voter(plan=OTHER, target=Voter(plan="" if odd else PLAN))
            assert eager(vote(cast(draft, TERMS, "prefill", Batch(rows=3, prefix_lengths=(0,)))), "no_program", 1)
        # Differing plans are an error on all ranks in the same step, and the next one is as good as any.
        with pytest.raises(RankError, match=f"{PLAN} on ranks 0 and 2, {OTHER} on rank 1"):
            vote(prefill(plan=OTHER if odd else PLAN))
        assert vote(prefill()).replay_prefill
    with pytest.raises(RankError, match="is closed"):
        vote(prefill())


def one_gather(rank: int, ranks: int, folder: Path) -> None:
    vote = ReplayVote(None, TERMS, 30)
    with mock.patch.object(dist, "all_gather", side_effect=dist.all_gather) as gather:
        vote(prefill())
    assert gather.call_count == 1
    vote.close()


def captures(rank: int, ranks: int, folder: Path) -> None:
    """Only one rank lacks captures, and another one cannot make one: all capture alike, and give the same up."""
    held = {16} if rank == 1 else set(BUCKETS)
    tried: list[int] = []
    broken: set[int] = set()

    def capture(bucket: int) -> None:
        tried.append(bucket)
        dist.barrier()  # it couples ranks: whoever is alone in it hangs
        if bucket in broken:
            raise MemoryError("no room")
        held.add(bucket)

    def step(vote: ReplayVote, rows: int) -> Verdict:
        def cast_vote(failed: frozenset[int]) -> Vote:
            return prefill(rows, terms=SHARED, failed=failed, uncaptured=frozenset(BUCKETS) - held)

        return vote.step(cast_vote, capture)

    with ReplayVote(None, SHARED, 30) as vote:
        verdict = step(vote, rows=3)  # late, on rank 1 alone
        assert same_on_all(verdict) and same_on_all(tried) and tried == [4]
        assert verdict.buckets == (4,) * ranks
        held -= {16} if rank == 2 else set()  # capture again, on rank 2 alone, for the rows of another rank
        verdict = step(vote, rows=12 if rank == 0 else 3)
        assert tried == [4, 16] and verdict.buckets == (16,) * ranks
        held -= {4} if rank == 0 else set()
        broken |= {4} if rank == 2 else set()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            verdict = step(vote, rows=3)
        assert [str(w.message).startswith("Bucket 4 could not be captured on rank 2") for w in told] == [True] * (
            rank == 2
        )
        assert same_on_all(verdict) and tried == [4, 16, 4] and verdict.failed == vote.failed == {4}
        assert verdict.buckets == (16,) * ranks  # the first one that is left
        broken |= {16} if rank == 0 else set()
        held -= {16} if rank == 0 else set()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = step(vote, rows=3)
        assert eager(verdict, "no_bucket", 0) and verdict.failed == set(BUCKETS)
        assert step(vote, rows=3) == verdict and tried == [4, 16, 4, 16]


def wrong_word(rank: int, ranks: int, folder: Path) -> None:
    """A program that never says that it has a bucket: an error on all ranks, and no endless capture."""
    with ReplayVote(None, TERMS, 30) as vote, pytest.raises(RankError, match=r"captured \[4\] in this step"):
        vote.step(lambda failed: prefill(failed=failed, uncaptured=frozenset({4} if rank else ())), lambda bucket: None)


def at_setup(rank: int, ranks: int, folder: Path) -> None:
    ladder = (4, 16, 64) if rank == 1 else BUCKETS
    with pytest.raises(RankError) as raised:
        ReplayVote(None, Terms(buckets=ladder, limits=Limits()), 30, {"model": f"m{rank % 2}", "same": "yes"})
    text = str(raised.value)
    assert same_on_all(text)
    assert "ladder: [4, 16] on ranks 0 and 2; [4, 16, 64] on rank 1" in text
    assert "model: m0 on ranks 0 and 2; m1 on rank 1" in text
    assert "torch" not in text and "same:" not in text
    with pytest.raises(RankError, match="rules: nothing on ranks 0 and 1; cp_size on rank 2"):
        ReplayVote(None, TERMS, 30, {"rules": "cp_size"} if rank == 2 else {})
    limits = Limits(vetoes=(same_on_all,) if rank else ())
    with pytest.raises(RankError, match=r"limits.vetoes: \[\] on rank 0; \['same_on_all'\] on ranks 1 and 2"):
        ReplayVote(None, Terms(buckets=BUCKETS, limits=limits), 30)
    with pytest.raises(RankError, match="timeout"):
        ReplayVote(None, TERMS, 0)
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(RankError, match="no part of"):
            ReplayVote(group, TERMS, 30)
        return
    with ReplayVote(group, TERMS, 30) as vote:  # ranks are named by their global numbers
        assert vote.ranks == (0, 2)
        assert "rank 2 " in vote(prefill(prefix=rank)).text


def dying(rank: int, ranks: int, folder: Path) -> None:
    """Rank 2 dies between two votes, as in a break: of four ranks, only two are its neighbours in gloo's ring."""
    vote = ReplayVote(None, TERMS, TIMEOUT)
    assert vote(prefill()).replay_prefill
    if rank == 2:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RankError, match="no word from other ranks within 3 seconds: rank 2\\."):
        vote(prefill())
    took = time.monotonic() - began
    with pytest.raises(RankError, match=r"cannot go on after it failed: .*rank 2\."):
        vote(prefill())
    (folder / f"rank{rank}.took").write_text(str(took))
    os._exit(0)  # the group is broken: no barrier


def hanging(rank: int, ranks: int, folder: Path) -> None:
    """Ranks 0 and 3 do not come; the others name both, whoever gives up first."""
    vote = ReplayVote(None, TERMS, TIMEOUT)
    done = folder / "done"
    if rank in (0, 3):
        while not done.exists():
            time.sleep(0.05)
        os._exit(0)
    with pytest.raises(RankError, match="no word from other ranks within 3 seconds: ranks 0 and 3\\."):
        vote(prefill())
    if rank == 1:
        done.touch()
    os._exit(0)


def too_late(rank: int, ranks: int, folder: Path) -> None:
    """A rank comes after another one has given up: it is told so, and blames nobody."""
    exchange = Exchange(None, 0.6, "test")
    given_up, done = folder / "given_up", folder / "done"
    if rank == 0:
        with pytest.raises(RankError, match=r"no word from other ranks within 0.6 seconds: rank 1\."):
            exchange.gather(torch.zeros(1))
        given_up.touch()
    while not given_up.exists():
        time.sleep(0.02)
    if rank == 1:
        # gloo still delivers what rank 0 sent before it gave up; then rank 0 is missed at the next exchange.
        wanted = "all ranks came to it"
        with contextlib.suppress(RankError):
            exchange.gather(torch.zeros(1))
            wanted = "no word from other ranks within 0.6 seconds: rank 0"
        with pytest.raises(RankError, match=wanted):
            exchange.gather(torch.zeros(1))
        done.touch()
    while not done.exists():
        time.sleep(0.02)
    os._exit(0)


def patience(rank: int, ranks: int, folder: Path) -> None:
    """A rank that waits long says that it is there before it gives up, and one that does not wait long says nothing."""
    exchange = Exchange(None, 8.0, "test")
    world: Any = dist.group.WORLD
    store = world.get_group_store()
    keys: list[bool] = []
    waits: list[float] = []

    class Slow:
        def wait(self, timeout: datetime.timedelta) -> None:
            waits.append(timeout.total_seconds())
            keys.append(store.check([exchange._key(rank)]))
            if len(waits) == 1:
                raise RuntimeError("time is up")

        def is_completed(self) -> bool:
            return False

    exchange.gather(torch.zeros(1))
    assert not store.check([exchange._key(rank)])
    with mock.patch.object(dist, "all_gather", lambda *args, **kwargs: Slow()):
        exchange.gather(torch.zeros(1))
    assert keys == [False, True] and waits[0] == 2.0 and 2.0 < waits[1] <= 6.0
    again = Exchange(None, 8.0, "test")  # what an earlier one wrote is none of its words
    again.count = exchange.count
    assert store.check([exchange._key(rank)]) and not store.check([again._key(rank)])


@pytest.mark.parametrize("function", [disagreement, captures, at_setup])
def test_three_ranks(function: Callable[[int, int, Path], None], on_ranks: OnRanks) -> None:
    on_ranks(3, function)


@pytest.mark.parametrize("function", [one_gather, wrong_word, too_late])
def test_two_ranks(function: Callable[[int, int, Path], None], on_ranks: OnRanks) -> None:
    on_ranks(2, function)


def test_one_rank(on_ranks: OnRanks) -> None:
    on_ranks(1, patience)


def test_a_rank_that_dies_is_named_by_all_others_in_time(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(4, dying)
    assert len(list(tmp_path.glob("*.took"))) == 3


def test_ranks_that_hang_are_named_by_all_others(on_ranks: OnRanks) -> None:
    on_ranks(4, hanging)


def test_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(RankError, match="Call init_process_group first"):
        ReplayVote(None, TERMS, 30)
