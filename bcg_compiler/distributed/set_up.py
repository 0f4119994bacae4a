"""What the ranks of a layout settle before their first batch: that they agree, and which captures all of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from bcg_compiler.distributed.agreement import agree, versions
from bcg_compiler.distributed.exchange import Exchange, rank_names
from bcg_compiler.distributed.pipeline import ProxyForm
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.errors import PipelineError, RankError

_T = TypeVar("_T")


class SetUp:
    """Collective, as are its methods: all ranks of the layout make it together, each with its place. Alone it is empty.

    ``timeout``: seconds that a rank waits for the others. ``config``: names and values that must be the same on all
    ranks, besides versions. ``takes`` and ``gives``: the forms of the proxies at both ends of this rank's stage. Raises
    ``RankError`` on all ranks if they do not agree, and ``PipelineError`` on those of a pipeline for a border of which
    its stages have different ideas.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout: float,
        config: Mapping[str, str],
        takes: ProxyForm | None = None,
        gives: ProxyForm | None = None,
    ) -> None:
        self._exchange: Exchange | None = None
        if ranks.world is not None:
            self._exchange = Exchange(ranks.world, timeout, "set-up")
            agree(self._exchange, {**versions(), **config})
        if ranks.pipeline is not None:
            forms = [(takes, gives)] * ranks.parallel.pp
            dist.all_gather_object(forms, (takes, gives), group=ranks.pipeline)
            for (_, given), (taken, _) in pairwise(forms):
                if given != taken:
                    raise PipelineError(f"One stage gives a proxy of the form {given}, and the next one takes {taken}.")

    def run(self, call: Callable[[], _T]) -> _T:
        """What each rank does by itself. ``RankError`` where it succeeds, if it raises anything on another rank.

        So nobody waits at what comes next for a rank that has failed.
        """
        try:
            result = call()
        except Exception:
            self._failures(True)
            raise
        if failed := self._failures(False):
            raise RankError(f"The set-up failed on {rank_names(failed)}: their own output says why.")
        return result

    def _failures(self, mine: bool) -> list[int]:
        """The ranks that have failed."""
        if self._exchange is None:
            return []
        told = self._exchange.gather(torch.tensor([mine])).flatten().tolist()
        return [rank for rank, failed in zip(self._exchange.ranks, told, strict=True) if failed]

    def share(self, again: bool, failed: frozenset[int], buckets: Sequence[int]) -> tuple[bool, frozenset[int]]:
        """Whether any rank has to capture again, and the buckets that failed on any."""
        if self._exchange is None:
            return again, failed
        mine = torch.tensor([again, *(bucket in failed for bucket in buckets)])
        any_again, *any_failed = self._exchange.gather(mine).any(0).tolist()
        return any_again, frozenset(bucket for bucket, lost in zip(buckets, any_failed, strict=True) if lost)

    def __enter__(self) -> SetUp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange.close()
