"""All-to-all by ``torch.distributed``, over whatever transport a process group has: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from bcg_compiler.models.layers.all_to_all import Received, Shard, zero_output


@dataclass(frozen=True, eq=False)
class _Splits:
    """``sent[r]`` rows go to rank ``r``, ``got[r]`` come from it; those sent are rows of ``tokens``, in their order."""

    tokens: torch.Tensor
    sent: list[int]
    got: list[int]


class TorchAllToAll:
    """``all_to_all_single`` with as many rows for each rank as there are: the sizes are exchanged first, and read."""

    mode = "normal"
    bucket_multiple = 1
    reserve_bytes = 0
    stub = staticmethod(zero_output)

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.shard = Shard(experts, group.size(), group.rank())

    def barrier(self) -> None:
        """The group's own."""
        dist.barrier(self.group)

    def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """See ``AllToAll``."""
        owners = ids // self.shard.count
        wanted = torch.zeros(self.shard.ranks, len(ids), dtype=torch.bool, device=ids.device)
        wanted.T.scatter_(1, owners, True)
        ranks, tokens = wanted.nonzero(as_tuple=True)  # ordered by rank
        counts = wanted.sum(1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        splits = _Splits(tokens, counts.tolist(), arriving.tolist())
        there = owners[tokens] == ranks[:, None]
        local = torch.where(there, ids[tokens] - ranks[:, None] * self.shard.count, -1)
        return Received(
            self._exchange(hidden[tokens], splits.sent, splits.got),
            self._exchange(local, splits.sent, splits.got),
            self._exchange(weights[tokens], splits.sent, splits.got),
            splits,
        )

    def combine(self, rows: torch.Tensor, received: Received, out: torch.Tensor) -> None:
        """See ``AllToAll``."""
        splits: _Splits = received.handle
        out.zero_()
        out.index_add_(0, splits.tokens, self._exchange(rows, splits.got, splits.sent))

    def _exchange(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        arrived = rows.new_empty(sum(got), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), got, sent, group=self.group)
        return arrived
