"""The page for Prometheus: its own client reads it, and its numbers are those of ``bcg.stats``."""

from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.plan.memory import forecast_ladder as forecast
from bcg_compiler.runtime import program

parser = pytest.importorskip("prometheus_client.parser")

OPTIONS: dict[str, Any] = {"capture": "emulated", "min_segment_kernels": 1}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> None:
    """Each test begins anew."""


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True, writes_every_row=True)
def middle(x: Tensor) -> Tensor:
    return x * 2


def padded(x: Tensor) -> Tensor:
    return middle(x + 1) * 2


def exact(x: Tensor) -> Tensor:
    return x.sin() + 1


def run(fn: Any, rows: tuple[int, ...], **options: Any) -> Any:
    compiled = torch.compile(fn, backend="bcg", options={**OPTIONS, **options})
    for count in rows:
        x = torch.ones(count, 2)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
    return compiled


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus would store of a page. The parser raises on what it cannot read; names come once each."""
    families = list(parser.text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert family.documentation and family.type in ("counter", "gauge")
        assert all(s.name == family.name + "_total" for s in family.samples if family.type == "counter")
    found = [((s.name, frozenset(s.labels.items())), s.value) for family in families for s in family.samples]
    assert len(dict(found)) == len(found), "a series comes twice"
    return dict(found)


def test_numbers_are_those_of_stats_by_model() -> None:
    one, other = run(padded, (3, 7, 4, 9), ladder=[4, 8]), run(exact, (3, 3, 5, 5))
    seen = bcg.stats(one)
    assert (seen.replays, seen.bucket_replays, seen.live_rows, seen.padded_rows) == (2, {4: 1, 8: 1}, 11, 1)
    found = samples(bcg.prometheus({"prefill": one, "other": other}))

    def of(name: str, model: str, **labels: str) -> float:
        return found[name, frozenset({"model": model, **labels}.items())]

    assert of("bcg_replays_total", "prefill") == 2 and of("bcg_replays_total", "other") == bcg.stats(other).replays
    assert of("bcg_bucket_replays_total", "prefill", bucket="8") == 1
    assert of("bcg_live_rows_total", "prefill") == 11 and of("bcg_padded_rows_total", "prefill") == 1
    assert of("bcg_eager_runs_total", "prefill", reason="too_long") == 1
    assert of("bcg_eager_runs_total", "prefill", reason="warm_up") == 1
    assert of("bcg_break_operations", "prefill", reason="eager_break") == 1
    assert of("bcg_measured_bytes", "prefill") == seen.measured_bytes
    assert of("bcg_captures_total", "other") == bcg.stats(other).captures
    assert found["bcg_dynamo_graph_breaks_total", frozenset()] == sum(seen.dynamo_graph_breaks.values())


def test_without_models_the_numbers_are_those_of_the_process() -> None:
    run(padded, (3, 3), ladder=[4, 8])
    run(exact, (3, 3, 3))
    found = samples(bcg.prometheus())
    whole = bcg.stats()
    assert found["bcg_replays_total", frozenset()] == whole.replays > 0
    assert found["bcg_graphs", frozenset()] == whole.graphs == 2
    assert found["bcg_eager_runs_total", frozenset({("reason", "warm_up")})] == whole.eager_runs["warm_up"]


def test_labels_are_escaped() -> None:
    name = 'a "quoted" \\ path\nand a line'
    found = samples(bcg.prometheus({name: run(exact, (3,))}))
    assert found["bcg_graphs", frozenset({("model", name)})] == 1


def test_a_process_without_programs_has_a_page() -> None:
    found = samples(bcg.prometheus())
    assert found["bcg_replays_total", frozenset()] == 0


def test_what_is_not_compiled_is_refused() -> None:
    with pytest.raises(TypeError, match="not a compiled"):
        bcg.prometheus({"model": torch.ones(3)})  # type: ignore[dict-item]


def test_a_forecast_is_made_once_for_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a deep model with many buckets it takes a second, in which a server serves nothing."""
    compiled = run(padded, (3, 3), ladder=[4, 8])
    made: list[int] = []

    def seen(plan: Any, rungs: Any) -> Any:
        made.append(len(rungs))
        return forecast(plan, rungs)

    monkeypatch.setattr(program, "forecast_ladder", seen)
    first = bcg.stats(compiled).forecast_bytes
    bcg.prometheus({"model": compiled})
    assert made == [1]
    x = torch.ones(7, 2)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x)
    assert bcg.stats(compiled).forecast_bytes > first and made == [1, 2]
