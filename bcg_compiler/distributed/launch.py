"""This process as one of several that a launcher has started: ``torchrun``, or whatever sets the variables it sets."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bcg_compiler.distributed.exchange import rank_names
from bcg_compiler.errors import RankError


@dataclass(frozen=True)
class Launch:
    """Which of how many processes this one is; ``local_rank``: which of those of its machine."""

    rank: int
    ranks: int
    local_rank: int

    @classmethod
    def found(cls) -> Launch | None:
        """What the environment says (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``); ``None`` without a launcher."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank = int(os.environ["RANK"])
        return cls(rank, int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", rank)))

    @contextmanager
    def group(self, device: torch.device, timeout: float) -> Iterator[None]:
        """The process group of all ranks, within the block: over gloo, and for tensors of a GPU over NCCL.

        ``timeout`` in seconds: of each collective, and until all ranks have come. Raises ``RankError`` on all ranks
        that have if one has not, and names it.
        """
        limit = datetime.timedelta(seconds=timeout)
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        except (RuntimeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankError(
                f"Rank {self.rank} found no store where ranks meet, at MASTER_ADDR and MASTER_PORT ({where}): {first}"
            ) from error
        roll_call(store, self.rank, self.ranks, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=limit,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def roll_call(store: dist.Store, rank: int, ranks: int, timeout: float) -> None:
    """Return once all ranks have called this; ``RankError`` with the ones that have not after ``timeout`` seconds.

    Before there is a process group: to make one with a rank that does not come fails without its name.
    """
    names = [f"bcg roll call {other}" for other in range(ranks)]
    store.set(names[rank], "here")
    try:
        store.wait(names, datetime.timedelta(seconds=timeout))
    except RuntimeError:
        missing = [other for other, name in enumerate(names) if not store.check([name])]
        if missing:
            raise RankError(
                f"Of {ranks} ranks {rank_names(missing)} did not come within {timeout:g} seconds: they died before, "
                "hang, or were not started. Their own output says which."
            ) from None
