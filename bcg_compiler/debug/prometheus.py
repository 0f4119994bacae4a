"""Counters of this process in the text format of Prometheus (version 0.0.4), for a server's own endpoint."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bcg_compiler.runtime import Stats, stats

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

#: (name, type, help, label, what it is of the numbers of a model: one number, or one for each value of the label)
_METRICS: tuple[tuple[str, str, str, str, Callable[[Stats], Any]], ...] = (
    ("bcg_graphs", "gauge", "Programs that have run.", "", lambda s: s.graphs),
    ("bcg_segments", "gauge", "Segments of their plans.", "", lambda s: s.segments),
    ("bcg_breaks", "gauge", "Breaks of their plans.", "", lambda s: s.breaks),
    ("bcg_break_operations", "gauge", "Operations outside of segments.", "reason", lambda s: s.reasons),
    ("bcg_eager_units", "gauge", "Units of segments that are not compiled.", "reason", lambda s: s.eager_units),
    ("bcg_forecast_bytes", "gauge", "What captures were forecast to hold.", "", lambda s: s.forecast_bytes),
    ("bcg_measured_bytes", "gauge", "What captures, slots and bridges hold.", "", lambda s: s.measured_bytes),
    ("bcg_captures_total", "counter", "Captures of whole programs.", "", lambda s: s.captures),
    ("bcg_recaptures_total", "counter", "Captures at other addresses.", "", lambda s: s.recaptures),
    ("bcg_replays_total", "counter", "Replays of whole programs.", "", lambda s: s.replays),
    ("bcg_bucket_replays_total", "counter", "Replays in a bucket.", "bucket", lambda s: s.bucket_replays),
    ("bcg_live_rows_total", "counter", "Rows of replays in buckets.", "", lambda s: s.live_rows),
    ("bcg_padded_rows_total", "counter", "Rows that buckets added to them.", "", lambda s: s.padded_rows),
    ("bcg_eager_runs_total", "counter", "Runs without replay.", "reason", lambda s: s.eager_runs),
)

#: The same of what Dynamo counts, which is for the whole process in the numbers of each model.
_OF_PROCESS: tuple[tuple[str, str, str, Callable[[Stats], int]], ...] = (
    (
        "bcg_dynamo_graph_breaks_total",
        "counter",
        "Graph breaks of Dynamo.",
        lambda s: sum(s.dynamo_graph_breaks.values()),
    ),
    (
        "bcg_dynamo_recompile_limit_hits_total",
        "counter",
        "Functions that Dynamo gave up, and runs uncompiled.",
        lambda s: s.recompile_limit_hits,
    ),
)


def prometheus(models: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """What ``bcg.stats`` counts, as a page that Prometheus scrapes: ``text/plain; version=0.0.4``.

    ``models`` are compiled callables by what the label ``model`` is to say; without it there is no such label, and the
    numbers are those of the whole process. A counter goes back when its programs are freed, as after a restart.

    Raises ``TypeError`` for a model that is not compiled.
    """
    if models is None:
        by_labels = {"": stats()}
    else:
        by_labels = {f'model="{name.translate(_ESCAPES)}"': stats(model) for name, model in models.items()}
    lines: list[str] = []
    for name, kind, text, label, of in _METRICS:
        samples = [line for labels, found in by_labels.items() for line in _samples(name, labels, label, of(found))]
        lines += _family(name, kind, text, samples)
    process = next(iter(by_labels.values()), None) or stats()
    for name, kind, text, count in _OF_PROCESS:
        lines += _family(name, kind, text, [f"{name} {count(process)}"])
    return "\n".join([*lines, ""])


def _family(name: str, kind: str, text: str, samples: Sequence[str]) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]


def _samples(name: str, labels: str, label: str, value: Any) -> list[str]:
    if not label:
        return [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"]
    own = f"{labels}," if labels else ""
    return [f'{name}{{{own}{label}="{str(key).translate(_ESCAPES)}"}} {count}' for key, count in value.items()]
