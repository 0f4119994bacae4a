"""MLA that gathers chosen tokens, against the reference that masks all others."""

import pytest
import torch

from bcg_compiler.models.layers import kernels, reference, sparse
from bcg_compiler.models.layers.pages import PagePool

PAGES, PAGE, HEADS, RANK, ROTARY, MOST = 12, 4, 3, 8, 4, 6


@pytest.mark.parametrize("held", [1 << 27, 200])
def test_gathered_tokens_give_the_result_of_the_reference(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with and without prefix; tokens with fewer places than there is room for, and one behind them."""
    monkeypatch.setattr(sparse, "_GATHERED", held)  # tokens block by block: the same result
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    pool = PagePool(PAGES, PAGE)
    pool.prefill({0: 9, 1: 2})
    batch = pool.prefill({1: 6, 2: 5, 0: 4})
    chosen = torch.full((batch.tokens, MOST), -1, dtype=torch.int32)
    for row, position in zip(chosen, batch.positions.tolist(), strict=True):
        count = min(position + 1, MOST)
        row[:count] = torch.randperm(position + 1, generator=generator)[:count]
    chosen[-1, 0] = 40  # a place that the token does not see
    caches = draw(PAGES, PAGE, RANK), draw(PAGES, PAGE, ROTARY)
    queries = draw(batch.tokens, HEADS, RANK), draw(batch.tokens, HEADS, ROTARY)
    found, wanted = torch.empty(2, batch.tokens, HEADS, RANK)
    sparse.mla_attention(batch, *queries, *caches, found, 0.3, chosen)
    chosen[-1, 0] = -1
    reference.mla_attention(batch, *queries, *caches, wanted, 0.3, chosen)
    torch.testing.assert_close(found, wanted)


def test_gathering_is_for_gpus_and_calls_where_not_all_tokens_are_chosen() -> None:
    batch = PagePool(PAGES, PAGE).prefill({0: 9})
    cpu, some, every = torch.device("cpu"), torch.zeros(9, 6), torch.zeros(9, 9)

    def why(chosen: torch.Tensor) -> str:
        nothing = torch.empty(0)
        return sparse.refuses(batch, nothing, nothing, nothing, nothing, nothing, 0.3, chosen)

    assert (why(some), why(every)) == ("", "all tokens are chosen")
    assert (bool(sparse.unavailable(cpu)), sparse.unavailable(torch.device("cuda"))) == (True, "")
    assert kernels.in_use("cpu")["sparse_mla_attention"] == "torch"
