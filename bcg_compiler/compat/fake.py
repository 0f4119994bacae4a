"""Fake tensors: is this call a trace, fresh fakes for a graph's inputs, and which storage a tensor lives in."""

import ctypes
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

__all__ = ["FakeTensor", "FakeTensorMode", "is_traceable_wrapper_subclass", "tree_leaves"]


def tree_leaves(values: Any) -> list[Any]:
    """The leaves of nested containers, the bounds of slices included."""
    leaves: list[Any] = []
    _add_leaves(values, leaves)
    return leaves


def _add_leaves(value: Any, leaves: list[Any]) -> None:
    kind = type(value)
    # Asked for every argument of every node: the pytree's own walk costs five times as much.
    if kind is tuple or kind is list:
        for item in value:
            _add_leaves(item, leaves)
    elif kind is dict:
        for item in value.values():
            _add_leaves(item, leaves)
    elif kind is slice:
        for item in (value.start, value.stop, value.step):
            _add_leaves(item, leaves)
    elif kind is FakeTensor or kind is int or value is None:
        leaves.append(value)
    else:
        for leaf in _pytree.tree_leaves(value):
            if isinstance(leaf, slice):
                _add_leaves(leaf, leaves)
            else:
                leaves.append(leaf)


def is_fake_call(values: Any) -> bool:
    """Whether an operation called with ``values`` now is being traced and must not run for real."""
    return fake_mode_of(values) is not None


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The mode under which an operation called with ``values`` now makes fakes; ``None`` if it runs for real."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return next((leaf.fake_mode for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor)), None)


def is_functional_call(values: Any) -> bool:
    """Whether AOTAutograd is tracing this call: its graph would hold the fake results and drop the call."""
    return any(isinstance(leaf, FunctionalTensor) for leaf in tree_leaves(values))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of one storage and says all of itself by shape, strides, offset and dtype.

    Not so: sparse, quantized and mkldnn tensors, and those of a transform of ``torch.func`` around the call.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    return tensor.layout is torch.strided and not tensor.is_quantized and not wrapped


def object_at(address: int) -> Any:
    """The live object whose ``id()`` is ``address``. Only valid while something else keeps it alive (CPython)."""
    return ctypes.cast(address, ctypes.py_object).value


def tracing_fake_mode() -> FakeTensorMode:
    """The fake mode that Dynamo prepared for the backend: a new mode over the shape environment of the trace."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fresh_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A new fake of ``mode`` with the sizes, strides and symbols of ``tensor``, in a storage of its own.

    Dynamo's own ``example_value`` is the state at the *end* of its trace and belongs to another mode, so it serves
    as a description only.
    """
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        return mode.from_tensor(tensor)
    with mode, torch.inference_mode(False):
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_with_index(tensor.device)
        )


class Look(NamedTuple):
    """All that an operation on fakes can see of a plain one by itself. Sizes, strides and bytes may be symbolic."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    bytes: Any
    inference: bool

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All of it that may be symbolic."""
        return (*self.shape, *self.strides, self.offset, self.bytes)

    def key(self) -> Hashable:
        """What is equal for equal looks: symbolic numbers by their expressions, which adds no guard."""
        return (
            self.dtype,
            self.device,
            len(self.shape),
            self.inference,
            tuple([n if type(n) is int else ("symbolic", size_expression(n)) for n in self.numbers]),
        )


def look_of(tensor: Any, mode: FakeTensorMode) -> Look | None:
    """The look of a fake of ``mode``; ``None`` for other tensors, and for fakes that say more of themselves."""
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode or tensor.constant is not None:
        return None
    if not is_plain(tensor) or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return None
    return Look(
        tensor.dtype,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.is_inference(),
    )


def outline_of(fake: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor on the meta device with the sizes, strides, offset and dtype that a fake has now, for ``fake_like``."""
    with in_kernel_invocation_manager(mode):
        return fake.detach()


def memory_of(bytes: Any, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor on the meta device in a new storage of this many bytes, which may be symbolic."""
    with in_kernel_invocation_manager(mode):
        return torch.empty(bytes, dtype=torch.uint8, device="meta")


def fake_like(outline: torch.Tensor, device: torch.device, mode: FakeTensorMode, memory: torch.Tensor) -> torch.Tensor:
    """A new fake of ``mode`` that looks like ``outline``, in the storage of ``memory``.

    A tenth of what an operation on fakes costs, and less where sizes are symbolic: nothing is dispatched, and what was
    found out of symbolic strides is kept. ``set_`` would find it out again.
    """
    with in_kernel_invocation_manager(mode):
        meta = outline.data  # and not detach(): writes to the one would be counted as writes to the other
        torch._functionalize_unsafe_set(meta, memory)
        return FakeTensor(mode, meta, device)


def keeps_sizes(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps the symbols of sizes that are read from its data, to give them the next time, too."""
    return type(tensor) is FakeTensor and not tensor.is_inference()


def forget_sizes(fake: torch.Tensor) -> None:
    """Let sizes that are read from the data of ``fake`` be new ones from here on, as they are once it is written.

    A fake sees that by its version, which only a write that is run on it changes, or on a view that an operation made.
    """
    assert isinstance(fake, FakeTensor)
    fake.nonzero_memo = fake.item_memo = fake.unique_memo = fake.unique_consecutive_memo = None


def _with_index(device: torch.device) -> torch.device:
    # A fake made for "cuda" asks the driver for the current device; a machine without one cannot answer.
    return torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device


@contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """Run operations on fakes of ``mode``; sizes read from data get fresh symbols that nobody has to bind."""
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


def storage_key(tensor: torch.Tensor) -> int | None:
    """An identity of the storage behind ``tensor``; ``None`` where it has none of its own (sparse, batched …)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def symbols_of(value: Any) -> frozenset[str]:
    """The names of the free symbols in a symbolic number, or in the shape, strides and offset of a tensor."""
    if isinstance(value, torch.Tensor):
        # An unchanged `shape` without any SymInt is by far the most common case: no symbolic work for it.
        parts: Iterable[Any] = (*value.shape, *_strides(value))
        parts = [p for p in parts if not isinstance(p, int)]
        return frozenset().union(*(symbols_of(p) for p in parts)) if parts else frozenset()
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset(str(s) for s in free_symbols(value))
    return frozenset()


def _strides(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()


def size_expression(size: Any) -> Any:
    """A size as an integer, or as sympy's expression in the symbols of the graph. Adds no guard."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def size_conditions(mode: FakeTensorMode) -> tuple[str, ...]:
    """What holds of the sizes that a trace has left open, as expressions: its guards, and the range of each symbol.

    For other sizes the trace would have gone another way.
    """
    env = mode.shape_env
    if env is None:
        return ()
    found = [env.replace(guard.expr) for guard in env.guards]
    for symbol, bounds in env.var_to_range.items():
        if not is_data_symbol(str(symbol)):
            replaced = env.replace(symbol)
            found += [replaced >= bounds.lower, replaced <= bounds.upper]
    return tuple(dict.fromkeys(str(condition) for condition in found if not _is_no_condition(condition)))


def replaced_sizes(mode: FakeTensorMode) -> dict[str, str]:
    """Symbols that have turned out to be another expression, or a number, with what they are."""
    env = mode.shape_env
    found = {} if env is None else {symbol: env.replace(symbol) for symbol in env.var_to_range}
    return {str(symbol): str(size) for symbol, size in found.items() if size != symbol}


def _is_no_condition(condition: Any) -> bool:
    return bool(condition == True) or "int_oo" in str(condition)  # noqa: E712 (sympy's own True)


def is_data_symbol(name: str) -> bool:
    """Whether a symbol stands for a value read from data (unbacked), by ShapeEnv's naming: ``u0``, ``zuf1``."""
    return name.startswith(("u", "zuf"))
