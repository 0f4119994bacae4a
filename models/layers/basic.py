"""Embedding, linear, RMS norm and gated MLP. Weights are left empty: a checkpoint or ``serving.build`` fills them."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """A row of ``weight`` ``[vocab, hidden]`` for each id."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Linear(nn.Module):
    """``x @ weight.T (+ bias)``. Weight ``[outputs, inputs]``, as checkpoints hold it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` for ``x`` ``[tokens, hidden]``."""

    def __init__(self, hidden: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, bias)
        self.up_proj = Linear(hidden, width, bias)
        self.down_proj = Linear(width, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
