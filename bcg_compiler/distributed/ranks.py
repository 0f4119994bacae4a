"""Which ranks a rank works with: the groups of a layout, and its place in them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch.distributed as dist

from bcg_compiler.distributed.agreement import agree
from bcg_compiler.distributed.context_parallel import Zigzag
from bcg_compiler.distributed.exchange import Exchange
from bcg_compiler.distributed.gather import GroupRows, RowGather
from bcg_compiler.distributed.pipeline import Stage
from bcg_compiler.distributed.rules import Parallel, evaluate
from bcg_compiler.errors import RankError

#: Seconds that ranks wait for the layouts of each other.
_AGREE = 120.0


@dataclass(frozen=True, eq=False)
class Ranks:
    """One rank's place. The default is a process by itself.

    Attributes:
        parallel: the layout.
        world: all ranks of the layout, ``None`` for a process by itself.
        layout: how rows are shared out over context-parallel ranks, ``None`` where they are not.
        gather: gathers rows of those ranks.
        pipeline: the ranks of one pipeline, of which ``stage`` is this rank's place.
        vote: the ranks that have the same plan, and vote on replay together.
        experts: the ranks that share experts out.
    """

    parallel: Parallel = field(default_factory=Parallel)
    world: dist.ProcessGroup | None = None
    layout: Zigzag | None = None
    gather: RowGather | None = None
    pipeline: dist.ProcessGroup | None = None
    stage: int = 0
    vote: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if (self.layout is None) != (self.gather is None):
            raise RankError("Context parallelism takes a layout and what gathers rows: give both, or neither.")
        if self.layout is not None and self.gather is not None and self.layout.size != self.gather.size:
            raise RankError(
                f"The layout is over {self.layout.size} ranks, and rows are gathered of {self.gather.size}."
            )

    @property
    def before(self) -> int | None:
        """The place in ``pipeline`` of the stage before, ``None`` on the first one."""
        return self.stage - 1 if self.stage else None

    @property
    def after(self) -> int | None:
        """The place in ``pipeline`` of the next stage, ``None`` on the last one."""
        return self.stage + 1 if self.stage + 1 < self.parallel.pp else None

    @property
    def refusal(self) -> tuple[str, str] | None:
        """The first rule that the layout breaks, as code and sentence: then everything runs eagerly, on all ranks."""
        broken = evaluate(self.parallel)
        return (broken[0].code, broken[0].text) if broken else None

    def check(self) -> None:
        """Raise ``RankError`` if the processes are not those any more that this place is among."""
        if self.world is None:
            return
        wanted = f"a group of {self.world.size()} ranks. Join and capture again, on all ranks, after such a change."
        if not dist.is_initialized():
            raise RankError(f"The process group is destroyed, and this rank has its place in {wanted}")
        if dist.group.WORLD is not self.world:
            raise RankError(f"The process group is another one now, of {dist.get_world_size()} ranks, than {wanted}")

    def layers(self, layers: int) -> Stage:
        """This rank's even share of the layers of a model."""
        return Stage.even(layers, self.parallel.pp, self.stage)

    @classmethod
    def join(
        cls, parallel: Parallel, *, alignment: int | None = None, multiple: int = 1, timeout: float | None = None
    ) -> Ranks:
        """The place of this process in a layout over all ranks. Collective: all ranks call it with the same layout.

        Ranks count through the context-parallel ranks of a stage first, then through the stages of a pipeline, then
        through the replicas. ``alignment`` and ``multiple`` as of ``Zigzag``. Raises ``RankError`` if there are more or
        fewer ranks than the layout has, for experts that are shared out over a number of ranks that does not divide
        those of a stage, and on all ranks if their layouts differ, or one does not come within ``timeout`` seconds.
        """
        dp, pp, cp, ep = parallel.dp, parallel.pp, parallel.cp, parallel.ep
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            # Before any group is made: ranks that make other groups wait for each other.
            with Exchange(None, _AGREE if timeout is None else timeout, "layout") as everyone:
                agree(everyone, {name: str(value) for name, value in vars(parallel).items()})
        if dp * pp * cp != world:
            raise RankError(
                f"dp={dp}, pp={pp} and cp={cp} are {dp * pp * cp} ranks, and there are {world}: start as many "
                "processes."
            )
        if (dp * cp) % ep:
            raise RankError(f"ep={ep} does not divide the {dp * cp} ranks of a stage (dp={dp}, cp={cp}).")
        if world == 1:
            return cls(parallel)
        rank = dist.get_rank()
        place = dict(dp=rank // (pp * cp), pp=rank // cp % pp, cp=rank % cp)

        def number(d: int, p: int, c: int) -> int:
            return (d * pp + p) * cp + c

        stages = [[number(d, p, c) for d in range(dp) for c in range(cp)] for p in range(pp)]

        def group(shares: list[list[int]]) -> dist.ProcessGroup:
            """This rank's group, of groups that all ranks together make of all ranks."""
            limit = None if timeout is None else datetime.timedelta(seconds=timeout)
            mine, _ = dist.new_subgroups_by_enumeration(shares, timeout=limit)
            assert mine is not None
            return mine

        context = group([[number(d, p, c) for c in range(cp)] for d in range(dp) for p in range(pp)])
        pipeline = group([[number(d, p, c) for p in range(pp)] for d in range(dp) for c in range(cp)])
        vote = group(stages)
        experts = group([stage[i : i + ep] for stage in stages for i in range(0, len(stage), ep)])
        return cls(
            parallel,
            world=dist.group.WORLD,
            layout=Zigzag(cp, alignment, multiple=multiple) if cp > 1 else None,
            gather=GroupRows(context) if cp > 1 else None,
            pipeline=pipeline if pp > 1 else None,
            stage=place["pp"],
            vote=vote if dp * cp > 1 else None,
            experts=experts if ep > 1 else None,
        )
