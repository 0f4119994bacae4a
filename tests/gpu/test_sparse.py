"""MLA over chosen tokens on the GPU: the kernel, and gathered rows, against the reference, in bfloat16."""

import pytest
import torch

from bcg_compiler.models.layers import kernels, reference, sparse
from bcg_compiler.models.layers.pages import PagePool

pytestmark = pytest.mark.gpu

PAGES, PAGE, MOST = 64, 64, 256


@pytest.mark.parametrize("heads", [16, 24, 128])
def test_chosen_tokens_give_the_result_of_the_reference(heads: int) -> None:
    torch.manual_seed(0)
    pool = PagePool(PAGES, PAGE, "cuda")
    pool.prefill({0: 900})
    batch = pool.prefill({1: 400, 0: 700})
    scores = torch.rand(batch.tokens, batch.longest_context, device="cuda")
    places = torch.arange(batch.longest_context, device="cuda")
    best = scores.masked_fill(places > batch.positions[:, None], -1.0).topk(MOST)
    chosen = best.indices.int().masked_fill(best.values < 0, -1)
    caches = (torch.randn(PAGES, PAGE, width, device="cuda").bfloat16() for width in (512, 64))
    queries = (torch.randn(batch.tokens, heads, width, device="cuda").bfloat16() for width in (512, 64))
    found, wanted = torch.empty(2, batch.tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    args = batch, *queries, *caches
    kernel = kernels.kernel("sparse_mla_attention", found.device, *args, found, 0.04, chosen)
    assert kernel.name == "torch gather" if sparse.fused_unavailable(found.device) else "triton"
    reference.mla_attention(*args, wanted, 0.04, chosen)
    for run in {kernel.run, sparse.mla_attention}:
        found.fill_(torch.nan)
        run(*args, found, 0.04, chosen)
        assert (found.float() - wanted.float()).abs().max() <= 2e-2 * wanted.abs().max()
