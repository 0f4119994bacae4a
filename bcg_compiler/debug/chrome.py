"""A timeline in Chrome's trace format, which Perfetto reads.

The format is described in "Trace Event Format" by Google: complete events (``ph`` is ``X``) with begin and duration in
microseconds, and metadata that names the tracks.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from bcg_compiler.debug.probe import label, replay_name
from bcg_compiler.debug.steps import Replay, Span, StepTime
from bcg_compiler.plan import Plan

#: Gaps of fewer microseconds are not shown: marks and events take about as long.
LEAST_GAP = 1.0

_PROCESS = 1


def chrome_json(replays: Sequence[Replay], spans: Sequence[Span]) -> str:
    """The text of a trace file: a track for each thread of the host, and one for each device."""
    threads = sorted({r.thread for r in replays} | {s.thread for s in spans})
    devices = sorted({replay.plan.device for replay in replays if replay.device_start_us is not None})
    names = ["host" if len(threads) == 1 else f"host, thread {thread}" for thread in threads]
    names += [f"device {device}" for device in devices]
    tracks: dict[object, int] = {owner: number for number, owner in enumerate([*threads, *devices], start=1)}
    events: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": "bcg_compiler"})]
    for number, name in enumerate(names, start=1):
        events.append(_metadata("thread_name", number, {"name": name}))
        events.append(_metadata("thread_sort_index", number, {"sort_index": number}))
    for span in spans:
        events.append(_slice(span.name, span.kind, tracks[span.thread], span.start_us, span.host_us))
    for replay in replays:
        events += _on_host(replay, tracks[replay.thread])
    for thread in threads:
        events += _host_gaps(thread, tracks[thread], replays, spans)
    for device in devices:
        events += _on_device([r for r in replays if r.plan.device == device], tracks[device])
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _on_host(replay: Replay, track: int) -> Iterator[dict[str, Any]]:
    name = replay_name(replay.graph, replay.rows)
    yield _slice(name, "replay", track, replay.start_us, replay.host_us)
    for step in replay.steps:
        yield _slice(
            label(step.kind, step.index, step.name),
            step.kind,
            track,
            replay.start_us + step.start_us,
            step.host_us,
            _about(step, replay.plan),
        )


def _host_gaps(thread: int, track: int, replays: Sequence[Replay], spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """What a call spends outside of replays, eager runs and captures: guards, and Python between graphs."""
    inside = [(r.start_us, r.start_us + r.host_us) for r in replays if r.thread == thread]
    inside += [(s.start_us, s.start_us + s.host_us) for s in spans if s.thread == thread and s.kind != "call"]
    inside.sort()
    for call in (s for s in spans if s.thread == thread and s.kind == "call"):
        at, end = call.start_us, call.start_us + call.host_us
        for start, stop in [*((a, b) for a, b in inside if at <= a and b <= end), (end, end)]:
            if start - at >= LEAST_GAP:
                yield _slice("gap", "gap", track, at, start - at)
            at = max(at, stop)


def _on_device(replays: Sequence[Replay], track: int) -> Iterator[dict[str, Any]]:
    """The parts as the device ran them; where it had nothing to do, a gap."""
    last: float | None = None
    for replay in sorted(replays, key=lambda found: found.device_start_us or 0.0):
        assert replay.device_start_us is not None
        at = max(replay.device_start_us, last or 0.0)  # each is rounded by itself
        if last is not None and at - last >= LEAST_GAP:
            yield _slice("gap", "gap", track, last, at - last)
        waits = {position: (start, end) for position, start, end in replay.waits() if end - start >= LEAST_GAP}
        for position, step in enumerate(replay.steps):
            end = at + (step.device_us or 0.0)
            if position in waits:
                start, at = waits[position]
                yield _slice("gap", "gap", track, start, at - start)
            yield _slice(
                label(step.kind, step.index, step.name), step.kind, track, at, end - at, _about(step, replay.plan)
            )
            at = end
        last = at


def _about(step: StepTime, plan: Plan) -> dict[str, Any]:
    """What Perfetto shows of a selected slice: why it is one, and from which line it comes."""
    if step.kind not in ("segment", "break"):
        return {}
    planned = plan.steps[step.index]
    source = planned.reasons[0].source if planned.reasons else planned.nodes[0].source
    found = {"operations": len(planned.nodes), "kernels": planned.kernels, "line": str(source) if source else ""}
    if planned.unit:
        found["unit"] = planned.unit
    if planned.kind == "break":
        found["reason"] = "; ".join(dict.fromkeys(f"{r.code}: {r.text}" for r in planned.reasons))
    return found


def _slice(
    name: str, kind: str, track: int, start: float, length: float, about: dict[str, Any] | None = None
) -> dict[str, Any]:
    event = {"name": name, "cat": kind, "ph": "X", "ts": round(start, 3), "dur": round(length, 3)}
    return {**event, "pid": _PROCESS, "tid": track, "args": about or {}}


def _metadata(name: str, track: int, about: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": track, "args": about}
