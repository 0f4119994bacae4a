"""The Triton kernel of ``fused_fill``. Imported only where Triton is installed."""

import triton
import triton.language as tl

_NUMBERS = [f"{name}{i}" for i in range(8) for name in ("live", "size")]


@triton.jit
def _fill_one(slot, given, live, size, at):  # type: ignore[no-untyped-def]
    """Elements below ``live`` come from ``given``, the others are 0."""
    tl.store(slot + at, tl.load(given + at, mask=at < live, other=0), mask=at < size)


@triton.jit(do_not_specialize=_NUMBERS)
def fill(  # type: ignore[no-untyped-def]
    slot0,
    given0,
    live0,
    size0,
    slot1,
    given1,
    live1,
    size1,
    slot2,
    given2,
    live2,
    size2,
    slot3,
    given3,
    live3,
    size3,
    slot4,
    given4,
    live4,
    size4,
    slot5,
    given5,
    live5,
    size5,
    slot6,
    given6,
    live6,
    size6,
    slot7,
    given7,
    live7,
    size7,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fills the first ``COUNT`` slots, each of ``size`` elements, of which the first ``live`` are given."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if COUNT > 0:
        _fill_one(slot0, given0, live0, size0, at)
    if COUNT > 1:
        _fill_one(slot1, given1, live1, size1, at)
    if COUNT > 2:
        _fill_one(slot2, given2, live2, size2, at)
    if COUNT > 3:
        _fill_one(slot3, given3, live3, size3, at)
    if COUNT > 4:
        _fill_one(slot4, given4, live4, size4, at)
    if COUNT > 5:
        _fill_one(slot5, given5, live5, size5, at)
    if COUNT > 6:
        _fill_one(slot6, given6, live6, size6, at)
    if COUNT > 7:
        _fill_one(slot7, given7, live7, size7, at)
