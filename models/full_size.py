"""The published models at full size, each as a factory of model and inputs: to be planned, not to be run.

    bcg explain bcg_compiler.models.full_size:deepseek_v32

makes them of tensors without data and prints the steps that a prefill has. Weights of that size would take up to a
terabyte; call a factory under ``torch.device("meta")`` to have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bcg_compiler.models import serving

#: Tokens of a page and pages of the cache: room for 65,536 tokens.
PAGE_SIZE, PAGES = 64, 1024

MakeInputs = Callable[[int, torch.Generator], dict[str, torch.Tensor]]


def deepseek_v3(layers: int | None = None) -> tuple[nn.Module, MakeInputs]:
    """DeepSeek-V3: 61 layers, dense attention, 256 experts."""
    return _full_size("deepseek_v3", layers)


def deepseek_v32(layers: int | None = None) -> tuple[nn.Module, MakeInputs]:
    """DeepSeek-V3.2: DeepSeek-V3 with sparse attention, an indexer in each layer."""
    return _full_size("deepseek_v32", layers)


def glm5(layers: int | None = None) -> tuple[nn.Module, MakeInputs]:
    """GLM-5: 78 layers, sparse attention, 256 experts."""
    return _full_size("glm_moe_dsa", layers)


def gpt_oss(layers: int | None = None) -> tuple[nn.Module, MakeInputs]:
    """gpt-oss-120b: 36 layers, every other one with a sliding window, 128 experts."""
    return _full_size("gpt_oss", layers)


def _full_size(family: str, layers: int | None) -> tuple[nn.Module, MakeInputs]:
    """With the fields that transformers has for a family where a checkpoint does not say otherwise: the published ones.

    ``layers``: only the first ones.
    Raises ``ImportError`` if transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError('full-size models need transformers: pip install "bcg-compiler[models]"') from error
    fields: dict[str, Any] = transformers.AutoConfig.for_model(family).to_dict()
    if layers is not None:
        count = fields["num_hidden_layers"]
        fields |= {k: v[:layers] for k, v in fields.items() if isinstance(v, list) and len(v) == count}
        fields["num_hidden_layers"] = layers
    device = torch.get_default_device()
    model = serving.empty(fields, pages=PAGES, page_size=PAGE_SIZE, device=device)

    def make_inputs(length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Flattened new tokens of a batch, which is not published: bodies of breaks cannot run."""
        ids = torch.randint(0, fields["vocab_size"], (length,), generator=generator, device="cpu")
        return {"input_ids": ids, "positions": torch.arange(length, device="cpu")}

    return model, make_inputs
