"""A serving model of the zoo or of a folder: the whole of it, or what one rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bcg_compiler.debug.errors import building
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.errors import OptionError
from bcg_compiler.models import serving, zoo

#: Tokens of a page of the caches.
PAGE_SIZE = 16


@dataclass(frozen=True)
class ServedModel:
    """Which serving model to build, and how.

    ``fields`` are those of its configuration; ``folder`` is where its weights are, ``None`` for random ones.
    """

    name: str
    fields: Mapping[str, Any]
    folder: Path | None
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        *,
        layers: int | None = None,
        config: Mapping[str, Any] | None = None,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> ServedModel:
        """The model of a zoo name or a folder. Raises what ``zoo.fields`` does, and ``OptionError`` for other layers or
        another configuration than that of a folder's weights.
        """
        with building(name):
            fields = zoo.fields(name, layers=layers, config=config)
        folder = Path(name) if Path(name).is_dir() and any(Path(name).glob("*.safetensors")) else None
        if folder is not None and (layers is not None or config):
            raise OptionError(f"{name} has weights, which are of its own layers and configuration: leave out both.")
        return cls(name, fields, folder, dtype, device, seed)

    @property
    def layers(self) -> int:
        """How many it has."""
        return int(self.fields["num_hidden_layers"])

    @property
    def label(self) -> str:
        """One line for people."""
        weights = "weights of the folder" if self.folder is not None else f"random weights (seed {self.seed})"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {self.fields['model_type']} of {self.layers} layers, {weights}, {dtype}"

    def build(self, pages: int, ranks: Ranks | None = None) -> Any:
        """All of it, or what one of ``ranks`` holds, with the same weights."""
        how: dict[str, Any] = dict(pages=pages, page_size=PAGE_SIZE, dtype=self.dtype, device=self.device)
        if ranks is not None:
            how |= share_of(ranks, self.layers)
        with building(self.name):
            if self.folder is not None:
                return serving.load(self.folder, **how)
            return serving.build(self.fields, seed=self.seed, **how)


def share_of(ranks: Ranks, layers: int) -> dict[str, Any]:
    """What to build of a model of so many layers on a rank: arguments of ``serving.empty``."""
    how: dict[str, Any] = dict(stage=ranks.layers(layers), context_parallel=ranks.layout is not None)
    if ranks.experts is not None:
        how |= dict(all_to_all=ranks.parallel.all_to_all, group=ranks.experts)
    return how
