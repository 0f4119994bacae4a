"""A capture device for any device: records operations without running them, and replays them at fixed addresses.

It shows the faults of a CUDA graph without one: a Python number is frozen, a rebound tensor is read at its old
address, a result is overwritten by the next replay, an operation that asks the host cannot be captured. How: while a
segment is recorded its functional operations get results of the right form without values (shape and strides from a
fake run), views are real views, writes are only noted. Of a custom operation written in Python the operations are
recorded that it calls, so that what it reads on the host is frozen, too. A replay runs the notes.

``strict`` shows more: what a program holds is rubbish before each replay, so that nothing of an earlier one is read
unseen.
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from bcg_compiler.compat.fake import FakeTensorMode, storage_key
from bcg_compiler.compat.ops import python_body
from bcg_compiler.lower import GENERATED, CompiledUnit, units_seen_by
from bcg_compiler.runtime.capture.protocol import CaptureError, Replay
from bcg_compiler.runtime.memory import set_inference


class EmulatedCapture:
    """Records onto tapes; nothing of it is shared between segments."""

    name = "emulated"
    keeps_memory = False

    def __init__(self, device: torch.device, strict: bool = False) -> None:
        self._device = device.type
        self._bytes = 0
        self._strict = strict
        self._held: list[torch.Tensor] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        """Nothing to set up."""
        yield

    def capture(self, segment: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Replay]:
        """Record ``segment(*args)`` as a tape."""
        tape = _Recorder(self._device)
        with units_seen_by(tape.note_unit), tape:
            result = segment(*args)
        if self._strict:
            self._held += tape.made
        self._bytes += sum(result.untyped_storage().nbytes() for note in tape.notes for result in note[3])
        return result, partial(_play, tuple(tape.notes), self._device)

    @property
    def bytes(self) -> int:
        """The results of all operations on the tapes."""
        return self._bytes

    def before_replay(self) -> None:
        """There are no streams; if it is strict, nothing of the last replay is left."""
        for held in self._held:
            spoil(held)

    def release(self) -> None:
        """The tapes hold all there is, but for what is spoiled."""
        self._held.clear()


_AUTOCAST = ("cpu", "cuda")

#: An operation with the arguments of capture, the results that a replay must fill, and the line of the segment's text.
_Note = tuple[Any, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...], tuple[str, int] | None]


def _play(notes: tuple[_Note, ...], device: str) -> None:
    # The casts of autocast were recorded like everything else.
    with torch.autocast(device, enabled=False) if device in _AUTOCAST else nullcontext():
        for op, args, kwargs, results, line in notes:
            try:
                made = op(*args, **kwargs)
            except Exception as error:
                error.bcg_line = line  # type: ignore[attr-defined]
                raise
            if results:
                for result, value in zip(results, _tensors(made), strict=True):
                    result.copy_(value)


def _generated_line() -> tuple[str, int] | None:
    """File name and line of the generated text that is being recorded."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != GENERATED:
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


class _Recorder(TorchDispatchMode):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.notes: list[_Note] = []
        self.made: list[torch.Tensor] = []
        self._device = device
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise CaptureError(f"{func.name()} is a higher-order operation: its parts are not seen when captured")
        if (body := python_body(func, self._device)) is not None:
            with self:
                return body(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"{func.name()} reads a value on the host while it is captured")
        if func.namespace != "prim" and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # An in-place view changes what a tensor says of itself and no data.
        if torch.Tag.inplace_view in func.tags:
            self._keep_form(args[0])
            return func(*args, **kwargs)
        if _only_looks(func) and not _writes(func):
            return func(*args, **kwargs)
        return self._note(func, args, kwargs)

    def note_unit(self, unit: CompiledUnit, args: tuple[Any, ...]) -> Any:
        """Note the call of a compiled unit. Its results look as those of its own operations do."""
        noted = len(self.notes)
        results = unit.eager(*args)
        del self.notes[noted:]
        given = {storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)}
        fresh = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and storage_key(r) not in given]

        modes = [torch.autocast(d, torch.get_autocast_dtype(d)) for d in _AUTOCAST if torch.is_autocast_enabled(d)]

        def run(*args: Any) -> list[Any]:
            with ExitStack() as stack:  # what a compiler leaves to eager operations is cast as they are
                for mode in modes:
                    stack.enter_context(mode)
                made = unit.run(*args)
            return [_unexpanded(made[i], results[i]) for i in fresh]

        targets = tuple(_unexpanded(results[i], results[i]) for i in fresh)
        self.notes.append((run, args, {}, targets, _generated_line()))
        return results

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = _written_arguments(func, args, kwargs)
        returns = func._schema.returns
        if written and all(r.alias_info is not None for r in returns):
            self.notes.append((func, args, kwargs, (), _generated_line()))
            same = [written[next(iter(r.alias_info.before_set))] for r in returns]
            return None if not same else same[0] if len(same) == 1 else tuple(same)
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        try:
            with self._fakes:
                described = func(*fake_args, **fake_kwargs)
        except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
            raise CaptureError(f"The size of {func.name()}'s result depends on data") from error
        leaves, structure = tree_flatten(described)
        made = [_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for leaf in made:
            if isinstance(leaf, torch.Tensor) and torch.is_inference_mode_enabled():
                set_inference(leaf)
        results = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
        self.made += results
        if not results and not written and returns:
            return func(*args, **kwargs)  # a question about shapes, such as which attention kernel to take
        if func not in ALLOCATIONS:
            self.notes.append((func, args, kwargs, tuple(results), _generated_line()))
        return tree_unflatten(made, structure)

    def _keep_form(self, tensor: torch.Tensor) -> None:
        """Let what is noted so far have ``tensor`` with the shape and strides of now: it is about to change them."""
        form = _aten.alias.default(tensor)
        self.notes = [tree_map_only(torch.Tensor, lambda t: form if t is tensor else t, note) for note in self.notes]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        # Anew each time: a fake kept for a tensor would not see what an in-place view has changed.
        with self._fakes:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


_aten = torch.ops.aten

#: What allocates and computes nothing.
ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


def at_replay(callback: Callable[[torch.Tensor], None], value: torch.Tensor) -> None:
    """While a segment is recorded: have each replay call ``callback`` with what is then in ``value``, at this place."""
    recorder = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Recorder)), None)
    if recorder is not None:
        recorder.notes.append((callback, (value,), {}, (), _generated_line()))


def spoil(tensor: torch.Tensor) -> None:
    """Fill with what nobody means: NaN, or the largest integer, which is no index."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _unexpanded(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one element for all that lie in one place of ``like``: an expanded tensor cannot be written."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())]


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
            for name in argument.alias_info.before_set or (argument.name,):  # a list of tensors has no alias set
                found[name] = value
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
