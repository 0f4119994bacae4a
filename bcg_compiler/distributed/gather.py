"""The rows of all ranks of a context-parallel group."""

from typing import Protocol

import torch
import torch.distributed as dist

from bcg_compiler.errors import ParallelError

#: Newer torch has it under the first name and warns of the second one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RowGather(Protocol):
    """Brings the rows of all ranks to each. All ranks call it together, with equal ``longest``, dtype and widths."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_gather(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        """``[size, longest, ...]``, of this rank's ``rows`` ``[at most longest, ...]``; zeros behind its last one."""


class GroupRows:
    """``RowGather`` over a process group: of all ranks unless given, by its backend (gloo, NCCL).

    Raises ``ParallelError`` where there is no group, and on a rank that is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ParallelError(
                "To gather rows of other ranks needs a process group: call torch.distributed.init_process_group."
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ParallelError(
                f"Rank {dist.get_rank()} is not in the group that is given: give each rank the group that it is in."
            )

    def all_gather(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        """See ``RowGather``. Raises ``ParallelError`` for more than ``longest`` rows."""
        if len(rows) > longest:
            raise ParallelError(
                f"Rank {self.rank} has {len(rows)} rows, and the longest rank is said to have {longest}."
            )
        # A collective of equal sizes takes one message; what is added is less than a row for each part of a sequence.
        filled = rows.new_zeros(longest, *rows.shape[1:])
        filled[: len(rows)] = rows
        gathered = rows.new_empty(self.size, *filled.shape)
        _all_gather(gathered.flatten(0, 1), filled, group=self.group)
        return gathered
