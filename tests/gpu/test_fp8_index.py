"""The Triton kernel of the index logits on the GPU, against plain torch on the same keys of 8 bits."""

import pytest
import torch

from bcg_compiler.models.layers import cache, fp8, index_logits, indexer, kernels, reference
from bcg_compiler.models.layers.pages import PagePool

pytestmark = pytest.mark.gpu

PAGES, PAGE, HEADS = 64, 64, 64


@pytest.fixture(autouse=True)
def _available() -> None:
    why = index_logits.unavailable(torch.device("cuda"))
    if why:
        pytest.skip(f"Triton kernel: {why}")
    torch.manual_seed(0)


@pytest.mark.parametrize("width", [64, 128])
def test_logits_are_those_of_plain_torch(width: int) -> None:
    """Two requests, one with a prefix; neither tokens nor contexts fill their tiles."""
    pool = PagePool(PAGES, PAGE, "cuda")
    keys = torch.zeros(PAGES, PAGE, fp8.packed_width(width), dtype=torch.uint8, device="cuda")
    for chunk in ({0: 1000}, {1: 333, 0: 500}):
        batch = pool.prefill(chunk)  # type: ignore[arg-type]
        cache.write(keys, batch, fp8.pack(torch.randn(batch.tokens, width, device="cuda")))
    query = torch.randn(batch.tokens, HEADS, width, device="cuda").bfloat16()
    weights = torch.randn(batch.tokens, HEADS, device="cuda")
    values, scales = fp8.quantise(query)
    rounded = fp8.unpack(fp8.pack(query))
    for request in batch.requests:
        rows = slice(request.start, request.stop)
        products = torch.einsum("thd,sd->ths", rounded[rows], fp8.unpack(cache.read(keys, request)))
        wanted = torch.einsum("ths,th->ts", products.relu(), weights[rows])
        found = index_logits.index_logits(values, weights * scales, keys, batch, rows)
        assert found[:, request.context :].isneginf().all()
        found = found[:, : request.context]
        places = torch.arange(request.context, device="cuda")
        seen = places <= request.prefix + places[: rows.stop - rows.start, None]
        assert found.isneginf().equal(~seen)
        assert ((found - wanted)[seen]).abs().max() <= 2e-3 * wanted[seen].abs().max()


def test_chosen_tokens_are_nearly_those_of_plain_torch() -> None:
    """Of scores that differ by rounding either may be chosen."""
    most = 256
    batch = PagePool(PAGES, PAGE, "cuda").prefill({0: 1500, 1: 700})
    keys = torch.zeros(PAGES, PAGE, fp8.packed_width(128), dtype=torch.uint8, device="cuda")
    query = torch.randn(batch.tokens, HEADS, 128, device="cuda").bfloat16()
    key = torch.randn(batch.tokens, 128, device="cuda").bfloat16()
    weights = torch.rand(batch.tokens, HEADS, device="cuda")
    found, wanted = torch.empty(2, batch.tokens, most, dtype=torch.int32, device="cuda")
    query, scales = fp8.quantise(query)
    weights *= scales
    with batch.published():
        indexer.choose_tokens(query, fp8.pack(key), weights, keys, found)
    reference.index_top_k(batch, query, weights, keys, wanted)
    assert kernels.kernel("index_top_k", query.device, batch, query, weights, keys, found).name == "triton fp8"
    assert (found >= 0).sum().equal((wanted >= 0).sum())
    columns = torch.zeros(2, batch.tokens, batch.longest_context + 1, dtype=torch.bool, device="cuda")
    for marks, chosen in zip(columns, (found, wanted), strict=True):
        marks.scatter_(1, chosen.long() % (batch.longest_context + 1), True)
    assert (columns[0] & columns[1]).sum() >= 0.98 * columns[1].sum()
