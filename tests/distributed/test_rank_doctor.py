"""Ranks that cannot work together are told apart: by their environment, and by the plans of those that vote."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bcg_compiler.debug.doctor import Health
from bcg_compiler.debug.rank_doctor import RanksHealth, examine_ranks, ranks_health_view
from bcg_compiler.debug.screen import console
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]

HEALTH = Health({"torch": torch.__version__}, (), {"triton": ""}, {}, ())


def test_what_differs_is_named_on_all_ranks(on_ranks: OnRanks) -> None:
    on_ranks(4, differing)


def differing(rank: int, ranks: int, folder: Path) -> None:
    """Two stages of two ranks each: stage 0 has ranks 0 and 2."""
    joined: Any = Ranks.join(Parallel(dp=2, pp=2))
    for name in [name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_"))]:
        del os.environ[name]
    os.environ["NCCL_DEBUG"] = "INFO"

    alike = examine_ranks(HEALTH, 30, joined, f"plan {joined.stage}")
    assert alike.healthy and alike.ranks == 4 and alike.same["NCCL_DEBUG"] == "INFO"
    assert alike.plans == {0: {"plan 0": (0, 2)}, 1: {"plan 1": (1, 3)}}
    assert "alike torch" in words(alike) and "plan of stage 1: plan 1 on ranks 1 and 3" in words(alike)

    if rank == 2:
        os.environ["NCCL_DEBUG"] = "WARN"
    found = examine_ranks(HEALTH, 30, joined, "mine" if rank == 3 else f"plan {joined.stage}")
    environment, plans = found.differences
    assert not found.healthy and "Ranks 0, 1, 2, 3 do not agree" in environment
    assert "NCCL_DEBUG: INFO on ranks 0, 1 and 3; WARN on rank 2" in environment and "torch" not in environment
    assert "Ranks 1, 3 do not agree" in plans and "plan of stage 1: plan 1 on rank 1; mine on rank 3" in plans
    assert found.plans == {0: {"plan 0": (0, 2)}, 1: {"plan 1": (1,), "mine": (3,)}}
    assert "alike torch" not in words(found) and "do not agree" in words(found)


def words(found: RanksHealth) -> str:
    shown = console()
    with shown.capture() as captured:
        shown.print(ranks_health_view(found))
    return " ".join(captured.get().split())
