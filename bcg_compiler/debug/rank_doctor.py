"""Whether ranks can work together: they come, they have the same environment, and those that vote have one plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from bcg_compiler.buckets import Ladder
from bcg_compiler.debug import screen
from bcg_compiler.debug.doctor import Health
from bcg_compiler.debug.fakes import Faker
from bcg_compiler.debug.rank_run import gathered
from bcg_compiler.debug.served import PAGE_SIZE, ServedModel, share_of
from bcg_compiler.debug.words import count
from bcg_compiler.distributed.agreement import agree
from bcg_compiler.distributed.exchange import Exchange, rank_names
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.errors import RankError
from bcg_compiler.models import serving
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.plan import plan_hash

#: Variables of the environment that must be the same on all ranks.
PREFIXES = ("NCCL_", "TORCH_NCCL_")


@dataclass(frozen=True)
class RanksHealth:
    """What ``bcg doctor --ranks`` found.

    Attributes:
        ranks: how many came.
        same: what must be the same on all ranks, by name, as it is on this one.
        differences: what is not, in words, with the ranks.
        plans: pipeline stage → hash of the plan → the ranks that have it. Empty if no model was asked about.
    """

    ranks: int
    same: Mapping[str, str]
    differences: tuple[str, ...]
    plans: Mapping[int, Mapping[str, tuple[int, ...]]]

    @property
    def healthy(self) -> bool:
        """Whether all ranks agree."""
        return not self.differences


def environment(health: Health) -> dict[str, str]:
    """What must be the same on all ranks: versions, devices, and what NCCL is told."""
    devices = "; ".join(health.devices) or "none"
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return {**health.versions, "triton": health.libraries["triton"] or "none", "CUDA devices": devices, **told}


def examine_ranks(health: Health, timeout: float, ranks: Ranks | None = None, plan: str = "") -> RanksHealth:
    """Compare all ranks of the process group; all of them call this together.

    ``plan``: the hash of this rank's plan, which must be that of all ranks of ``ranks.vote``. Raises ``RankError`` on
    the ranks that are there if one does not come within ``timeout`` seconds.
    """
    mine = environment(health)
    differences = []
    with Exchange(None, timeout, "doctor") as everyone:
        everyone.gather(torch.zeros(1))
        if said := _disagreement(everyone, mine):
            differences.append(said)
        number = len(everyone.ranks)
    if ranks is not None and ranks.vote is not None and plan:
        with Exchange(ranks.vote, timeout, "doctor of plans") as voters:
            if said := _disagreement(voters, {f"plan of stage {ranks.stage}": plan}):
                differences.append(said)
    told: list[tuple[list[str], int, str]] = gathered((differences, 0 if ranks is None else ranks.stage, plan))
    plans: dict[int, dict[str, tuple[int, ...]]] = {}
    for rank, (_, stage, hashed) in enumerate(told):
        if hashed:
            of_stage = plans.setdefault(stage, {})
            of_stage[hashed] = (*of_stage.get(hashed, ()), rank)
    return RanksHealth(number, mine, tuple(dict.fromkeys(said for one in told for said in one[0])), plans)


def _disagreement(exchange: Exchange, config: Mapping[str, str]) -> str:
    try:
        agree(exchange, config)
    except RankError as error:
        return str(error)
    return ""


def plan_of(model: ServedModel, ranks: Ranks, ladder: Ladder) -> str:
    """The hash of the plan of what a rank holds of a model, made without weights and without running anything."""
    faker = Faker(model.device)
    how = dict(pages=1, page_size=PAGE_SIZE, dtype=model.dtype, device="meta", **share_of(ranks, model.layers))
    held = faker.model(serving.empty(model.fields, **how))
    runner = serving.runner(held, ladder=ladder, ranks=ranks, options={"segment_compiler": "eager"})
    with closing(runner), faker.mode:
        return plan_hash(runner.compile(PagePool(1, PAGE_SIZE, model.device).idle()))


def ranks_health_view(found: RanksHealth) -> Group:
    """For a terminal."""
    parts: list[RenderableType] = [Text(f"{count(found.ranks, 'rank')} came, and did an all-gather.")]
    if not found.differences:
        parts.append(screen.header(**{"alike": ", ".join(f"{k} {v}" for k, v in found.same.items())}))
    for stage, hashes in sorted(found.plans.items()):
        for hashed, ranks in hashes.items():
            parts.append(Text(f"plan of stage {stage}: {hashed} on {rank_names(ranks)}"))
    parts += [Text(said, style="bold red") for said in found.differences]
    return Group(*parts)
