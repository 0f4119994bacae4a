"""Mixture of experts as DeepSeek-V2 and V3 have it: a router, routed experts, and experts that every token passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import bcg_compiler as bcg
from bcg_compiler.models.layers.all_to_all import AllToAll, Shard
from bcg_compiler.models.layers.basic import GatedMLP
from bcg_compiler.models.layers.checkpoint import Place
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.expert_parallel import through_experts
from bcg_compiler.models.layers.experts import GatedExperts
from bcg_compiler.models.layers.local_experts import LocalExperts

RoutedExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def routed_experts_over(backend: AllToAll) -> RoutedExperts:
    """The break that sends each live row to its experts, runs them, and brings back the weighted sum.

    It is made once for all layers of a model: the backend is a live object and no argument of a break, and how the
    break behaves at capture is the backend's to say.
    """

    def routed_experts(
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``hidden`` and ``out`` ``[rows, hidden]``, ``ids`` int64 and ``weights`` float32 ``[rows, chosen]``.

        ``gate_up`` ``[experts of this rank, 2 * width, hidden]``, ``down`` ``[experts of this rank, hidden, width]``.
        Only plain routing crosses the break.
        """
        through_experts(backend, hidden, ids, weights, GatedExperts(gate_up, down), out)

    # The name of a break stands in the plan: not where Python happens to have made it.
    routed_experts.__qualname__ = "routed_experts"
    return bcg.eager_break(
        reason="a2a_moe",
        mutates_args=("out",),
        reads_live_rows=True,
        capture_stub=backend.stub,
        barrier=backend.barrier,
        reserve_bytes=backend.reserve_bytes,
        bucket_multiple=backend.bucket_multiple,
    )(routed_experts)


@dataclass(frozen=True)
class ExpertParallel:
    """How a model runs its routed experts: which of them this rank holds, and the break, one for all layers.

    ``local``: what runs them in place of the break, where this rank holds them all and that is possible.
    """

    shard: Shard
    run: RoutedExperts
    local: LocalExperts | None = None

    @classmethod
    def over(cls, backend: AllToAll, local: LocalExperts | None = None) -> ExpertParallel:
        """Over the ranks of a backend."""
        return cls(backend.shard, routed_experts_over(backend), local)


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen.

    ``chosen`` of ``experts``, out of the best ``best_groups`` of ``groups`` groups (1: all). ``bias_corrected``
    (DeepSeek-V3): scores are sigmoids, a learned bias is added to choose but not to weigh, and a group counts as much
    as its two best experts. Otherwise (DeepSeek-V2) scores are a softmax, and a group counts as much as its best one.
    ``normalised``: weights of a token add up to ``factor``. Raises ``ModelError`` for what cannot be.
    """

    experts: int
    chosen: int
    groups: int
    best_groups: int
    bias_corrected: bool
    normalised: bool
    factor: float

    def __post_init__(self) -> None:
        if self.chosen > self.experts:
            raise ModelError(f"Each token goes to {self.chosen} experts and there are {self.experts}.")
        if self.experts % self.groups or not 1 <= self.best_groups <= self.groups:
            raise ModelError(
                f"{self.experts} experts in {self.groups} groups, of which the best {self.best_groups} are used: "
                f"groups must be equal, and at least one and at most all of them used."
            )
        if self.bias_corrected and self.best_groups < self.groups == self.experts:
            raise ModelError("A group counts as much as its two best experts, and these are groups of one expert.")
        if self.chosen > self.best_groups * self.experts // self.groups:
            raise ModelError(
                f"Each token goes to {self.chosen} experts of its best {self.best_groups} groups, which have "
                f"{self.best_groups * self.experts // self.groups}."
            )


class Router(nn.Module):
    """Which experts each token goes to, and what each counts. Computed in float32, and part of a segment."""

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        weight = torch.empty(routing.experts, hidden, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        if routing.bias_corrected:
            bias = torch.empty(routing.experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` ``[rows, hidden]``; ids int64 ``[rows, chosen]``, and weights float32 of the same shape."""
        routing = self.routing
        logits = F.linear(x.float(), self.weight)
        if routing.bias_corrected:
            scores = logits.sigmoid()
            ranked = self._within_best_groups(scores + self.e_score_correction_bias)
        else:
            scores = logits.softmax(-1)
            ranked = self._within_best_groups(scores)
        ids = ranked.topk(routing.chosen, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * routing.factor

    def _within_best_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        routing = self.routing
        if routing.best_groups == routing.groups:
            return ranked
        grouped = ranked.unflatten(-1, (routing.groups, -1))
        of_group = grouped.topk(2, dim=-1).values.sum(-1) if routing.bias_corrected else grouped.amax(-1)
        best = of_group.topk(routing.best_groups, dim=-1, sorted=False).indices
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


class Experts(nn.Module):
    """The weights of the routed experts that this rank holds, all in two tensors."""

    def __init__(self, hidden: int, width: int, parallel: ExpertParallel) -> None:
        super().__init__()
        self.shard, self.run, self.local = parallel.shard, parallel.run, parallel.local
        count = self.shard.count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width), requires_grad=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``x`` ``[rows, hidden]``, ``ids`` and ``weights`` of ``Router``; ``[rows, hidden]``."""
        out = torch.empty_like(x)
        run = self.run if self.local is None else self.local.gated
        run(x, ids, weights, self.gate_up_proj, self.down_proj, out)
        return out

    def checkpoint_places(self) -> Mapping[str, Place]:
        """A checkpoint holds the three matrices of each expert as tensors of their own; those of others stay there."""
        _, hidden, width = self.down_proj.shape
        places = {}
        for i in range(self.shard.experts):
            local = i - self.shard.first
            mine = 0 <= local < self.shard.count
            places[f"{i}.gate_proj.weight"] = Place(
                (width, hidden), self.gate_up_proj[local, :width].copy_ if mine else None
            )
            places[f"{i}.up_proj.weight"] = Place(
                (width, hidden), self.gate_up_proj[local, width:].copy_ if mine else None
            )
            places[f"{i}.down_proj.weight"] = Place((hidden, width), self.down_proj[local].copy_ if mine else None)
        return places


class MoE(nn.Module):
    """Routed experts plus the shared ones."""

    def __init__(self, hidden: int, width: int, shared: int, routing: Routing, parallel: ExpertParallel) -> None:
        super().__init__()
        self.gate = Router(hidden, routing)
        self.experts = Experts(hidden, width, parallel)
        self.shared_experts = GatedMLP(hidden, width * shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` in and out."""
        ids, weights = self.gate(x)
        return self.experts(x, ids, weights) + self.shared_experts(x)
