"""The verdict: whatever ranks vote, they never take different collectives."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bcg_compiler.buckets import Batch, Limits
from bcg_compiler.distributed.replay_vote import Terms, Verdict, Vote, Voter, cast, decide
from bcg_compiler.distributed.vote_wire import FIELDS, REASONS, decode, encode
from bcg_compiler.errors import BcgError, LateCaptureError, RankError

SMALL, LARGE = BUCKETS = (4, 16)
PLAN, OTHER = "00000000000000aa", "ffffffffffffff00"
NONE: frozenset[int] = frozenset()
SETS = [NONE, frozenset({SMALL}), frozenset({LARGE}), frozenset(BUCKETS)]


def terms(**given: Any) -> Terms:
    return Terms(buckets=BUCKETS, limits=Limits(prefixes=False), **given)


def prefill(rows: int = 3, prefix: int = 0, plan: str = PLAN, under: Terms | None = None, **voter: Any) -> Vote:
    """The vote of a rank with one request."""
    batch = Batch(rows=rows, prefix_lengths=(prefix,))
    failed = voter.pop("failed", NONE)
    return cast(Voter(plan=plan, **voter), under or terms(), "prefill", batch, failed=failed)


def idle(under: Terms | None = None, plan: str = PLAN, decodes: bool = False, **voter: Any) -> Vote:
    failed = voter.pop("failed", NONE)
    return cast(Voter(plan=plan, **voter), under or terms(), "idle", may_replay_decode=decodes, failed=failed)


def decoding(under: Terms | None = None, plan: str = PLAN, decodes: bool = True) -> Vote:
    return cast(Voter(plan=plan), under or terms(), "decode", Batch(rows=1), may_replay_decode=decodes)


# -- The model check


def all_votes(under: Terms) -> list[Vote]:
    """Each vote that a rank can cast on two buckets: what of it may differ between ranks, and no more."""
    votes: list[Vote] = []
    for uncaptured in SETS:
        known = dict(uncaptured=uncaptured, under=under)
        # In the smallest bucket; in the next one; in it with much padding; above all; with a prefix.
        votes += [prefill(rows, **known) for rows in (3, 12, 6, 17)] + [prefill(3, prefix=5, **known)]
        votes += [idle(**known)]
    votes += [prefill(3, failed=failed, under=under) for failed in SETS[1:]]
    votes += [prefill(12, failed=SETS[1], under=under, uncaptured=SETS[2]), idle(under, failed=SETS[1])]
    votes += [idle(under, decodes=True), decoding(under), decoding(under, decodes=False)]
    votes += [prefill(3, plan="", under=under), idle(under, plan=""), prefill(3, plan=OTHER, under=under)]
    return votes


def collectives(rank: int, verdict: Verdict, under: Terms) -> tuple[Any, ...]:
    """What a rank waits for others in, if it does what a verdict says."""
    captured = tuple(("capture", bucket) for bucket in verdict.captures)
    if verdict.again:
        assert not verdict.replay_prefill
        return (*captured, "vote")
    assert not captured
    bucket = verdict.admission(rank, 0).bucket
    return ("eager",) if bucket is None else ("replay", bucket if under.same_bucket else "own")


def check(votes: Sequence[Vote], under: Terms) -> str:
    """One case; returns what came of it."""
    try:
        verdict = decide(votes, under)
    except RankError as error:
        assert len({vote.plan for vote in votes if vote.plan}) == 2
        assert PLAN in str(error) and OTHER in str(error)
        return "plans"
    except LateCaptureError:
        assert under.on_late_capture == "error"
        return "late"
    assert len({vote.plan for vote in votes if vote.plan}) < 2
    first, *others = [collectives(rank, verdict, under) for rank in range(len(votes))]
    assert all(other == first for other in others)
    assert verdict.prefix == max(vote.prefix for vote in votes)
    assert verdict.replay_decode == all(vote.may_replay_decode for vote in votes)
    assert verdict.failed == NONE.union(*(vote.failed for vote in votes))
    assert (verdict.reason == "") == verdict.replay_prefill
    if verdict.replay_prefill:
        assert all(vote.may_replay_prefill for vote in votes)  # one no is a no for all
        for vote, bucket in zip(votes, verdict.buckets, strict=True):
            assert vote.rows <= bucket and bucket not in vote.uncaptured and bucket not in verdict.failed
            assert under.same_bucket or bucket == vote.bucket
        largest = max(vote.rows for vote in votes)
        if under.same_bucket:
            assert len(set(verdict.buckets)) == 1
            smallest = min(under.without(verdict.failed))
            assert verdict.buckets[0] == smallest or verdict.buckets[0] <= 2 * largest
    if verdict.captures:
        assert list(verdict.captures) == sorted(verdict.captures, reverse=True)
        assert all(any(bucket in vote.uncaptured for vote in votes) for bucket in verdict.captures)
        assert not verdict.failed.intersection(verdict.captures)
    return "again" if verdict.again else first[0]


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("same_bucket", [False, True])
def test_no_two_ranks_take_different_collectives_for_any_three_votes(same_bucket: bool, least: int) -> None:
    """All cases of three ranks, in one order each: that the order does not matter is the next test."""
    under = Terms(buckets=BUCKETS, limits=Limits(prefixes=False, least=least), same_bucket=same_bucket)
    votes = list(dict.fromkeys(all_votes(under)))
    assert len(votes) > 25
    came = {check(case, under) for case in itertools.combinations_with_replacement(votes, 3)}
    assert came == {"plans", "again", "eager", "replay"}


@pytest.mark.parametrize("late", ["capture", "eager", "error"])
@pytest.mark.parametrize("same_bucket", [False, True])
def test_the_order_of_the_ranks_does_not_matter(same_bucket: bool, late: Any) -> None:
    under = terms(same_bucket=same_bucket, on_late_capture=late)
    votes, generator = all_votes(under), random.Random(0)
    for _ in range(300):
        case = generator.sample(votes, 3)
        orders = [(order, [case[at] for at in order]) for order in itertools.permutations(range(3))]
        assert len({check(order, under) for _, order in orders}) == 1
        verdicts = []
        for order, voted in orders:
            try:
                found = decide(voted, under, names=order)
            except BcgError:
                break
            buckets = found.buckets and tuple(found.buckets[order.index(at)] for at in range(3))
            # Of several reasons the first rank's is told.
            verdicts.append(replace(found, buckets=buckets, text="", reason=""))
        assert len(set(verdicts)) <= 1


@pytest.mark.parametrize("late", ["capture", "eager", "error"])
@pytest.mark.parametrize("same_bucket", [False, True])
def test_voting_and_capturing_ends_and_every_rank_sees_the_same(same_bucket: bool, late: Any) -> None:
    """Ranks that follow their verdicts, with captures missing and failing anywhere: at most a few votes a step."""
    under = terms(same_bucket=same_bucket, on_late_capture=late)
    for rows in itertools.product((3, 12), repeat=3):
        for missing in itertools.product(SETS, repeat=3):
            for broken in [(NONE, NONE, NONE), (SETS[1], NONE, NONE), (NONE, SETS[3], SETS[2])]:
                held, failed = [set(BUCKETS) - lost for lost in missing], [NONE] * 3
                for _ in range(6):
                    votes = [
                        prefill(rows[r], under=under, failed=failed[r], uncaptured=frozenset(BUCKETS) - held[r])
                        for r in range(3)
                    ]
                    try:
                        verdict = decide(votes, under)
                    except LateCaptureError:
                        break
                    failed = [verdict.failed] * 3
                    for rank, bucket in itertools.product(range(3), verdict.captures):
                        if bucket in broken[rank]:
                            failed[rank] |= {bucket}
                        else:
                            held[rank].add(bucket)
                    if not verdict.again:
                        break
                else:
                    pytest.fail(f"no end for {rows}, {missing}, {broken}")
                if late == "capture":
                    assert verdict.replay_prefill == (verdict.reason == "")
                    assert verdict.replay_prefill or verdict.failed


# -- Single rules


def says(verdict: Verdict, reason: str, *words: str) -> bool:
    return verdict.reason == reason and not verdict.replay_prefill and all(word in verdict.text for word in words)


def test_all_replay_in_their_own_buckets() -> None:
    verdict = decide([prefill(3), prefill(12), prefill(4)], terms())
    assert verdict.replay_prefill and verdict.buckets == (SMALL, LARGE, SMALL)
    assert [verdict.admission(rank, 3).bucket for rank in range(3)] == [SMALL, LARGE, SMALL]


def test_a_prefix_on_one_rank_is_everybodys() -> None:
    verdict = decide([prefill(), prefill(prefix=7), prefill()], terms(), names=[10, 11, 12])
    assert says(verdict, "prefix", "rank 11") and verdict.prefix == 7
    assert not verdict.admission(0, 3).replays and verdict.admission(0, 3).reason == "prefix"
    free = Terms(buckets=BUCKETS, limits=Limits())
    verdict = decide([prefill(under=free), prefill(prefix=7, under=free)], free)
    assert verdict.replay_prefill and verdict.prefix == 7


def test_padding_is_judged_on_the_largest_rank_where_all_use_one_bucket() -> None:
    assert says(decide([prefill(6), prefill(12)], terms()), "padding", "rank 0")
    shared = terms(same_bucket=True)
    verdict = decide([prefill(6, under=shared), prefill(12, under=shared), prefill(1, under=shared)], shared)
    assert verdict.buckets == (LARGE,) * 3
    verdict = decide([prefill(6, under=shared), prefill(2, under=shared)], shared)
    assert says(verdict, "padding", "rows is 6")


def test_an_idle_rank_says_yes_only_if_the_graph_takes_no_rows() -> None:
    assert says(decide([prefill(), idle()], terms()), "few_rows", "rank 1")
    for same_bucket in (False, True):
        every = Limits(least=0, prefixes=False, max_requests=1, max_prefix_chunks=0, embeddings=frozenset({"given"}))
        tight = replace(every, adapters=frozenset(), target_verify=False, hidden_states="none", logprobs=False)
        empty = Terms(buckets=BUCKETS, limits=tight, same_bucket=same_bucket)
        assert idle(empty).bucket == SMALL
        open_to_all = replace(empty, limits=Limits(least=0))
        verdict = decide([prefill(12, under=open_to_all), idle(open_to_all)], open_to_all)
        assert verdict.buckets == (LARGE, LARGE if same_bucket else SMALL)


def test_a_voter_without_a_program_or_with_the_other_mode_says_no() -> None:
    assert says(decide([prefill(), prefill(plan="")], terms()), "no_program", "rank 1")
    assert says(decide([decoding(), prefill()], terms()), "other_mode", "rank 0")


def test_decoding_replays_if_all_say_so_and_none_prefills() -> None:
    assert decide([decoding(), decoding(), idle(decodes=True)], terms()).replay_decode
    for no in (decoding(decodes=False), idle(), prefill()):
        assert not decide([decoding(), no, decoding()], terms()).replay_decode
    mixed = cast(Voter(plan=PLAN), terms(), "prefill", Batch(rows=3, prefix_lengths=(0,)), may_replay_decode=True)
    assert not mixed.may_replay_decode


def test_a_speculative_worker_votes_through_its_target() -> None:
    """The draft's own program would do, and the target model's would not."""
    target = Voter(plan=PLAN, uncaptured=frozenset({SMALL}))
    draft = Voter(plan=OTHER, target=Voter(plan=OTHER, target=target))
    batch = Batch(rows=3, prefix_lengths=(0,))
    assert cast(draft, terms(), "prefill", batch) == cast(target, terms(), "prefill", batch)
    ineligible = replace(draft, target=Voter())
    assert says(decide([prefill(), cast(ineligible, terms(), "prefill", batch)], terms()), "no_program", "rank 1")


def test_different_plans_are_named_with_their_ranks() -> None:
    with pytest.raises(RankError, match=f"{PLAN} on ranks 4 and 6, {OTHER} on rank 5"):
        decide([prefill(), prefill(plan=OTHER), decoding()], terms(), names=[4, 5, 6])


def test_what_one_rank_lacks_all_capture_largest_first() -> None:
    """Also what they have: a capture is collective."""
    both = frozenset(BUCKETS)
    verdict = decide([prefill(3, uncaptured=both), prefill(12, uncaptured=both), prefill(12)], terms())
    assert verdict.captures == (LARGE, SMALL) and verdict.again and says(verdict, "late_capture", "ranks 0 and 1")
    assert decide([prefill(3, uncaptured=frozenset({LARGE})), prefill(12)], terms()).replay_prefill


def test_a_rank_may_lack_the_bucket_of_another_one() -> None:
    """The group's bucket is not known to a rank when it votes."""
    shared = terms(same_bucket=True)
    verdict = decide([prefill(3, under=shared, uncaptured=frozenset({LARGE})), prefill(12, under=shared)], shared)
    assert verdict.captures == (LARGE,) and says(verdict, "late_capture", "rank 0")


def test_late_captures_are_eager_runs_or_errors_for_all_if_the_option_says_so() -> None:
    votes = [prefill(uncaptured=frozenset({SMALL})), prefill()]
    verdict = decide(votes, terms(on_late_capture="eager"))
    assert says(verdict, "late_capture", "rank 0") and not verdict.captures and not verdict.again
    with pytest.raises(LateCaptureError, match="Bucket 4 is needed, and not captured on rank 0"):
        decide(votes, terms(on_late_capture="error"))


def test_what_failed_on_one_rank_is_dropped_by_all() -> None:
    verdict = decide([prefill(failed=frozenset({SMALL})), prefill()], terms())
    assert verdict.again and says(verdict, "capture_failed", "Bucket 4") and verdict.failed == {SMALL}
    wide = Terms(buckets=BUCKETS, limits=Limits(max_padding_factor=8), same_bucket=True)
    votes = [prefill(3, failed=verdict.failed, under=wide), prefill(4, failed=verdict.failed, under=wide)]
    assert decide(votes, wide).buckets == (LARGE, LARGE)


def test_votes_and_terms_that_cannot_be_are_errors() -> None:
    with pytest.raises(RankError, match="a reason"):
        Vote(mode="prefill", bucket=4, reason="padding", plan=PLAN)
    with pytest.raises(RankError, match="a reason"):
        Vote(mode="prefill", plan=PLAN)
    with pytest.raises(RankError, match="decoding"):
        Vote(mode="decode", bucket=4, plan=PLAN)
    with pytest.raises(RankError, match="on_late_capture"):
        terms(on_late_capture="never")
    with pytest.raises(RankError, match="votes for prefill has a batch"):
        cast(Voter(plan=PLAN), terms(), "prefill")


# -- The numbers that are sent


LADDERS = [BUCKETS, tuple(range(1, 64)), tuple(range(1, 65)), tuple(range(8, 1600, 8))]


@pytest.mark.parametrize("buckets", LADDERS, ids=len)
def test_a_vote_arrives_as_it_was_sent(buckets: tuple[int, ...]) -> None:
    generator = random.Random(0)
    lengths = set()
    for reason in REASONS:
        for plan in (PLAN, OTHER, "8000000000000000", "7fffffffffffffff"):
            bucket = 0 if reason else generator.choice(buckets)
            lost, failed = (frozenset(generator.sample(buckets, generator.randrange(3))) for _ in range(2))
            sent = Vote(
                mode=generator.choice(["prefill", "idle"]),
                rows=generator.randrange(2**31),
                bucket=bucket,
                reason=reason,
                may_replay_decode=generator.random() < 0.5,
                prefix=generator.randrange(2**31),
                plan=plan,
                uncaptured=lost | {buckets[-1]},
                failed=failed,
            )
            numbers = encode(sent, buckets)
            lengths.add(len(numbers))
            assert decode(numbers.tolist(), buckets) == sent
    assert lengths == {FIELDS + 2 * -(-len(buckets) // 63)}
    assert decode(encode(decoding(), buckets).tolist(), buckets) == decoding()


def test_what_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RankError, match=r"names \[5\], and the ladder of its group is \[4, 16\]"):
        encode(prefill(uncaptured=frozenset({5})), list(BUCKETS))
    with pytest.raises(RankError, match="'padded', which cannot be sent"):
        encode(Vote(mode="prefill", reason="padded"), BUCKETS)
