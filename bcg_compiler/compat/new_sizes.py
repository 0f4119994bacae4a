"""Sizes in the fakes of break functions that nobody knows before the body has run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.fake_impl import allocate_size, set_ctx_getter

from bcg_compiler.compat.fake import FakeTensorMode, fake_mode_of
from bcg_compiler.errors import BreakArgumentError


@contextmanager
def sizes_from_bodies(given: Any) -> Iterator[None]:
    """Within, ``torch.library.get_ctx()`` is what it is in the fake of a custom op, for a call with ``given``: its
    ``new_dynamic_size()`` is a new symbol.
    """
    mode = fake_mode_of(given)
    with set_ctx_getter(lambda: _NewSizes(mode)):
        yield


class _NewSizes:
    """torch's own context refuses where Dynamo was not told to go on at such sizes: a break goes on in any case."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        self._env = None if mode is None else mode.shape_env

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> torch.SymInt:
        """A symbol for a size from ``min`` to ``max``, both included."""
        if self._env is None:
            raise BreakArgumentError(
                "A fake= asks for a size that only the body knows, and the fake tensors that it is given have no "
                "symbols: make them under FakeTensorMode(shape_env=ShapeEnv())."
            )
        return allocate_size(self._env, min, max)
