"""Routed experts of a rank that holds all of them, as part of a segment: on GPUs, by a few grouped products.

Nothing of it is read on the host, so that a graph can hold it. What differs from call to call is which rows count: a
plan says that to all layers at once, and rows that do not count go to no expert.
"""

from __future__ import annotations

from typing import Any, Self

import torch

import bcg_compiler as bcg
from bcg_compiler.models.layers import grouped, kernels
from bcg_compiler.models.layers.experts import ClampedExperts, ExpertGroup, GatedExperts


def _plan(self: LocalExperts) -> None:
    self.prepare()


class LocalExperts:
    """For all layers of a model that run on ``device``. Hold it as long as what is compiled with it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._padded: dict[int, torch.Tensor] = {}
        self._now: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model's copy plans for itself."""
        return type(self)(self.device)

    def prepare(self) -> None:
        """The plan of a call, or of a capture. Without a ladder all rows count."""
        context = bcg.current_context()
        rows = context.bucket_rows
        if rows is None:
            self._now = None
            return
        if rows not in self._padded and (context.capturing or context.live_rows < rows):
            with torch.inference_mode(False):  # or it could not be written outside of inference mode
                self._padded[rows] = torch.empty(rows, dtype=torch.bool, device=self.device)
        self._now = self._padded.get(rows)
        if self._now is not None:
            self._now[: context.live_rows] = False
            self._now[context.live_rows :] = True

    @bcg.eager_break(plan=_plan, reason="a2a_moe", mutates_args=("out",), reads_live_rows=True, writes_every_row=True)
    def gated(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``moe.routed_experts`` without a journey: arguments are its own. Padded rows of ``out`` are zero."""
        self._run(hidden, ids, weights, GatedExperts(gate_up, down), out)

    @bcg.eager_break(plan=_plan, reason="a2a_moe", mutates_args=("out",), reads_live_rows=True, writes_every_row=True)
    def clamped(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor,
        down: torch.Tensor,
        down_bias: torch.Tensor,
        out: torch.Tensor,
        alpha: float,
        limit: float,
    ) -> None:
        """``gpt_oss.clamped_experts``: arguments are its own. Padded rows of ``out`` are zero."""
        self._run(hidden, ids, weights, ClampedExperts(gate_up, gate_up_bias, down, down_bias, alpha, limit), out)

    def _run(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: ExpertGroup, out: torch.Tensor
    ) -> None:
        if self._now is not None:
            ids = ids.masked_fill(self._now[:, None], -1)
        kernels.run("experts", hidden.device, hidden, ids, weights, group, out)


def local_experts(count: int, widths: tuple[int, int]) -> LocalExperts | None:
    """For ``count`` experts of these ``widths`` (``ExpertGroup``) in the default dtype on the default device.

    ``None`` where grouped products are not there or cannot do it (``kernels.choices``): then the host reads how many
    rows each expert gets, and the experts are a break.
    """
    like = torch.empty(0)
    lacks = grouped.unavailable(like.device) or grouped.cannot(like.dtype, count, widths)
    return None if lacks else LocalExperts(like.device)
