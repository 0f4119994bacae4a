"""One all-gather between the ranks of a group, which ends in time, and names the ranks that do not come.

Note [Naming a rank that is missing]
A collective that fails tells no rank which other one is missing: gloo says that a connection was reset, or that time is
up. The key-value store of the group can tell. Of the ``timeout``, one part in ``PARTS`` is patience:

* A rank that has waited that long, or whose all-gather has failed, writes into the store that it is there. An
  all-gather that is quick, so nearly each of them, writes nothing.
* A rank gives up one such part before its time is up, and looks for the others' words in the store until it is. Who
  came while it still waited has written by then; so whoever has not is named, on each rank that is left.

``monitored_barrier`` of gloo names ranks as well, but on rank 0 only, and not when that one is gone.
"""

import datetime
import time
from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist

from bcg_compiler.errors import RankError

#: Into how many parts a timeout is cut, see Note [Naming a rank that is missing].
PARTS = 4

#: Seconds between two looks into the store.
LOOK = 0.02


def rank_names(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 3 and 5``."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


class Exchange:
    """All-gathers over the ranks of a group, each of them with the same timeout.

    Args:
        group: its ranks all make one, in the same order; ``None``: all ranks. It needs a backend for CPU tensors.
        timeout: seconds that a rank waits for the others, or a ``timedelta``.
        name: of what is exchanged, in errors and in the store. Groups may share a name; two of one group may not.

    Raises ``RankError`` if there is no such group, or if it takes CUDA tensors only. After one failure all further
    exchanges fail alike: ranks may disagree on how many there were.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | datetime.timedelta, name: str) -> None:
        if not dist.is_initialized():
            raise RankError(f"The {name} needs a process group, and there is none. Call init_process_group first.")
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup):
            raise RankError(f"The {name} was given a group that this rank is no part of. Make it on its ranks only.")
        backends = dist.get_backend_config(found)
        if "cpu:" not in backends:
            raise RankError(
                f"The {name} sends tensors of the CPU, and its group has a backend for others only ({backends}). Give "
                'it dist.new_group(ranks, backend="gloo"), or use init_process_group("cpu:gloo,cuda:nccl").'
            )
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
        if not seconds > 0:
            raise RankError(f"The timeout of the {name} is {seconds} seconds; it must be above 0.")
        self.ranks = tuple(dist.get_process_group_ranks(found))
        """The global number of each rank of the group."""
        self.rank = dist.get_rank(found)
        """This rank's place in it."""
        self.timeout = seconds
        self.name = name
        self.count = 0
        """Exchanges so far, one that failed included."""
        self._group: dist.ProcessGroup | None = found
        # Which one of this group it is: an earlier one may have left words in the store.
        self._number = found.get_group_store().add(f"bcg {name} {self.rank}", 1)
        self._failed: str = ""

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """What each rank has: a CPU tensor of one shape and dtype on all of them → the same with a dimension in front.

        Raises ``RankError`` on each rank that is left if one does not come within the timeout.
        """
        group = self._usable()
        self.count += 1
        began = time.monotonic()
        all_of_them = mine.new_empty((len(self.ranks), *mine.shape))
        try:
            work = dist.all_gather(list(all_of_them.unbind()), mine, group=group, async_op=True)
            assert work is not None
            self._wait(work, began)
        except RuntimeError as error:
            raise self._failure(error, began) from error
        return all_of_them

    def missing(self, error: RuntimeError) -> RankError:
        """What a gather would raise now, for another collective of these ranks that has failed with ``error``.

        A rank that is left comes here, or to its next gather.
        """
        if self._failed:
            return RankError(self._failed)
        self.count += 1
        return self._failure(error, time.monotonic())

    def close(self) -> None:
        """Let go of the group; before ``destroy_process_group``. Further exchanges are errors."""
        self._group = None

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _usable(self) -> dist.ProcessGroup:
        if self._failed:
            raise RankError(f"The {self.name} cannot go on after it failed: {self._failed}")
        if self._group is None:
            raise RankError(f"The {self.name} is closed. Make a new one, on all ranks.")
        if not dist.is_initialized():
            raise RankError(f"The process group of the {self.name} is destroyed. Close the {self.name} before that.")
        if (size := self._group.size()) != len(self.ranks):
            raise RankError(
                f"The {self.name} was made for {len(self.ranks)} ranks, and its group has {size} now. Make a new one, "
                "and capture again."
            )
        return self._group

    def _wait(self, work: dist.Work, began: float) -> None:
        """See Note [Naming a rank that is missing]."""
        patience = self.timeout / PARTS
        try:
            work.wait(datetime.timedelta(seconds=patience))
        except RuntimeError:
            if work.is_completed():  # It has failed, not run out of time.
                raise
            self._write()
            left = began + self.timeout - patience - time.monotonic()
            work.wait(datetime.timedelta(seconds=max(left, LOOK)))

    def _key(self, rank: int) -> str:
        return f"bcg {self.name} {self._number} {self.count} {rank}"

    def _write(self) -> None:
        assert self._group is not None
        self._group.get_group_store().set(self._key(self.rank), "here")

    def _failure(self, error: RuntimeError, began: float) -> RankError:
        missing = set(range(len(self.ranks))) - {self.rank}
        try:
            self._write()
            assert self._group is not None
            store = self._group.get_group_store()
            while missing:
                missing -= {rank for rank in missing if store.check([self._key(rank)])}
                if time.monotonic() - began >= self.timeout:
                    break
                time.sleep(LOOK)
            who = rank_names(self.ranks[place] for place in missing)
        except RuntimeError as lost:  # What the store raises, whatever is the matter with it.
            first = str(lost).partition("\n")[0]
            who = f"nobody can say which, as the store of the group is gone too ({first}): most likely rank 0, its host"
        if missing:
            text = (
                f"exchange {self.count} of the {self.name} got no word from other ranks within {self.timeout:g} "
                f"seconds: {who}. They died, hang, or run something else than this rank ({self.ranks[self.rank]}); "
                "their own output says which. The group cannot be used any more: restart all ranks."
            )
        else:
            text = (
                f"exchange {self.count} of the {self.name} failed, and all ranks came to it: some after the "
                f"{self.timeout:g} seconds of another one, or with other values to send. Give a longer timeout, and "
                f"make each {self.name} on all ranks alike. What torch said: {str(error).partition(chr(10))[0]}"
            )
        self._failed = text[0].upper() + text[1:]
        return RankError(self._failed)
