"""The routed experts of a layer as one thing: called one by one, or all at once over rows in the order of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class ExpertGroup(Protocol):
    """``count`` experts of one shape; rows are ``[rows, hidden]`` in and out."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def widths(self) -> tuple[int, int]:
        """Of their rows, and of what is between their two products."""

    def one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """What one of them makes of some rows."""

    def grouped(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """What each row's own expert makes of it, in one call.

        Rows of expert ``i`` end before ``ends[i]`` (int32 ``[count]``); ``owners`` int16 ``[rows]`` says the same row
        by row, ``count`` behind the last end, where anything may come back.
        """


@dataclass(frozen=True, eq=False)
class GatedExperts:
    """``down(silu(gate(x)) * up(x))``.

    ``gate_up`` ``[count, 2 * width, hidden]``, ``down`` ``[count, hidden, width]``.
    """

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def count(self) -> int:
        """See ``ExpertGroup``."""
        return self.gate_up.shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        """See ``ExpertGroup``."""
        return self.down.shape[1], self.down.shape[2]

    def one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """See ``ExpertGroup``."""
        gate, up = F.linear(rows, self.gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[expert])

    def grouped(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """See ``ExpertGroup``."""
        gate, up = F.grouped_mm(rows, self.gate_up.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)


@dataclass(frozen=True, eq=False)
class ClampedExperts:
    """Experts of GPT-OSS.

    ``gate_up`` ``[count, hidden, 2 * width]`` with a bias ``[count, 2 * width]``, ``down`` ``[count, width, hidden]``
    with a bias ``[count, hidden]``; ``alpha`` and ``limit`` as of ``clamped_gate``.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    alpha: float
    limit: float

    @property
    def count(self) -> int:
        """See ``ExpertGroup``."""
        return self.gate_up.shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        """See ``ExpertGroup``."""
        return self.down.shape[2], self.down.shape[1]

    def one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """See ``ExpertGroup``."""
        gate_up = torch.addmm(self.gate_up_bias[expert], rows, self.gate_up[expert])
        inner = clamped_gate(gate_up, self.alpha, self.limit)
        return torch.addmm(self.down_bias[expert], inner, self.down[expert])

    def grouped(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """See ``ExpertGroup``."""
        owners = owners.long().clamp(max=self.count - 1)
        gate_up = F.grouped_mm(rows, self.gate_up, offs=ends) + self.gate_up_bias[owners]
        inner = clamped_gate(gate_up, self.alpha, self.limit)
        return F.grouped_mm(inner, self.down, offs=ends) + self.down_bias[owners]


def clamped_gate(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The gated unit of GPT-OSS: ``(up + 1) * gate * sigmoid(alpha * gate)``, after a clamp at ``limit``.

    ``gate_up`` ``[..., 2 * width]``, whose even entries are the gate (clamped from above only), and odd ones ``up``.
    """
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)
