"""Fills several slots with one kernel: live rows are copied, padded ones cleared. For CUDA, where Triton is installed.

Measured on an H200 for three inputs of 256 rows: 22 µs of the host's time in place of 74 µs for a copy and a fill each,
and 72 µs for torch's foreach operations; for one input the two cost the same.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor

from bcg_compiler.runtime import memory

#: The kernel takes so many slots.
MOST = 8
BLOCK = 1024


def can_fuse(slots: Sequence[Tensor]) -> bool:
    """Whether one kernel can fill these slots, whose outermost dimension is that of rows."""
    plain = all(slot.is_cuda and slot.is_contiguous() and slot.numel() > 0 for slot in slots)
    return 2 <= len(slots) <= MOST and plain and find_spec("triton") is not None


class FusedFill:
    """``fill(rows, *arguments)`` fills the slots that it was made for."""

    def __init__(self, slots: Sequence[Tensor]) -> None:
        from bcg_compiler.runtime.fill_kernel import fill

        self._kernel = fill
        self._slots = slots
        self._widths = [slot.stride(0) for slot in slots]  # elements a row
        self._grid = (-(-max(slot.numel() for slot in slots) // BLOCK),)
        self._unused = (slots[0], slots[0], 0, 0) * (MOST - len(slots))
        self(0, *slots)  # compiled now, and not at the first call

    def __call__(self, rows: int, *arguments: Tensor) -> None:
        if not all([argument.is_contiguous() for argument in arguments]):
            for slot, argument in zip(self._slots, arguments, strict=True):
                slot[rows:].zero_()
                memory.fill_slot(slot[:rows], argument)
            return
        given = chain.from_iterable(
            (slot, argument, rows * width, slot.numel())
            for slot, argument, width in zip(self._slots, arguments, self._widths, strict=True)
        )
        with torch.cuda.device(self._slots[0].device):
            self._kernel[self._grid](*given, *self._unused, COUNT=len(self._slots), BLOCK=BLOCK)
