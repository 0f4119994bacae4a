"""A small Llama of transformers, three times, with one fault each: docs/walk-through.md finds them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

Built = tuple[LlamaForCausalLM, Callable[[int, torch.Generator], dict[str, Any]]]


class ClippedMLP(LlamaMLP):
    """Scales down what has become too large."""

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().max().item()
        return super().forward(x * min(1.0, 8.0 / largest))


class CentredMLP(LlamaMLP):
    """Takes the mean of the prompt's tokens off each of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


#: How far activations may go. A server sets it for each request.
LIMIT = [1.0]


@torch.library.custom_op("walk::clip", mutates_args=())
def clip(x: Tensor) -> Tensor:
    """An op of somebody's library."""
    return x.clamp(-LIMIT[0], LIMIT[0])


@clip.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class LimitedMLP(LlamaMLP):
    """Keeps its inputs within the limit of the request."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(clip(x))


def _llama(mlp: type[LlamaMLP]) -> Built:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    faulty = mlp(config).eval()
    faulty.load_state_dict(model.model.layers[2].mlp.state_dict())
    model.model.layers[2].mlp = faulty

    def inputs(length: int, generator: torch.Generator) -> dict[str, Any]:
        LIMIT[0] = 0.5 + torch.rand((), generator=generator).item()
        return {"input_ids": torch.randint(0, 256, (1, length), generator=generator), "use_cache": False}

    return model, inputs


def clipped() -> Built:
    """Slow: eight layers, and one that brings a number to the host."""
    return _llama(ClippedMLP)


def centred() -> Built:
    """Other numbers where prompts are padded."""
    return _llama(CentredMLP)


def limited() -> Built:
    """A break where none was; and, declared away, the first request's limit for all of them."""
    return _llama(LimitedMLP)
