"""A capture device for any device: records operations without running them, and replays them at fixed addresses.

It shows the faults of a CUDA graph without one: a Python number is frozen, a rebound tensor is read at its old address,
a result is overwritten by the next replay, an operation that asks the host cannot be captured. How: while a segment is
recorded its functional operations get results of the right form without values (shape and strides from a fake run), views
are real views, writes are only noted. A replay runs the notes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from bcg_compiler.compat.fake import FakeTensorMode
from bcg_compiler.runtime.capture.protocol import CaptureError, Replay


class EmulatedCapture:
    """Records onto tapes; nothing of it is shared between segments."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Nothing to set up."""
        yield

    def capture(self, segment: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Replay]:
        """Record ``segment(*args)`` as a tape."""
        with _Recorder() as tape:
            result = segment(*args)
        return result, partial(_play, tuple(tape.notes))

    def before_replay(self) -> None:
        """There are no streams."""

    def release(self) -> None:
        """The tapes hold all there is."""


#: An operation with the arguments of capture, and the results it must write (``None``: it writes its arguments).
_Note = tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor] | None]


def _play(notes: tuple[_Note, ...]) -> None:
    for op, args, kwargs, results in notes:
        made = op(*args, **kwargs)
        if results is not None:
            for result, value in zip(results, _tensors(made), strict=True):
                result.copy_(value)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[_Note] = []
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise CaptureError(f"{func.name()} is a higher-order operation: its parts are not seen when captured")
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"{func.name()} reads a value on the host while it is captured")
        if func.namespace != "prim" and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _writes(func):
            return self._note_write(func, args, kwargs)
        if _only_looks(func):
            return func(*args, **kwargs)
        return self._note_result(func, args, kwargs)

    def _note_write(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # changes what the tensor says of itself, no data
        self.notes.append((func, args, kwargs, None))
        written = _written_arguments(func, args, kwargs)
        returns = [written[name] for name in _returned_names(func)]
        return None if not returns else returns[0] if len(returns) == 1 else tuple(returns)

    def _note_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, self._fakes.from_tensor, (args, kwargs))
        try:
            with self._fakes:
                described = func(*fake_args, **fake_kwargs)
        except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
            raise CaptureError(f"The size of {func.name()}'s result depends on data") from error
        leaves, structure = tree_flatten(described)
        made = [_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        results = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
        if not results:
            return func(*args, **kwargs)  # a question about shapes, such as which attention kernel to take
        if func not in _ALLOCATIONS:
            self.notes.append((func, args, kwargs, results))
        return tree_unflatten(made, structure)


_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


def _like(fake: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # replays write it, in whatever mode
        return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _only_looks(func: Any) -> bool:
    """A view, or a question that fakes and real tensors answer alike.

    Not ``lift_fresh``: it stands for a constant that eager code makes anew at each call.
    """
    if func is _aten.lift_fresh.default:
        return False
    return func.namespace == "prim" or any(r.alias_info is not None for r in func._schema.returns)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    found = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for name in argument.alias_info.before_set:
                found[name] = value
    return found


def _returned_names(func: Any) -> list[str]:
    return [next(iter(r.alias_info.before_set)) for r in func._schema.returns if r.alias_info is not None]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
