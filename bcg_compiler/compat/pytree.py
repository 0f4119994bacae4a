"""Classes of ours that torch takes apart into their tensors."""

from typing import Any

from torch.utils import _pytree


def register_dataclass(cls: type[Any]) -> None:
    """Make a dataclass a pytree of its fields."""
    _pytree.register_dataclass(cls)
