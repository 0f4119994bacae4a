"""What the tests of serving models share: prompts, what transformers gives for them, calls as a runner makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bcg_compiler as bcg


@pytest.fixture
def serve() -> SimpleNamespace:
    """The functions of this file."""
    return SimpleNamespace(tokens=tokens, expected=expected, assert_close=assert_close, in_chunks=in_chunks, call=call)


def tokens(lengths: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (length,), generator=generator) for length in lengths]


def expected(model: Any, prompts: list[torch.Tensor]) -> torch.Tensor:
    """The logits of a model of transformers for each prompt alone."""
    return torch.cat([model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts])


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def in_chunks(model: Any, pool: Any, prompts: list[torch.Tensor], chunks: tuple[dict[int, int], ...]) -> torch.Tensor:
    """The logits of all prompts, prefilled in batches of so many further tokens of each."""
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    at = [0] * len(prompts)
    for chunk in chunks:
        batch = pool.prefill(chunk)
        ids = torch.cat([prompts[i][at[i] : at[i] + new] for i, new in chunk.items()])
        with batch.published():
            logits = model(ids, batch.positions).split(list(chunk.values()))
        for (i, new), part in zip(chunk.items(), logits, strict=True):
            found[i].append(part)
            at[i] += new
    return torch.cat([part for parts in found for part in parts])


def call(model: Any, pool: Any, requests: dict[int, int], seed: int, rows: int | None = None) -> torch.Tensor:
    """Logits of the live rows of one batch; ``rows`` > its tokens: called as a runner calls it in a bucket."""
    batch = pool.prefill(requests)
    (ids,) = tokens((rows or batch.tokens,), seed)
    positions = batch.positions.new_zeros(len(ids))
    positions[: batch.tokens] = batch.positions
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    with batch.published():
        if rows is None:
            return model(ids, positions)
        with bcg.forward_context(live_rows=batch.tokens):
            ids[batch.tokens :] = 0
            return model(ids, positions)[: batch.tokens]
