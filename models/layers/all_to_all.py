"""Expert parallelism: the experts of a layer are shared out over ranks, and rows travel to them and back.

Note [What an all-to-all backend declares]
    A backend carries rows: ``dispatch``, then the experts run, then ``combine``. In the high-throughput mode, which
    prefill wants, the host reads how many rows come, so that no graph can hold any of it: all three are one break.
    What the break needs beside the three is not the same for all libraries, and a guess at it ends in a hang or in
    memory that is not there. So each backend says it, and one that does not is refused:

    ``mode``             ``"normal"``: high throughput, sizes read on the host
    ``stub``             what stands in for the break while a graph is captured: of the same arguments, zeroes the
                         output and talks to no other rank
    ``barrier``          lines ranks up before the stub, as they take unlike time to end a segment
    ``bucket_multiple``  row counts that it can take at capture
    ``reserve_bytes``    device memory of its own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bcg_compiler.models.layers.errors import ModelError


@dataclass(frozen=True)
class Shard:
    """The experts that one rank holds: as many as every other one, those of lower numbers on lower ranks.

    Raises ``ModelError`` if ``experts`` cannot be shared out evenly over ``ranks``.
    """

    experts: int
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.experts % self.ranks:
            fitting = [ranks for ranks in range(1, self.experts + 1) if self.experts % ranks == 0]
            raise ModelError(
                f"{self.experts} experts cannot be shared out evenly over {self.ranks} ranks. Use a number of ranks "
                f"that divides them: {', '.join(map(str, fitting))}."
            )

    @property
    def count(self) -> int:
        """How many experts the rank holds."""
        return self.experts // self.ranks

    @property
    def first(self) -> int:
        """The number of the first of them."""
        return self.rank * self.count


@dataclass(frozen=True, eq=False)
class Received:
    """The rows that came to a rank.

    ``hidden`` ``[received, hidden]``; ``ids`` int64 ``[received, chosen]``, numbers of experts of this rank from 0, or
    -1 for one of another rank; ``weights`` float32 like ``ids``; ``handle``: what the backend needs to send them back.
    """

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any = None


class AllToAll(Protocol):
    """A backend, see Note [What an all-to-all backend declares]."""

    shard: Shard
    mode: str
    bucket_multiple: int
    reserve_bytes: int

    def stub(self, *args: torch.Tensor) -> None:
        """Stand in for the break while a graph is captured; the last of ``args`` is its output."""

    def barrier(self) -> None:
        """Return once all ranks have called it."""

    def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """Send each row to the ranks of its experts, once to each of them.

        ``hidden`` ``[tokens, hidden]``, ``ids`` int64 ``[tokens, chosen]``, ``weights`` float32 ``[tokens, chosen]``.
        """

    def combine(self, rows: torch.Tensor, received: Received, out: torch.Tensor) -> None:
        """Send back what became of each received row; ``out`` ``[tokens, hidden]`` gets the sums over the ranks."""


def zero_output(*args: torch.Tensor) -> None:
    """The stub of all backends here: nothing but zeros in the output, which is the last argument."""
    args[-1].zero_()


class SingleRank:
    """The backend of one rank, which holds all experts: rows stay where they are."""

    mode = "normal"
    bucket_multiple = 1
    reserve_bytes = 0
    stub = staticmethod(zero_output)

    def __init__(self, experts: int) -> None:
        self.shard = Shard(experts)

    def barrier(self) -> None:
        """Wait for nobody: there is no other rank."""

    def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        """See ``AllToAll``."""
        return Received(hidden, ids, weights)

    def combine(self, rows: torch.Tensor, received: Received, out: torch.Tensor) -> None:
        """See ``AllToAll``."""
        out.copy_(rows)
