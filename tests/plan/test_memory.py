"""The memory that a plan forecasts: against what torch says of a run, and rule by rule."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

import bcg_compiler as bcg
from bcg_compiler.facts import TensorSpec, collect_facts
from bcg_compiler.lower import Lowered, lower
from bcg_compiler.options import Options
from bcg_compiler.passes import run_passes
from bcg_compiler.plan import Plan, build_plan, plan_from_json, plan_hash, plan_to_json
from bcg_compiler.plan.allocator import MIB, Event
from bcg_compiler.plan.memory import (
    Forecast,
    Interval,
    assign,
    forecast,
    forecast_ladder,
    segment_events,
    step_events,
    tensor_bytes,
)
from bcg_compiler.plan.plan import Allocation, LiveRange
from bcg_compiler.runtime import programs_of

# One sequence of examples for everybody and always: whether a test fails must not depend on chance or on the clock.
thorough = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


def plan_of(fn: Callable[..., Any], *args: Any, again: tuple[Any, ...] = (), **options: Any) -> Plan:
    """The plan of ``fn(*args)``; that of the recompile for ``again`` if given."""
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options={"min_segment_kernels": 1, **options})
    compiled(*args)
    if again:
        compiled(*again)
    plan = programs_of(compiled)[-1].plan
    assert plan is not None
    return plan


def x(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 4))


def peak_of(events: Iterable[Event]) -> tuple[int, int]:
    """The most bytes that are live at a time, and those that are in the end."""
    live: dict[int, int] = {}
    most = 0
    for storage, size in events:
        if size is None:
            del live[storage]
        else:
            assert storage not in live
            live[storage] = size
            most = max(most, sum(live.values()))
    return most, sum(live.values())


# -- against torch's own count -----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(0, 1) for part in self.qkv(hidden).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).mul_(0.25).softmax(-1, dtype=torch.float64).to(hidden.dtype)
        return hidden + self.out(F.dropout((scores @ v).transpose(0, 1).flatten(1), 0.1, self.training))


def norm(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (64,)) * 2


def views_and_writes(hidden: Tensor) -> tuple[Tensor, Tensor]:
    first = (hidden + 1).relu_().view(-1)
    rest = first[64:].clone().mul_(2)
    values, places = hidden.topk(5)
    return rest.cumsum(0)[3:], values.masked_fill(places > 3, 0)


def traced_peak(run: Callable[..., Any], args: list[Any]) -> tuple[int, int]:
    """What torch's profiler counts on the CPU while ``run(*args)`` runs: the most bytes at a time, and those left."""
    run(*args)  # what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run(*args)
    now = most = 0
    assert profiled.profiler is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del result
    return most, now


def only_segment(fn: Callable[..., Any], *calls: Tensor) -> tuple[Plan, Callable[..., Any], list[Any]]:
    """The plan of the graph of the last call, which is one segment; its function and the arguments for it."""
    made: list[tuple[Plan, Lowered]] = []
    given: list[tuple[Any, ...]] = []

    def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = collect_facts(module, example_inputs)
        plan = build_plan(graph, run_passes(graph, Options()), Options(min_segment_kernels=1))
        lowered = lower(graph, plan)
        made.append((plan, lowered))

        def run(*args: Any) -> Any:
            given.append(args)
            return lowered.run(*args)

        return run

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for call in calls:
        compiled(call)
    plan, lowered = made[-1]
    (step,) = plan.steps
    values = dict(zip(plan.inputs, given[-1], strict=True))
    return plan, lowered.segments[0], [values[ordinal] for ordinal in step.inputs]


@pytest.mark.parametrize("fn", [Mlp().eval(), Attention().eval(), norm, views_and_writes])
def test_the_peak_of_a_segment_is_what_torch_counts(fn: Callable[..., Any]) -> None:
    """Of a graph with an open number of rows, at the number of the last call. Within 1%: CPU scalars are no tensors."""
    plan, run, args = only_segment(fn, torch.randn(96, 64), torch.randn(80, 64))
    peak, left = peak_of(step_events(plan.steps[0], {"s0": 80}))
    traced, traced_left = traced_peak(run, args)
    assert peak == pytest.approx(traced, rel=0.01)
    assert left == traced_left


# -- what a plan knows -------------------------------------------------------------------------------------------------


def test_a_storage_dies_with_the_last_value_over_it() -> None:
    def fn(x: Tensor) -> Tensor:
        a = x + 1
        view = a.view(-1)
        b = a * 2  # the last use of a, but not of its storage
        c = view + 3
        return (b, c.softmax(-1, dtype=torch.float64))[1] + b.sum()

    (step,) = plan_of(fn, x()).steps
    ops = [node.op for node in step.nodes]
    assert ops == ["add", ".view", "mul", "add", ".softmax", ".sum", "add"]
    assert step.allocations == (
        Allocation("64", born=0, dies=3),
        Allocation("64", born=2, dies=5),
        Allocation("64", born=3, dies=4),
        Allocation("128", born=4, dies=4, lasts=1),
        Allocation("128", born=4, dies=6),
        Allocation("4", born=5, dies=6),
        Allocation("128", born=6),
    )


def test_a_segments_output_is_freed_after_its_last_reader() -> None:
    """But not while a view of it is needed, and never if a break read it or it is returned."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        given, passed, viewed, returned = x + 1, x + 2, x + 3, x + 4
        first = cosine(given) * passed * viewed
        view = viewed.view(-1)
        return cosine(first) * view.view(4, 4), returned

    plan = plan_of(fn, x())
    assert [step.kind for step in plan.steps] == ["segment", "break", "segment", "break", "segment"]
    assert [(a.dies, a.freed) for a in plan.steps[0].allocations] == [(None, None), (None, 2), (None, 4), (None, None)]


def test_only_what_lies_on_the_graphs_device_counts() -> None:
    graphs = []

    def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(collect_facts(module, example_inputs))
        return module.forward

    torch.compile(lambda x, y: (x + 1, y + 2), backend=backend)(torch.ones(2, 8, device="meta"), x(5, 5))
    plan = build_plan(graphs[0], run_passes(graphs[0], Options()), Options(min_segment_kernels=1))
    assert plan.device == "meta"
    assert [a.bytes for step in plan.steps for a in step.allocations] == ["64"]


def test_in_the_end_everything_is_free() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(3):
            x = cosine(x * 2 + 1) + x
        return x

    peak, left = peak_of(segment_events(plan_of(fn, x()), {}))
    assert peak > 64 and left == 0


RANGES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, int]]] = {
    "read by the next segment": (lambda b: b + 1, (1, 2)),
    "read by the last segment": (lambda b: cosine(b.new_ones(4, 4) + 1) + b, (1, 4)),
    "read through a view": (lambda b: (cosine(b + 1) + b.view(-1).view(4, 4)) * cosine(b + 2), (1, 4)),
    "read by a break": (lambda b: cosine(cosine(b + 1) + cosine(b)) * 2, (1, 6)),
    "returned": (lambda b: (cosine(b + 1) * 2, b), (1, 4)),
    "written": (lambda b: cosine(b.add_(1) * 2) * 2, (1, 4)),
    "not needed after the next segment": (lambda b: cosine(b + 1) * 2, (1, 2)),
}


@pytest.mark.parametrize(("after", "expected"), RANGES.values(), ids=RANGES.keys())
def test_the_live_range_of_a_bridge(after: Callable[[Tensor], Any], expected: tuple[int, int]) -> None:
    plan = plan_of(lambda x: after(cosine(x + 1)), x())
    first = plan.bridge_ranges[0]
    assert (first.first, first.last) == expected
    assert tuple(kept.ordinal for kept in plan.bridge_ranges) == plan.bridges


def test_bridges_share_memory_though_their_breaks_share_a_cache() -> None:
    """A break's result may be any of its arguments: that of a cache that all breaks take must not join all bridges."""
    cache = torch.zeros(4, 4)

    def fn(x: Tensor, cache: Tensor) -> Tensor:
        for _ in range(4):
            x = attend(x * 2, cache) + 1
        return x

    plan = plan_of(fn, x(), cache)
    assert [(kept.first, kept.last) for kept in plan.bridge_ranges] == [(1, 2), (3, 4), (5, 6), (7, 8)]
    # Three of them one after the other, and that of the last step, which has a buffer of its own.
    assert forecast(plan, {}).bridges == 512 + x().nbytes


@bcg.eager_break(mutates_args=("cache",), fake=lambda x, cache: torch.empty_like(x))
def attend(x: Tensor, cache: Tensor) -> Tensor:
    cache.copy_(x)
    return x + cache


def test_text_and_hash_do_not_know_of_memory_and_json_does() -> None:
    plan = plan_of(lambda x: cosine(x + 1) * 2, x(), again=(x(5, 4),))
    assert plan.bridge_ranges and all(step.allocations for step in plan.steps)
    bare = replace(plan, bridge_ranges=(), steps=tuple(replace(step, allocations=()) for step in plan.steps))
    assert plan_hash(bare) == plan_hash(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan_from_json(plan_to_json(plan)).bridge_ranges == (LiveRange(plan.bridges[0], 1, 2),)


# -- forecasts ---------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    return cosine(x * 2) + x


def test_the_forecast_of_a_small_plan() -> None:
    """Rows of 4 KiB: a slot and a bridge of the same size; the segments hold two such values at once, of 3 MiB."""
    plan = plan_of(wide, x(8, 1024), again=(x(9, 1024),))
    made = forecast(plan, {"s0": 768})
    assert made == Forecast(slots=3 * MIB, bridges=3 * MIB, segments=20 * MIB)
    assert made.total == 26 * MIB
    assert forecast(plan, {"s0": 8}) == Forecast(slots=32 * 1024, bridges=32 * 1024, segments=2 * MIB)


def test_a_forecast_needs_all_symbols() -> None:
    with pytest.raises(KeyError, match="s0"):
        forecast(plan_of(wide, x(8, 1024), again=(x(9, 1024),)), {"rows": 8})


def test_smaller_buckets_of_a_ladder_use_the_memory_of_the_largest() -> None:
    plan = plan_of(wide, x(8, 1024), again=(x(9, 1024),))
    largest = forecast(plan, {"s0": 2048})
    assert forecast_ladder(plan, [{"s0": rows} for rows in (2048, 1024, 512)]) == largest
    assert forecast_ladder(plan, [{"s0": rows} for rows in (512, 1024, 2048)]).segments >= largest.segments
    # What is at most 1 MiB comes from segments of its own.
    assert forecast_ladder(plan, [{"s0": 2048}, {"s0": 64}]).segments == largest.segments + 2 * MIB
    assert forecast_ladder(plan, []) == Forecast(0, 0, 0)


@pytest.mark.parametrize(
    ("spec", "symbols", "expected"),
    [
        (TensorSpec("float32", ("s0", "4"), ("4", "1"), "cpu"), {"s0": 3}, 48),
        (TensorSpec("bfloat16", ("2", "3"), ("8", "1"), "cpu"), {}, 22),
        (TensorSpec("int64", ("0", "4"), ("4", "1"), "cpu"), {}, 0),
        (TensorSpec("bool", (), (), "cpu"), {}, 1),
        (TensorSpec("float32", ("5", "4"), ("0", "1"), "cpu"), {}, 16),
        (TensorSpec("float32", ("4", "4"), (), "cpu"), {}, 0),
    ],
    ids=["symbolic", "padded rows", "empty", "scalar", "expanded", "sparse"],
)
def test_the_bytes_of_a_buffer(spec: TensorSpec, symbols: Mapping[str, int], expected: int) -> None:
    assert tensor_bytes(spec, symbols) == expected


# -- the arena of bridges ----------------------------------------------------------------------------------------------


intervals = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6)), max_size=15).map(
    lambda found: [Interval(i, size, first, first + more) for i, (size, first, more) in enumerate(found)]
)


@thorough
@given(intervals)
def test_values_that_are_needed_at_once_share_no_byte(made: list[Interval]) -> None:
    offsets, total = assign(made)
    assert offsets.keys() == {interval.ordinal for interval in made}
    for i, a in enumerate(made):
        assert offsets[a.ordinal] % 512 == 0 and offsets[a.ordinal] + a.bytes <= total
        for b in made[:i]:
            if a.first <= b.last and b.first <= a.last and a.bytes and b.bytes:
                start, other = offsets[a.ordinal], offsets[b.ordinal]
                assert start + a.bytes <= other or other + b.bytes <= start


@thorough
@given(intervals)
def test_the_arena_holds_the_peak_and_no_more_than_all(made: list[Interval]) -> None:
    _, total = assign(made)
    peak = max((sum(i.bytes for i in made if i.first <= step <= i.last) for step in range(20)), default=0)
    assert peak <= total <= sum((i.bytes + 511) // 512 * 512 for i in made)


@thorough
@given(intervals, st.randoms(use_true_random=False))
def test_the_arena_does_not_depend_on_the_order(made: list[Interval], random: Any) -> None:
    shuffled = random.sample(made, len(made))
    assert assign(shuffled) == assign(made)


def test_values_one_after_the_other_share_their_memory() -> None:
    chain = [Interval(step, 1024, step, step) for step in range(10)]
    assert assign(chain) == (dict.fromkeys(range(10), 0), 1024)
    assert assign([Interval(0, 512, 0, 3), Interval(1, 1024, 1, 1), Interval(2, 1000, 2, 2)])[1] == 1536
    assert assign([]) == ({}, 0)
