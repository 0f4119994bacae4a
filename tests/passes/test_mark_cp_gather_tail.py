"""The gather at the end of a context-parallel graph, and what follows from it, is one eager step on the whole batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.buckets import Admission
from bcg_compiler.distributed import Zigzag
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.models.layers.batch import PrefillBatch, live_batch
from bcg_compiler.models.layers.gather_tail import gather_rows
from bcg_compiler.passes.mark_cp_gather_tail import mark_cp_gather_tail

GraphOf = Callable[..., AnnotatedGraph]

LAYOUT = Zigzag(2)
LADDER = [4, 8, 16]


@dataclass
class Peers:
    """The other rank is not there: it gives what the first ``all_gather`` of this one would have got of it, and so on.

    ``rows`` are those of the whole batch, one tensor for each gather of a call.
    """

    rank: int
    lengths: tuple[int, ...]
    rows: list[Tensor]
    size: int = 2

    def all_gather(self, rows: Tensor, longest: int) -> Tensor:
        whole = self.rows.pop(0)
        found = rows.new_full((self.size, longest, *rows.shape[1:]), torch.nan)
        theirs = LAYOUT.split(whole, self.lengths, 1 - self.rank)
        found[self.rank, : len(rows)], found[1 - self.rank, : len(theirs)] = rows, theirs
        return found


def batch_of(*lengths: int) -> PrefillBatch:
    return PrefillBatch.of(lengths, [[i] for i in range(len(lengths))], page_size=64, pages=8)


def published(local: PrefillBatch) -> AbstractContextManager[None]:
    bucket = next(bucket for bucket in LADDER if bucket >= local.tokens)
    return bcg.forward_context(prefill=local, admission=Admission(bucket, "", "", local.tokens))


def compare(fn: Callable[[Tensor], Any], gathered: Callable[[Tensor], list[Tensor]], **options: Any) -> bcg.Plan:
    """The plan of ``fn``, once each rank has given what one process gives, bit for bit, in three buckets.

    ``gathered``: of the rows of a whole batch, what ``fn`` gathers. Results of ``fn`` are those of its tail.
    """
    options = {"capture": "emulated", "ladder": LADDER, "segment_compiler": "eager", **options}
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options=options)
    for lengths in ((9, 2), (20,), (5, 1, 6), (4, 3), (6, 5, 7)):
        whole = batch_of(*lengths)
        x = torch.randn(whole.tokens, 8)
        with bcg.forward_context(prefill=whole):
            wanted = fn(x)
        for rank in range(2):
            peers = Peers(rank, lengths, gathered(x))
            local = whole.context_parallel(LAYOUT, peers)
            assert local.share is not None
            given = local.share.split(x)
            torch._dynamo.mark_dynamic(given, 0)
            with published(local):
                found = compiled(given)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
            assert not peers.rows, "it gathers once a call"
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and program.replays == 9
    return program.plan


def assert_is_body_and_tail(plan: bcg.Plan) -> None:
    """One eager step, at the end, and nothing else of that kind."""
    assert plan.padding is not None and plan.steps[-2].kind == "segment"
    tails = [step for step in plan.steps if "cp_gather_tail" in {reason.code for reason in step.reasons}]
    assert tails == [plan.steps[-1]]
    (found,) = (p for p in plan.passes if p.name == "mark_cp_gather_tail")
    assert found.changes and not found.notes


class Model(nn.Module):
    """A tail of what a graph could not hold for its size, and of what it could: sums over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def hidden(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = gather_rows(self.hidden(x))
        logits = self.head(rows)
        return logits, logits.argmax(-1), (logits.softmax(-1).sum(0) * 2).cos(), rows


def test_the_body_replays_and_the_tail_is_of_the_whole_batch() -> None:
    model = Model()
    plan = compare(model, lambda x: [model.hidden(x)])
    assert_is_body_and_tail(plan)
    assert [step.kind for step in plan.steps] == ["segment", "break"]
    assert set(plan.reasons()) == {"cp_gather_tail"}
    assert {"linear", ".argmax", ".sum", ".cos"} <= {node.op for node in plan.steps[-1].nodes}
    assert plan.padding is not None and plan.padding.proof == "row_wise"


def test_without_the_pass_what_has_a_fixed_size_is_captured_behind_the_gather() -> None:
    model = Model()
    off = dict(disable_passes=["mark_cp_gather_tail"], min_segment_kernels=1)
    plan = compare(model, lambda x: [model.hidden(x)], **off)
    assert [step.kind for step in plan.steps] == ["segment", "break", "segment"]
    assert set(plan.reasons()) > {"cp_gather_tail", "dynamic_output"}


def test_all_buckets_are_captured_ahead() -> None:
    model = Model()
    options = {"capture": "emulated", "ladder": LADDER}
    compiled = torch.compile(model, backend="bcg", fullgraph=True, options=options)
    for step, lengths in enumerate([(9, 2), (20,), (5, 1, 6)]):
        x = torch.randn(sum(lengths), 8)
        local = batch_of(*lengths).context_parallel(LAYOUT, Peers(1, lengths, [model.hidden(x)]))
        assert local.share is not None
        given = local.share.split(x)
        torch._dynamo.mark_dynamic(given, 0)
        with published(local):
            found = compiled(given)
        assert torch.equal(found[0], model.head(model.hidden(x)))
        if not step:
            assert [rung.error for rung in bcg.capture(compiled, progress=False).rungs] == [""] * len(LADDER)
    assert bcg.stats(compiled).eager_runs == {"warm_up": 1} and bcg.stats(compiled).replays == 2


def test_several_gathers_have_one_tail_and_what_the_later_ones_need_goes_before() -> None:
    """The auxiliary hidden states of a model; of one of them the tail has several users."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        hidden = (x.sin() + 1).exp()
        rows = gather_rows(hidden * 2)
        rest = gather_rows(torch.cat([x.cos(), x + 3], -1) + 1)
        return rows + rows.sum(), rows - 1, rest

    def gathered(x: Tensor) -> list[Tensor]:
        return [(x.sin() + 1).exp() * 2, torch.cat([x.cos(), x + 3], -1) + 1]

    plan = compare(fn, gathered, min_segment_kernels=1)
    assert_is_body_and_tail(plan)
    assert len(plan.steps) == 2 and "moved" in {reason.code for step in plan.segments for reason in step.reasons}


def test_what_reads_what_the_tail_has_written_follows_it_too() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        total = torch.zeros(8)
        rows = gather_rows(x.sin() + 1)
        total.copy_(rows.sum(0))
        return (total.cos() + 1, rows)

    plan = compare(fn, lambda x: [x.sin() + 1], min_segment_kernels=1)
    assert_is_body_and_tail(plan)
    assert ".cos" in {node.op for node in plan.steps[-1].nodes}


def stub(rows: Tensor) -> None: ...


@bcg.eager_break(fake=lambda rows: rows.new_empty(3), capture_stub=stub, reads_live_rows=True)
def first(rows: Tensor) -> Tensor:
    return rows[0, :3].clone()


def test_a_break_of_the_tail_keeps_its_own_reason() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        rows = gather_rows(x.sin() + 1)
        return (first(rows).cos() + 1, rows)

    plan = compare(fn, lambda x: [x.sin() + 1], min_segment_kernels=1)
    assert_is_body_and_tail(plan)
    assert plan.reasons()["eager_break"] == 1


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing that is gathered goes into the exponential, which nothing of the tail needs."""
    rows = gather_rows(x.sin() + 1)
    return rows.cos(), (x + 2).exp()


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def look(x: Tensor) -> Tensor:
    return x.clone()


def between(x: Tensor) -> Tensor:
    """The tail needs it, but it follows from a break that stands behind the gather."""
    rows = gather_rows(x.sin() + 1)
    return rows + gather_rows(look(x + 1).exp())


held = torch.zeros(8)


def written(x: Tensor) -> Tensor:
    """What is seen outside of the call is written behind the gather."""
    rows = gather_rows(x.sin() + 1)
    held.add_(1)
    return rows * held


def drawn(x: Tensor) -> Tensor:
    """The bodies of breaks may draw random numbers, too, and their order is kept."""
    rows = gather_rows(x.sin() + 1)
    return rows + gather_rows(x + torch.rand_like(x))


@pytest.mark.parametrize(
    ("fn", "op"), [(returned, ".exp"), (between, ".exp"), (written, ".add_"), (drawn, " rand_like")]
)
def test_what_would_be_captured_behind_the_gather_is_named(graph_of: GraphOf, fn: Callable[..., Any], op: str) -> None:
    """Refused: the plan would not end with the tail."""
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with bcg.forward_context(prefill=batch_of(6)):
        graph = graph_of(fn, x)
    result = mark_cp_gather_tail(graph)
    assert result.changes == 0 and not graph.marks
    (note,) = result.notes
    assert note.startswith("work_behind: %") and op in note and "gather_rows" in note
    assert "compute it before" in note


def test_a_refused_graph_gives_the_same_numbers() -> None:
    compiled = torch.compile(returned, backend="bcg", options={"capture": "emulated", "ladder": LADDER})
    for lengths in ((9, 2), (20,), (5, 4)):
        x = torch.randn(sum(lengths), 8)
        local = batch_of(*lengths).context_parallel(LAYOUT, Peers(0, lengths, [x.sin() + 1]))
        assert local.share is not None
        given = local.share.split(x)
        torch._dynamo.mark_dynamic(given, 0)
        with published(local):
            rows, own = compiled(given)
        assert torch.equal(rows, (x.sin() + 1).cos()) and torch.equal(own, (given + 2).exp())
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and program.replays == 2
    assert [p.notes[0].partition(":")[0] for p in program.plan.passes if p.notes] == ["work_behind"]


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def gather_of_another_name(x: Tensor) -> Tensor:
    return live_batch(x) and x.clone()


def test_a_gather_is_known_by_its_reason_and_without_one_the_graph_stays(graph_of: GraphOf) -> None:
    def fn(x: Tensor) -> Tensor:
        return gather_of_another_name(x.sin() + 1).cos() + 1

    with bcg.forward_context(prefill=batch_of(6)):
        graph = graph_of(fn, torch.randn(6, 8))
    before = graph.module.code, dict(graph.facts)
    assert mark_cp_gather_tail(graph).changes == 0
    assert not graph.marks and (graph.module.code, graph.facts) == before


def test_the_rows_of_a_batch_that_is_not_shared_out_are_its_live_ones() -> None:
    """They are the caller's own: the next call does not write them."""
    compiled = torch.compile(gather_rows_of_sines, backend="bcg", options={"capture": "emulated", "ladder": LADDER})
    kept = []
    for length in (5, 7, 6, 3):
        x = torch.randn(length, 8)
        torch._dynamo.mark_dynamic(x, 0)
        with published(batch_of(length)):
            kept.append((compiled(x), x.sin() + 1))
    assert bcg.stats(compiled).replays == 3
    assert all(torch.equal(found, wanted) for found, wanted in kept)


def gather_rows_of_sines(x: Tensor) -> Tensor:
    return gather_rows(x.sin() + 1)


def test_padded_rows_that_reach_live_ones_before_the_gather_reach_the_tail() -> None:
    def fn(x: Tensor) -> Tensor:
        return gather_rows(x.flip(0)) + 1

    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(fn, backend="bcg", options={"capture": "emulated", "ladder": LADDER})
    with bcg.forward_context(prefill=batch_of(6)):
        compiled(x)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and program.plan.unpadded is not None
    assert program.plan.unpadded.code == "mixing_rows"
