"""Fixed addresses: buffers that look like a tensor, copies into and out of them, results that are the caller's own."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bcg_compiler.compat.fake import storage_key
from bcg_compiler.errors import BreakResultError
from bcg_compiler.plan.memory import span


class Form(NamedTuple):
    """What a tensor looks like, without its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """The form of ``tensor``."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """What a storage for it must hold, in bytes."""
        return span(self.shape, self.strides) * self.dtype.itemsize

    def buffer(self) -> Tensor:
        """A new buffer of this form, in a storage of its own.

        Never an inference tensor: it is written both inside and outside of inference mode.
        """
        with torch.inference_mode(False):
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            return made.requires_grad_(self.grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


def dense(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """These strides, or contiguous ones where elements would share an address."""
    if not _overlap(shape, strides):
        return strides
    made = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        made[dim - 1] = made[dim] * max(shape[dim], 1)
    return tuple(made)


def alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, and never an inference tensor: segments are recorded outside of inference
    mode, where torch lets nobody write one (a KV cache that was allocated in it, say).
    """
    with torch.inference_mode(False):
        found = in_storage(tensor.untyped_storage(), View.of(tensor)) if tensor.is_inference() else tensor.detach()
        return found.requires_grad_(tensor.requires_grad)  # torch chooses some kernels by it


def stand_in(form: object) -> object:
    """A value that looks like what was noted: a buffer without values, or the number itself."""
    return form.buffer() if isinstance(form, Form) else form


def fill_slot(slot: Tensor, value: Tensor) -> None:
    """Copy an argument into its slot, or back, where a plain copy will not do."""
    if value.numel() == 0:
        return
    if overlaps_itself(slot):
        slot, value = _flat(slot), _flat(value)
    slot.copy_(value)


def fill_bridge(bridge: Tensor, value: Tensor, who: str = "A break") -> None:
    """Copy what a break made to the address that the next segment reads. It must look as it did at capture."""
    if not isinstance(value, Tensor):
        raise BreakResultError(f"{who} returned {value!r:.80} where {Form.of(bridge)} was returned at capture.")
    if value.shape != bridge.shape or value.dtype != bridge.dtype or value.device != bridge.device:
        raise BreakResultError(
            f"{who} returned {Form.of(value)}, but {Form.of(bridge)} when its program was captured. A result that "
            f"a segment reads must keep its form from call to call of one shape."
        )
    if value.data_ptr() != bridge.data_ptr() or value.stride() != bridge.stride():
        bridge.copy_(value)


def own(value: Tensor) -> Tensor:
    """A copy that the next replay does not touch, with the same strides (``clone`` may choose others)."""
    if overlaps_itself(value):
        return in_storage(own_storage(value), View.of(value))
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def own_inference(value: Tensor) -> Tensor:
    """A copy as ``own`` makes it, for a value that eager code makes in inference mode."""
    with torch.inference_mode():
        return own(value)


def own_rows(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of the live rows of a value, with the strides that eager code gives them: those of the bucket differ."""
    return own_together(((value, strides),), 1, 1)[0]


def own_together(values: Sequence[tuple[Tensor, tuple[int, ...]]], base: int, live_base: int) -> list[Tensor]:
    """Copies of the live rows of values over one memory, with the strides that eager code gives them, and over one
    memory.

    ``base`` is the smallest of their strides that depend on the number of rows, in the bucket, and ``live_base`` what
    it is for live rows: an offset is so many times one and a rest that does not depend on it.
    """
    first = values[0][0]
    starts = [at // base * live_base + at % base for at in (int(value.storage_offset()) for value, _ in values)]
    if len(values) == 1:
        starts = [0]
    ends = [start + span(value.shape, strides) for start, (value, strides) in zip(starts, values, strict=True)]
    memory = torch.empty(max(ends), dtype=first.dtype, device=first.device)
    made = [memory.as_strided(value.shape, strides, at) for at, (value, strides) in zip(starts, values, strict=True)]
    for copy, (value, _) in zip(made, values, strict=True):
        for dim, stride in enumerate(copy.stride()):
            if stride == 0 and copy.shape[dim] > 1:
                copy, value = copy.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        copy.copy_(value)
    return made


def own_rows_inference(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy as ``own_rows`` makes it, for a value that eager code makes in inference mode."""
    with torch.inference_mode():
        return own_rows(value, strides)


def is_inference(value: Tensor) -> bool:
    """Whether eager code makes the value in an inference region of the graph's own."""
    return value.is_inference() or getattr(value, "bcg_inference", False)


def set_inference(value: Tensor) -> None:
    """Say of a value that ``is_inference``."""
    value.bcg_inference = True  # type: ignore[attr-defined]


def clone_keeps_strides(value: Tensor) -> bool:
    """Whether ``value.clone()`` has the strides of ``value``, as it does for most."""
    return torch.empty_like(value, device="meta").stride() == value.stride()


def own_storage(value: Tensor) -> torch.UntypedStorage:
    """A copy of the storage behind ``value``, for results that share it."""
    return value.untyped_storage().clone()


class View(NamedTuple):
    """How a tensor looks at its memory: ``offset`` in elements; ``conj`` and ``neg`` are applied when it is read."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool
    grad: bool

    @classmethod
    def of(cls, tensor: Tensor, base: Tensor | None = None) -> "View":
        """The view that ``tensor`` is of its storage; with the offset from where ``base`` begins, if given."""
        offset = int(tensor.storage_offset())
        if base is not None:  # no element, no address
            offset = (tensor.data_ptr() - base.data_ptr()) // tensor.element_size() if tensor.numel() else 0
        bits = tensor.is_conj(), tensor.is_neg()
        return cls(tensor.shape, tensor.stride(), offset, tensor.dtype, *bits, tensor.requires_grad)

    def read(self, tensor: Tensor) -> Tensor:
        """``tensor``, which is this view of some memory but for how it is read."""
        if self.conj:
            tensor = tensor.conj()
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor if self.grad or not tensor.requires_grad else tensor.detach()


def in_storage(storage: torch.UntypedStorage, view: View) -> Tensor:
    """The tensor that is this view of ``storage``."""
    found = torch.empty(0, dtype=view.dtype, device=storage.device)
    return view.read(found.set_(storage, view.offset, view.shape, view.stride))


def view_of(argument: Tensor, view: View) -> Tensor:
    """The view of an argument that a program's view of its slot stands for, with the offset from where that begins."""
    if argument.dtype != view.dtype:
        argument = argument.view(view.dtype)
    return view.read(argument.as_strided(view.shape, view.stride, argument.storage_offset() + view.offset))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may have one address (expanded and as_strided tensors)."""
    return _overlap(tensor.shape, tensor.stride())


def _overlap(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    reach = 0
    for stride, size in sorted((st, sz) for sz, st in zip(shape, strides, strict=True) if sz > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def share_storage(a: object, b: object) -> bool:
    """Whether two values are tensors over one storage."""
    return isinstance(a, Tensor) and isinstance(b, Tensor) and storage_key(a) == storage_key(b) is not None


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First address and the one behind the last."""
    start = tensor.data_ptr()
    return start, start + span(tensor.shape, tensor.stride()) * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,))
