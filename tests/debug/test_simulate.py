"""``bcg simulate``: the time of a fleet is accounted for to the last bit, and votes go as those of real ranks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bcg_compiler.buckets import Ladder
from bcg_compiler.cli import app
from bcg_compiler.debug.bucket_times import BucketTimes, TimesError, read_times
from bcg_compiler.debug.lengths import sample_lengths
from bcg_compiler.debug.simulate import Fleet, Outcome, draw_batches, simulate
from bcg_compiler.errors import RankError

LADDER = Ladder((4, 16, 64))
TIMES = BucketTimes({4: 10.0, 16: 20.0, 64: 60.0}, eager=100.0, eager_per_token=1.0)
FILE = {"buckets": {"64": 700, "2048": 5200}, "eager_us": 2600, "eager_us_per_token": 2.5}


def shares(outcome: Outcome) -> tuple[float, ...]:
    return tuple(outcome.shares[name] for name in ("alone", "bucket", "vote", "slowest"))


def test_one_rank_replays_what_the_ladder_holds_and_waits_for_nobody() -> None:
    """Padding is that which the ladder itself counts for the same prompts."""
    lengths = sample_lengths()
    ladder = Ladder.from_lengths(lengths, 16, ceiling=2048)
    fleet = Fleet(ranks=1, steps=500)
    times = BucketTimes({2048: 1.0}, eager=5.0, eager_per_token=0.0)
    found = simulate(fleet, lengths, ladder, times)
    drawn = [rows for (rows,) in draw_batches(fleet, lengths)]
    assert len(set(drawn)) > 100 and set(drawn) <= set(lengths)
    waste = ladder.waste(drawn)
    assert found.own == found.same
    assert (found.own.replays, found.own.live, found.own.padded) == (500, waste.live, waste.padded)
    assert found.own.buckets == Counter(ladder.bucket_for(rows) for rows in drawn)
    assert shares(found.own) == (500.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("rows", "own", "same"),
    [
        # Each in its own bucket: the first waits for the second. One bucket: nobody waits, and the first takes longer.
        ([4, 16], (30.0, 0, 0, 10.0), (30.0, 10.0, 0, 0)),
        # 16 is too much padding for 5 rows, so all run eagerly; in one bucket for all the first rank gains by it.
        ([5, 16], (125.0, 0, 96.0, 11.0), (125.0, -85.0, 0, 0)),
        # 65 rows are above the last bucket.
        ([4, 65], (175.0, 0, 94.0, 61.0), (175.0, 0, 94.0, 61.0)),
        # A rank without rows replays in the first bucket, or in the one of all.
        ([0, 16], (20.0, 10.0, 0, 10.0), (20.0, 20.0, 0, 0)),
    ],
)
def test_the_time_of_a_step_is_split_into_what_it_is_for(
    rows: list[int], own: tuple[float, ...], same: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg_compiler.debug.simulate.draw_batches", lambda fleet, lengths: [rows])
    found = simulate(Fleet(ranks=2, steps=1, max_padding_factor=3.0), [1], LADDER, TIMES)
    assert shares(found.own) == own
    assert shares(found.same) == same


def test_shares_add_up_to_the_longest_times_of_the_steps() -> None:
    fleet = Fleet(ranks=7, steps=60, requests=2, idle=0.3, chunk=64, seed=3)
    batches = draw_batches(fleet, range(1, 90))
    assert any(0 in step for step in batches) and max(max(step) for step in batches) == 64
    found = simulate(fleet, range(1, 90), LADDER, TIMES)
    for outcome in (found.own, found.same):
        assert outcome.batches == sum(rows > 0 for step in batches for rows in step)
        assert 0 < outcome.replays < outcome.batches
        assert sum(outcome.reasons.values()) + outcome.buckets.total() / 7 == 60
        assert outcome.shares["slowest"] >= 0
    longest = 0.0
    for step in batches:
        most = max(step)
        bucket = LADDER.bucket_for(most)
        assert bucket is not None
        eager = bucket > 2 * most and bucket != 4
        longest += TIMES.run_eagerly(most) if eager else TIMES.replay(bucket)
    assert found.same.time == pytest.approx(7 * longest, rel=1e-12)


def test_chunks_leave_the_rest_for_later_steps() -> None:
    assert draw_batches(Fleet(ranks=2, steps=4, chunk=4), [10]) == [[4, 4], [4, 4], [2, 2], [4, 4]]


def test_an_idle_rank_stops_all_where_the_graph_takes_no_empty_batch() -> None:
    fleet = Fleet(ranks=20, steps=50, idle=0.5)
    found = simulate(fleet, [4], LADDER, TIMES)
    assert not found.own.reasons and not found.same.reasons
    found = simulate(Fleet(ranks=20, steps=50, idle=0.5, tolerates_idle=False), [4], LADDER, TIMES)
    assert found.own.reasons == found.same.reasons == {"few_rows": 50}


def test_times_between_measured_buckets_are_on_a_line() -> None:
    assert [TIMES.replay(bucket) for bucket in (1, 4, 10, 16, 28, 64)] == [10, 10, 15, 20, 30, 60]
    with pytest.raises(TimesError, match="Bucket 65 is above 64"):
        TIMES.replay(65)
    assert (TIMES.run_eagerly(0), TIMES.run_eagerly(7)) == (0, 107)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds \\[1\\]; give"),
        ('{"bucket": {}}', "Did you mean 'buckets'"),
        (json.dumps({**FILE, "buckets": {}}), "one bucket at least"),
        (json.dumps({**FILE, "buckets": {"x": 1}}), "'x' in .* is not a bucket"),
        (json.dumps({**FILE, "buckets": {"0": 1}}), "'0' in .* is not a bucket"),
        (json.dumps({**FILE, "buckets": {"8": "1"}}), "The time of bucket 8 in .* is '1'"),
        (json.dumps({**FILE, "eager_us": -1}), "eager_us in .* is -1"),
        (json.dumps({**FILE, "eager_us_per_token": float("nan")}), "eager_us_per_token in .* is nan"),
    ],
)
def test_a_file_of_times_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(TimesError, match=said):
        read_times(path)


def test_no_file_and_no_fleet_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TimesError, match="Cannot read the times"):
        read_times(tmp_path / "none.json")
    with pytest.raises(RankError, match="ranks is 0"):
        Fleet(ranks=0)
    with pytest.raises(RankError, match=r"idle is 1\.0"):
        Fleet(ranks=1, idle=1.0)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("times.json").write_text(json.dumps(FILE))
    return lambda *words: CliRunner().invoke(app, ["simulate", "--times", "times.json", *words])


def test_simulate_prints_both_kinds_of_buckets_and_draws(call: Any) -> None:
    result = call("--dp", "4", "--ladder", "from-lengths:8:2048", "--steps", "20", "--plot", "fleet.png")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "own buckets one bucket for all" in lines
    assert any(line.startswith("batches that replay 100.00% 100.00%") for line in lines)
    assert any(line.startswith("lost to the slowest rank") for line in lines)
    assert lines[-1] == "wrote fleet.png" and Path("fleet.png").read_bytes().startswith(b"\x89PNG")
    assert call("--dp", "4", "--ladder", "from-lengths:8:2048", "--steps", "20").stdout in result.stdout


def test_simulate_says_what_is_wrong(call: Any) -> None:
    result = call("--dp", "4", "--ladder", "default:4096")
    assert result.exit_code == 2 and "is above 2048, the largest that was measured" in result.stderr
    result = call("--dp", "0")
    assert result.exit_code == 2 and "ranks is 0" in result.stderr
