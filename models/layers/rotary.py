"""Rotary position embedding (Su et al., 2021), with YaRN for contexts beyond those of training (Peng et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bcg_compiler.models.layers.errors import ModelError


@dataclass(frozen=True)
class RotaryConfig:
    """Angles of a rotary embedding.

    ``width`` counts the rotated entries of a head. ``factor`` is how many times longer than ``trained_length`` tokens
    contexts may be; 1 is no YaRN. Frequencies that turn more than ``beta_fast`` times within the trained length stay,
    those that turn less than ``beta_slow`` times are slowed down by the factor; ``truncate`` rounds the bounds between.
    ``amplitude`` multiplies cosines and sines; ``score_factor`` multiplies attention scores.
    """

    width: int
    theta: float
    factor: float = 1.0
    trained_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    score_factor: float = 1.0

    @classmethod
    def of(cls, config: Mapping[str, Any], width: int) -> RotaryConfig:
        """From the fields of a ``config.json``: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` as of old.

        Raises ``ModelError`` for a kind other than "default" and "yarn".
        """
        fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
        kind = fields.get("rope_type") or fields.get("type") or "default"
        if kind == "default":
            return cls(width, theta)
        if kind != "yarn":
            raise ModelError(f"rope_type is {kind!r}: known are 'default' and 'yarn'.")
        trained = int(fields.get("original_max_position_embeddings") or config["max_position_embeddings"])
        factor = float(fields.get("factor") or config["max_position_embeddings"] / trained)
        mscale, mscale_all = fields.get("mscale"), fields.get("mscale_all_dim")
        amplitude = fields.get("attention_factor")
        if amplitude is None:
            # With both given, the part that they share is in the scores (below).
            amplitude = _growth(factor, mscale or 1.0) / _growth(factor, mscale_all or 1.0)
            amplitude = amplitude if mscale and mscale_all else _growth(factor, 1.0)
        return cls(
            width,
            theta,
            factor,
            trained,
            float(fields.get("beta_fast") or 32),
            float(fields.get("beta_slow") or 1),
            bool(fields.get("truncate", True)),
            float(amplitude),
            _growth(factor, mscale_all) ** 2 if mscale_all else 1.0,
        )

    def frequencies(self) -> torch.Tensor:
        """Radians a position: float32 ``[width / 2]``, on the CPU."""
        exponents = torch.arange(0, self.width, 2, dtype=torch.float32, device="cpu") / self.width
        frequencies = 1.0 / self.theta**exponents
        if self.factor == 1.0:
            return frequencies
        low, high = self._pair_that_turns(self.beta_fast), self._pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        steps = torch.arange(self.width // 2, dtype=torch.float32, device="cpu")
        slowed = ((steps - low) / (high - low or 0.001)).clamp(0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)

    def _pair_that_turns(self, times: float) -> float:
        """Which pair of entries turns so many times within the trained length: not a whole number."""
        return self.width * math.log(self.trained_length / (times * 2 * math.pi)) / (2 * math.log(self.theta))


def _growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


#: Cosines and sines ``[tokens, 1, width / 2]`` of one batch, the same for all heads.
Angles = tuple[torch.Tensor, torch.Tensor]


class Rotary(nn.Module):
    """The cosines and sines of a batch: computed once a forward from its positions, used by all layers."""

    frequencies: torch.Tensor

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.amplitude = config.amplitude
        # Made on the CPU, so that they are the same on every device. On "meta" torch.tensor gives a meta tensor.
        self.register_buffer(
            "frequencies", torch.tensor(config.frequencies().tolist(), dtype=torch.float32), persistent=False
        )

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Float32 angles, results in ``dtype``. ``positions``: int64 ``[tokens]``."""
        angles = positions[:, None, None].float() * self.frequencies.float()
        return (angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype)


def rotate(x: torch.Tensor, angles: Angles, interleaved: bool) -> torch.Tensor:
    """Turn the pairs of ``x`` ``[tokens, heads, width]`` by the angles of its token.

    ``interleaved``: a pair are neighbours, ``(x0, x1), (x2, x3), ...``; otherwise an entry and the one half a width
    behind it. The result has first entries of pairs first in both cases: only products of two such results matter.
    """
    cos, sin = angles
    one, other = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
