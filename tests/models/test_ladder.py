"""Architectures that nobody here wrote, padded to a ladder over prompt lengths of real traffic."""

from itertools import cycle, islice

import pytest

import bcg_compiler as bcg
from bcg_compiler.debug.lengths import sample_lengths
from bcg_compiler.debug.run import RunReport, compare_with_eager
from bcg_compiler.models import zoo

pytest.importorskip("transformers")

BUCKETS = 16


def run(name: str, calls: int, **options: bool) -> RunReport:
    bcg.reset()
    lengths = list(islice(cycle(sample_lengths()), calls))
    ladder = bcg.Ladder.from_lengths(lengths, BUCKETS)
    return compare_with_eager(zoo.build(name), lengths, options={"ladder": ladder, **options}, timed=False)


def check_that_all_replay(report: RunReport, calls: int, proof: str) -> None:
    assert report.equal, report.mismatches[:3]
    (ran,) = report.ran
    assert ran.plan is not None and ran.plan.padding is not None and ran.plan.padding.proof == proof
    assert ran.captures <= BUCKETS
    assert set(ran.eager_runs) <= {"warm_up", "padding"} and ran.eager_runs["warm_up"] == 1
    assert ran.replays == calls - sum(ran.eager_runs.values())
    assert 0 < report.padded < 0.1 * report.live


@pytest.mark.parametrize("calls", [24, pytest.param(500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_causal_model_replays_every_length_in_a_few_buckets(name: str, calls: int) -> None:
    check_that_all_replay(run(name, calls), calls, "causal")


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("mixtral", "sort"),
        pytest.param("deepseek_v32", ".topk", marks=pytest.mark.nightly),
        pytest.param("glm_moe_dsa", ".topk", marks=pytest.mark.nightly),
    ],
)
def test_a_model_that_mixes_rows_is_captured_in_exact_shapes_and_names_the_node(name: str, op: str) -> None:
    report = run(name, 3)
    assert report.equal and report.largest == 0
    (ran,) = report.ran
    assert ran.plan is not None and ran.plan.padding is None and ran.plan.unpadded is not None
    assert ran.plan.unpadded.code == "mixing_rows" and op in ran.plan.unpadded.text
    (rows,) = ran.plan.rows
    assert (rows.op, rows.source is not None) == (op, True)
    assert set(ran.eager_runs) == {"warm_up"}


@pytest.mark.parametrize("calls", [24, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("deepseek_v3", "gpt_oss"))]
)
def test_what_is_assumed_of_experts_holds(name: str, calls: int) -> None:
    """Which expert a live token goes to is its own affair: the sort only brings tokens of one expert together."""
    check_that_all_replay(run(name, calls, assume_rows_independent=True), calls, "assumed")
