"""Tensors of pages ``[pages, page_size, ...]``: one for each thing that a layer keeps of a token.

They are buffers of the layers, which a compiled model binds by address: what a break writes is there for later calls.
"""

import torch

from bcg_compiler.models.layers.batch import PrefillBatch, Request


def write(cache: torch.Tensor, batch: PrefillBatch, rows: torch.Tensor) -> None:
    """Put the live rows ``[tokens or more, ...]`` of a batch where its new tokens belong.

    Under context parallelism those of all ranks, which write together.
    """
    rows, slots = rows[: batch.tokens].to(cache.dtype), batch.slots
    if batch.share is not None:
        rows, slots = batch.share.restore(rows), batch.share.whole.slots
    cache.flatten(0, 1)[slots] = rows


def read(cache: torch.Tensor, request: Request) -> torch.Tensor:
    """The rows of all tokens of a request, prefix and new ones, in order: ``[context, ...]``."""
    return cache.flatten(0, 1)[request.slots]
