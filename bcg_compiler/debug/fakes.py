"""A model and its inputs without data: tensors that have a shape, a dtype and a device and take no memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bcg_compiler.compat.fake import FakeTensor, FakeTensorMode
from bcg_compiler.models.zoo import ModelNotFound, ZooModel, build


def build_on_meta(name: str, **given: Any) -> ZooModel:
    """Build a model as ``zoo.build`` does, without drawing or loading its weights.

    A constructor that computes with its own weights cannot run without them: such a model is built, then emptied.
    """
    try:
        # A model moved to "meta" would lose its ties: two names of one weight would become two weights.
        with torch.device("meta"):
            return build(name, device="meta", **given)
    except (ModelNotFound, ImportError):
        raise
    except Exception:
        return build(name, device="meta", **given)


class Faker:
    """Turns tensors into fakes on ``device``. Tensors that share a storage, or are one, still do and are."""

    def __init__(self, device: torch.device | str) -> None:
        # A model may hold real tensors where nobody sees them; they become fakes when they are used.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = torch.device(device)
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace, in place, every tensor that the modules of ``model`` hold: parameters, buffers and others."""
        for module in model.modules():
            held = vars(module)
            for name, value in held.items():
                held[name] = self.values(value)
        return model

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, with fakes."""
        return {name: self.values(value) for name, value in inputs.items()}

    def values(self, value: Any) -> Any:
        """``value`` with fakes in place of the tensors in its lists, tuples and dictionaries."""
        return tree_map_only(torch.Tensor, self._fake, value)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            # The original is kept: its id must not be given to another tensor.
            self._made[id(tensor)] = (tensor, self._new(tensor))
        return self._made[id(tensor)][1]

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = FakeTensor(self.mode, tensor.detach().to("meta"), self.device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake
