"""The attention breaks against torch's own attention over keys that were never paged."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import bcg_compiler as bcg
from bcg_compiler.models.layers import attention, indexer, kernels, reference
from bcg_compiler.models.layers.pages import PagePool

HEADS, GROUPS, WIDTH = 4, 2, 8
#: Chunks of two requests: the first has a prefix of 7 when it attends.
CHUNKS: tuple[dict[int, int], ...] = ({0: 7}, {0: 6, 1: 5})


def mask(rows: int, context: int, window: int = 0) -> torch.Tensor:
    """Bool ``[rows, context]``: the last ``rows`` tokens of a context see those before them."""
    at = torch.arange(context - rows, context)[:, None]
    seen = torch.arange(context) <= at
    return seen & (torch.arange(context) > at - window) if window else seen


@pytest.mark.parametrize(("window", "with_sinks"), [(0, False), (4, False), (4, True)])
@pytest.mark.parametrize("block", [1 << 27, 50])
def test_paged_attention(window: int, with_sinks: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCORES", block)  # queries block by block: the same result
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    pool = PagePool(pages=6, page_size=4)
    caches = [torch.zeros(6, 4, GROUPS, WIDTH) for _ in range(2)]
    sinks = draw(HEADS) if with_sinks else None
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {0: [], 1: []}
    for chunk in CHUNKS:
        batch = pool.prefill(chunk)  # type: ignore[arg-type]
        rows = batch.tokens + 3  # three padded ones
        q, k, v = draw(rows, HEADS, WIDTH), draw(rows, GROUPS, WIDTH), draw(rows, GROUPS, WIDTH)
        out = torch.full((rows, HEADS, WIDTH), 7.0)
        with batch.published(), bcg.forward_context(live_rows=batch.tokens):
            attention.paged_attention(q, k, v, *caches, out, 0.3, window, sinks)
        assert (out[batch.tokens :] == 7).all()
        start = 0
        for request, new in chunk.items():
            part = slice(start, start := start + new)
            seen[request].append((k[part], v[part]))
            keys, values = (torch.cat(parts) for parts in zip(*seen[request], strict=True))
            expanded = [x.repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for x in (keys, values)]
            bias = torch.zeros(HEADS, new, len(keys)).masked_fill(~mask(new, len(keys), window), -torch.inf)
            if sinks is not None:  # a key of its own, of that score and with the value 0
                expanded = [F.pad(x, (0, 0, 1, 0)) for x in expanded]
                bias = torch.cat([sinks[:, None, None].expand(-1, new, 1), bias], -1)
            wanted = F.scaled_dot_product_attention(q[part].transpose(0, 1), *expanded, attn_mask=bias, scale=0.3)
            torch.testing.assert_close(out[part], wanted.transpose(0, 1))


def indexed(most: int) -> tuple[torch.Tensor, Any]:
    """What is chosen for a request of 9 tokens, 4 of them a prefix, and the index scores ``[5, 9]``."""
    generator = torch.Generator().manual_seed(0)
    pool, cache = PagePool(pages=6, page_size=4), torch.zeros(6, 4, WIDTH)
    q, weights = torch.randn(9, HEADS, WIDTH, generator=generator), torch.randn(9, HEADS, generator=generator)
    keys = torch.randn(9, WIDTH, generator=generator)
    chosen = torch.empty(9, most, dtype=torch.int32)
    for part in (slice(0, 4), slice(4, 9)):
        batch = pool.prefill({0: part.stop - part.start})
        with batch.published():
            indexer.choose_tokens(q[part], keys[part], weights[part], cache, chosen[part])
    scores = (torch.einsum("thd,sd->ths", q, keys).relu() * weights[:, :, None]).sum(1)
    return chosen[4:], scores.masked_fill(~mask(9, 9), -torch.inf)[4:]


@pytest.mark.parametrize("block", [1 << 27, 50])
def test_the_best_tokens_are_chosen(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCORES", block)
    chosen, scores = indexed(6)
    for row, (places, score) in enumerate(zip(chosen.tolist(), scores, strict=True)):
        real = [place for place in places if place >= 0]
        assert set(real) == set(score.topk(min(6, row + 5)).indices.tolist())
        assert places[len(real) :] == [-1] * (6 - len(real))


def test_scores_are_computed_only_where_a_context_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("scores were computed")

    monkeypatch.setitem(kernels.KERNELS, "index_top_k", (kernels.Kernel("none", refuse),))
    chosen, _ = indexed(12)  # more than the context: it is smaller than top-k
    assert chosen.tolist() == [[*range(row + 5), *[-1] * (7 - row)] for row in range(5)]
    with pytest.raises(AssertionError, match="scores were computed"):
        indexed(8)


def test_the_implementation_in_use_has_a_name() -> None:
    assert kernels.in_use("cpu") == dict.fromkeys(kernels.KERNELS, "torch")
