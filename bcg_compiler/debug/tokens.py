"""Which sizes of a model's inputs are its number of tokens, and how Dynamo is told to leave them open."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bcg_compiler.models.zoo import MakeInputs

#: The dimension of an input that grows with the prompt, by the name of the input.
TokenDims = Mapping[str, int]


def token_dims(make_inputs: MakeInputs) -> TokenDims:
    """The dimensions whose size is another one for another prompt; none where inputs have one size only."""
    one, other = (make_inputs(length, torch.Generator().manual_seed(0)) for length in (2, 3))
    return {
        name: dim
        for name, value in one.items()
        if isinstance(value, torch.Tensor)
        for dim, (size, grown) in enumerate(zip(value.shape, other[name].shape, strict=True))
        if size != grown
    }


def tokens(inputs: Mapping[str, Any], dims: TokenDims) -> int:
    """How many tokens these inputs have; 0 if no size of theirs depends on the prompt."""
    return max((inputs[name].shape[dim] for name, dim in dims.items()), default=0)


def tokens_of(make_inputs: MakeInputs, lengths: Iterable[int]) -> list[int]:
    """How many tokens prompts of these lengths have: a model with learned positions cuts long ones."""
    dims = token_dims(make_inputs)
    made = (make_inputs(length, torch.Generator().manual_seed(0)) for length in lengths)
    return [tokens(inputs, dims) for inputs in made] if dims else [*lengths]


def mark_open(inputs: Mapping[str, Any], dims: TokenDims) -> None:
    """Have Dynamo leave the number of tokens open from the first call on.

    What ``torch._dynamo.mark_dynamic`` does, but no error where the model fixes its number of tokens: the plan says so.
    """
    for name, dim in dims.items():
        torch._dynamo.maybe_mark_dynamic(inputs[name], dim)
