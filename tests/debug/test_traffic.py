"""Made-up traffic: every token of every prompt comes once, in batches that a ladder and a cache hold."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bcg_compiler.debug.traffic import AT_HAND, ended, pages_needed, schedule
from bcg_compiler.models.layers.pages import PagePool

prompts = st.lists(st.integers(1, 200), max_size=12)


@settings(deadline=None)
@given(prompts, st.integers(1, 64), st.integers(0, 5))
def test_every_token_comes_once_in_batches_that_fit(prompts: list[int], ceiling: int, seed: int) -> None:
    batches = schedule(prompts, ceiling, seed)
    assert batches == schedule(prompts, ceiling, seed)
    assert all(1 <= sum(batch.values()) <= ceiling and 0 not in batch.values() for batch in batches)
    assert all(len(batch) <= AT_HAND for batch in batches)
    assert sum(map(Counter, batches), Counter()) == Counter(dict(enumerate(prompts)))


@settings(max_examples=25, deadline=None)
@given(prompts, st.integers(1, 64), st.integers(1, 9))
def test_a_cache_of_the_pages_needed_is_enough_and_one_page_less_is_not(
    prompts: list[int], ceiling: int, page_size: int
) -> None:
    batches = schedule(prompts, ceiling, 0)
    pages = pages_needed(batches, page_size)
    pool, most = PagePool(pages, page_size), 0
    for batch, done in zip(batches, ended(batches), strict=True):
        pool.prefill(batch)
        most = max(most, pages - len(pool._free))
        for request in done:
            pool.free(request)
    assert most == (pages if prompts else 0)
    assert len(pool._free) == pages  # each request has ended


def test_batches_have_several_requests_and_prefixes() -> None:
    batches = schedule([60, 90, 40, 70, 50], 64, 0)
    pool = PagePool(pages_needed(batches, 8), 8)
    made = []
    for batch, done in zip(batches, ended(batches), strict=True):
        made.append(pool.prefill(batch))
        for request in done:
            pool.free(request)
    assert any(len(batch.lengths) == AT_HAND for batch in made)
    assert any(prefix for batch in made for prefix in batch.prefixes)
