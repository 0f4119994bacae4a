"""MLA that gathers chosen tokens, against the reference that masks all others."""

import importlib.util
import os
import subprocess
import sys

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


INTERPRETED = """
import torch
from bcg_compiler.models.layers import reference, sparse
from bcg_compiler.models.layers.pages import PagePool

torch.manual_seed(0)
sparse._KEYS = 16  # several tiles
for heads, most in ((5, 40), (20, 24)):
    pool = PagePool(40, 4)
    pool.prefill({0: 30, 1: 2})
    batch = pool.prefill({1: 3, 2: 5, 0: 4})
    chosen = torch.full((batch.tokens, most), -1, dtype=torch.int32)
    for row, position in zip(chosen, batch.positions.tolist(), strict=True):
        count = min(position + 1, most)
        row[:count] = torch.randperm(position + 1)[:count]
    caches = torch.randn(40, 4, 32), torch.randn(40, 4, 16)
    queries = torch.randn(heads, batch.tokens, 32).transpose(0, 1), torch.randn(batch.tokens, heads, 16)
    found, wanted = torch.full((2, batch.tokens, heads, 32), torch.nan)
    sparse.fused_mla_attention(batch, *queries, *caches, found, 0.3, chosen)
    reference.mla_attention(batch, *queries, *caches, wanted, 0.3, chosen)
    torch.testing.assert_close(found, wanted)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: no interpreter")
def test_the_kernel_gives_the_result_of_the_reference() -> None:
    """In Triton's interpreter, which must be on when Triton is imported: in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_the_kernel_cannot_do_is_told() -> None:
    def why(rank: int, rotary: int, dtype: torch.dtype) -> str:
        latent, turned = torch.empty(2, 3, rank, dtype=dtype), torch.empty(2, 3, rotary, dtype=dtype)
        nothing = torch.empty(0)
        return sparse.fused_refuses(None, latent, turned, nothing, nothing, nothing, 0.3, nothing)  # type: ignore[arg-type]

    assert why(512, 64, torch.bfloat16) == ""
    assert "are torch.float32" in why(512, 64, torch.float32)
    assert "96 and 64 wide" in why(96, 64, torch.float16) and "1024 and 64" in why(1024, 64, torch.float16)


def test_gathering_is_for_gpus_and_calls_where_not_all_tokens_are_chosen() -> None:
    batch = PagePool(PAGES, PAGE).prefill({0: 9})
    cpu, some, every = torch.device("cpu"), torch.zeros(9, 6), torch.zeros(9, 9)

    def why(chosen: torch.Tensor) -> str:
        nothing = torch.empty(0)
        return sparse.refuses(batch, nothing, nothing, nothing, nothing, nothing, 0.3, chosen)

    assert (why(some), why(every)) == ("", "all tokens are chosen")
    assert (bool(sparse.unavailable(cpu)), sparse.unavailable(torch.device("cuda"))) == (True, "")
    assert kernels.in_use("cpu")["sparse_mla_attention"] == "torch"
