"""Batches and pages: what is handed out, and what is refused with its reason."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.distributed import Zigzag
from bcg_compiler.models.layers import cache
from bcg_compiler.models.layers.batch import PrefillBatch, live_batch
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.pages import PagePool


def test_slots_follow_the_pages_of_each_request() -> None:
    batch = PrefillBatch.of([3, 2], [[5, 2], [0]], prefixes=[3, 0], page_size=4, pages=6)
    assert batch.positions.tolist() == [3, 4, 5, 0, 1]
    assert batch.slots.tolist() == [23, 8, 9, 0, 1]  # page 5 holds slots 20 to 23, page 2 8 to 11
    assert (batch.tokens, batch.longest_context) == (5, 6)
    first, second = batch.requests
    assert (first.start, first.stop, first.context, first.slots.tolist()) == (0, 3, 6, [20, 21, 22, 23, 8, 9])
    assert (second.start, second.stop, second.context, second.slots.tolist()) == (3, 5, 2, [0, 1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(lengths=[3, 0], page_lists=[[0], [1]]), "Request 1 has 0 new tokens behind 0: .* left out"),
        (dict(lengths=[3], page_lists=[[0]], prefixes=[-1]), "3 new tokens behind -1"),
        (dict(lengths=[], page_lists=[]), "there are 0, 0 and 0"),
        (dict(lengths=[3], page_lists=[[0], [1]]), "there are 1, 1 and 2"),
        (dict(lengths=[5], page_lists=[[0]]), "Request 0 has 5 tokens and 1 pages of 4: give it 2 pages"),
        (dict(lengths=[5, 1], page_lists=[[0, 6], [1]]), "Page 6 of request 0 is out of range: the cache has 6 pages"),
        (dict(lengths=[1], page_lists=[[-1]]), "Page -1 of request 0 is out of range"),
        (dict(lengths=[5, 1], page_lists=[[0, 3], [3]]), "Page 3 is given twice: to request 0 and to request 1"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        PrefillBatch.of(**given, page_size=4, pages=6)


def test_a_pool_extends_requests_and_takes_pages_back() -> None:
    pool = PagePool(pages=4, page_size=4)
    first = pool.prefill({"a": 5, "b": 3})
    assert first.prefixes == (0, 0)
    assert first.page_table.tolist() == [[0, 1], [2, 0]]
    second = pool.prefill({"b": 1, "a": 4})
    assert second.prefixes == (3, 5)
    assert second.positions.tolist() == [3, 5, 6, 7, 8]
    assert second.page_table.tolist() == [[2, 0, 0], [0, 1, 3]]
    with pytest.raises(ModelError, match="needs 1 more pages of 4 tokens, and 0 of 4 are free"):
        pool.prefill({"b": 1})
    pool.free("a")
    with pytest.raises(ModelError, match="Request 'a' has no pages"):
        pool.free("a")
    assert pool.prefill({"b": 1, "c": 8}).page_table.tolist() == [[2, 0], [1, 3]]


def test_a_refused_batch_takes_no_pages() -> None:
    pool = PagePool(pages=2, page_size=4)
    with pytest.raises(ModelError, match="Request 1 has 0 new tokens"):
        pool.prefill({"a": 3, "b": 0})
    assert pool.prefill({"a": 8}).prefixes == (0,)


def test_a_body_sees_the_batch_of_its_call_only() -> None:
    batch = PrefillBatch.of([3], [[0]], page_size=4, pages=6)
    rows, cache = torch.zeros(5, 2), torch.zeros(6, 4, 2)
    with pytest.raises(bcg.BcgError, match="forward_context"):
        live_batch(rows)
    with batch.published():
        assert live_batch(rows[:3], cache) is batch
        with bcg.forward_context(live_rows=3):
            assert live_batch(rows, cache) is batch
        with pytest.raises(ModelError, match="has 3 tokens and the model is called with 2"):
            live_batch(rows[:2])
        with bcg.forward_context(live_rows=4), pytest.raises(ModelError, match=r"has 3 tokens .* called with 4"):
            live_batch(rows)
        with pytest.raises(ModelError, match="has 3 tokens and the model is called with 5"):
            live_batch(rows)
        with pytest.raises(ModelError, match="6 pages of 4 tokens, and the model's has 5 of 4"):
            live_batch(rows[:3], cache[:5])


@dataclass
class Peers:
    """Other ranks that are not there: what each would give is taken from the rows of the whole batch."""

    layout: Zigzag
    rank: int
    batch: PrefillBatch
    rows: torch.Tensor

    @property
    def size(self) -> int:
        return self.layout.size

    def all_gather(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        found = rows.new_zeros(self.size, longest, *rows.shape[1:])
        for rank in range(self.size):
            theirs = self.layout.split(self.rows, self.batch.lengths, rank)
            found[rank, : len(theirs)] = theirs
        found[self.rank, : len(rows)] = rows
        return found


def of_rank(batch: PrefillBatch, rank: int, rows: torch.Tensor | None = None, size: int = 2) -> PrefillBatch:
    rows = torch.zeros(batch.tokens) if rows is None else rows
    return batch.context_parallel(Zigzag(size), Peers(Zigzag(size), rank, batch, rows))


def test_the_parts_that_a_rank_holds_are_its_requests() -> None:
    batch = PrefillBatch.of([9, 1], [[5, 2, 3], [0]], prefixes=[3, 0], page_size=4, pages=6)
    first, second = of_rank(batch, 0), of_rank(batch, 1)
    assert (first.lengths, first.prefixes, first.tokens) == ((3, 2, 1), (3, 10, 0), 6)
    assert (second.lengths, second.prefixes, second.tokens) == ((2, 2), (6, 8), 4)
    assert first.positions.tolist() == [3, 4, 5, 10, 11, 0]
    assert first.slots.tolist() == [23, 8, 9, 14, 15, 0]
    assert [(r.start, r.stop, r.context) for r in second.requests] == [(0, 2, 8), (2, 4, 10)]
    assert second.requests[1].slots.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 12, 13]
    assert second.owners.tolist() == [0, 0, 1, 1]
    assert second.share is not None
    assert second.share.split(torch.arange(10)).tolist() == [3, 4, 5, 6]


def test_a_rank_may_hold_nothing() -> None:
    empty = of_rank(PrefillBatch.of([1, 1], [[0], [1]], page_size=4, pages=6), 1)
    assert (empty.tokens, empty.requests, empty.longest_context) == (0, (), 0)
    assert empty.positions.tolist() == empty.owners.tolist() == []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_rank_writes_the_rows_of_all(size: int) -> None:
    batch = PrefillBatch.of([9, 1, 6], [[5, 2, 3], [0], [4, 1]], prefixes=[3, 0, 2], page_size=4, pages=6)
    rows = torch.rand(16, 3)
    wanted = torch.zeros(6, 4, 3)
    cache.write(wanted, batch, rows)
    for rank in range(size):
        local = of_rank(batch, rank, rows, size)
        assert local.share is not None
        mine = torch.cat([local.share.split(rows), torch.full((2, 3), 7.0)])  # padded rows behind
        found = torch.zeros(6, 4, 3)
        cache.write(found, local, mine)
        assert torch.equal(found, wanted)


def test_the_batch_of_a_rank_that_cannot_be_is_refused() -> None:
    batch = PrefillBatch.of([9], [[5, 2, 3]], page_size=4, pages=6)
    peers = Peers(Zigzag(2), 0, batch, torch.zeros(9))
    with pytest.raises(ModelError, match="over 4 ranks, and rows are gathered of 2"):
        batch.context_parallel(Zigzag(4), peers)
    local = batch.context_parallel(Zigzag(2), peers)
    with pytest.raises(ModelError, match="one rank's already"):
        local.context_parallel(Zigzag(2), peers)
    with local.published(), pytest.raises(ModelError, match="has 5 tokens and the model is called with 9"):
        live_batch(torch.zeros(9, 2))
    assert local.share is not None
    with pytest.raises(ModelError, match="has 9 tokens and the model is called with 5"):
        local.share.split(torch.zeros(5))


def test_admission_is_told_of_the_whole_batch_on_all_ranks_alike() -> None:
    batch = PrefillBatch.of([9, 1], [[0, 1, 2], [3]], prefixes=[2, 0], page_size=4, pages=6)
    told = []
    for rank in range(2):
        with of_rank(batch, rank).published():
            told.append(bcg.current_context().batch)
    assert told == [bcg.Batch(rows=10, local_rows=8, requests=2, prefix_lengths=(2, 0))] * 2  # 6 rows, in fours


def test_admission_is_told_of_a_batch() -> None:
    batch = PrefillBatch.of([3, 1], [[0, 1], [2]], prefixes=[2, 0], page_size=4, pages=6)
    with batch.published():
        admitted = bcg.current_context().batch
    assert (admitted.rows, admitted.requests, admitted.prefix_lengths) == (4, 2, (2, 0))
