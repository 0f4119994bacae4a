"""All-to-all by DeepEP (github.com/deepseek-ai/DeepEP), the high-throughput kernels of its ``Buffer``, version 1."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from bcg_compiler.models.layers.all_to_all import Received, Shard, zero_output
from bcg_compiler.models.layers.errors import ModelError


class DeepEPAllToAll:
    """``Buffer.get_dispatch_layout``, ``dispatch`` and ``combine`` over NVLink and RDMA; rows must be bfloat16.

    To make one is collective: all ranks of ``group`` do it together. Raises ``ModelError`` if DeepEP is not there.
    """

    mode = "normal"
    bucket_multiple = 8
    # Its buffers, and what the first kernels take: peers set aside as much.
    reserve_bytes = 1 << 30
    stub = staticmethod(zero_output)

    def __init__(self, experts: int, hidden: int, group: dist.ProcessGroup) -> None:
        self.shard = Shard(experts, group.size(), group.rank())
        self.group = group
        try:
            library: Any = importlib.import_module("deep_ep")
        except ImportError as error:
            raise ModelError(
                f"The all-to-all backend 'deepep' needs the package deep_ep, which cannot be imported ({error}). Build "
                f"it from its sources, or use 'torch'."
            ) from error
        # Releases give expert numbers a type of their own; it was int64 before there was a name for it.
        self._ids_dtype: torch.dtype = getattr(library, "topk_idx_t", torch.int64)
        self._buffer = library.Buffer(group, *_buffer_bytes(library.Buffer, hidden, self.shard.ranks))

    def barrier(self) -> None:
        """The group's own."""
        dist.barrier(self.group)

    def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """See ``AllToAll``. Raises ``ModelError`` for rows that are not bfloat16."""
        if hidden.dtype != torch.bfloat16:
            raise ModelError(
                f"DeepEP sends rows of bfloat16, and the model's are {hidden.dtype}: build the model with "
                f"dtype=torch.bfloat16, or use the all-to-all backend 'torch'."
            )
        ids = ids.to(self._ids_dtype)
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self.shard.experts)
        rows, local, weights, _, handle, _ = self._buffer.dispatch(
            hidden.contiguous(),
            topk_idx=ids,
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return Received(rows, local.long(), weights, handle)

    def combine(self, rows: torch.Tensor, received: Received, out: torch.Tensor) -> None:
        """See ``AllToAll``. DeepEP adds what comes back without weights: the experts have applied them."""
        combined, _, _ = self._buffer.combine(rows, received.handle)
        out.copy_(combined)


def _buffer_bytes(buffer: Any, hidden: int, ranks: int) -> tuple[int, int]:
    """Bytes for NVLink and for RDMA that DeepEP's own settings for so many ranks ask for."""
    row = hidden * torch.bfloat16.itemsize
    configs = buffer.get_dispatch_config(ranks), buffer.get_combine_config(ranks)
    return (
        max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs),
    )
