"""A unit with what a compiler made of it: what is looked at before the code is used, and what its errors say."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from bcg_compiler.compat.fake import is_plain, is_traceable_wrapper_subclass, storage_key
from bcg_compiler.plan.memory import span


class CompiledUnit:
    """A unit with what a compiler made of it. ``eager`` is the unit's graph as it is.

    ``written`` are the positions of what it writes: a compiler takes inputs for memory of their own, so a call in which
    one of these shares memory with another input runs as it is. ``shares`` says that results of the operations may
    share memory with inputs or each other. ``refused`` is called, with a reason code, if the first call shows that the
    code is of no use.
    """

    def __init__(
        self,
        eager: GraphModule,
        run: Callable[..., Any],
        written: Sequence[int] = (),
        shares: bool = False,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.eager = eager
        self._run = run
        self._written = tuple(written)
        self._shares = shares
        self._refused = refused
        self._tried = self._looked_at = self._given_up = False

    def __call__(self, *args: Any) -> Any:
        seen_by = _recorder.get()
        if not self._given_up and any(is_odd(arg) for arg in args):
            self._give_up("unit_odd_input")  # at any call: what a break gives may differ from call to call
        if not (self._tried or self._given_up) and seen_by is None and not _capturing():
            self._try(args)
        if self._given_up or (self._written and self._overlapping(args)):
            return self.eager(*args)
        if seen_by is not None:
            return seen_by(self, args)
        results = self.run(*args)
        return results if self._shares or self._looked_at else self._separate(results, args)

    def run(self, *args: Any) -> Any:
        """Run the compiled code. Errors of the operations are those of eager code: see Note [Errors of a unit]."""
        try:
            results = self._run(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(error, AssertionError) and "expected size" in str(error):
                # Inductor's code looks at strides before it does anything: those of a break's result are its own.
                self._give_up("unit_odd_input")
                return self.eager(*args)
            failed = error
        else:
            if not isinstance(results, (tuple, list)):
                raise TypeError(
                    f"What a segment compiler returns must give a tuple, and gave {type(results).__name__}."
                )
            return results
        on_host = all(arg.device.type == "cpu" for arg in args if isinstance(arg, torch.Tensor))
        raise (self._eager_error(args) if on_host else None) or failed

    def _try(self, args: Sequence[Any]) -> None:
        """Look at whether results share memory as those of eager code do."""
        if self._shares:
            if self._written and self._overlapping(args):
                return  # this call runs as it is
            shared = [
                _sharing([*given, *run(*given)]) for run in (self.eager, self.run) for given in [self._apart(args)]
            ]
            if shared[0] != shared[1]:
                self._give_up("unit_alias")
        self._tried = True  # not before: a call that fails has shown nothing

    def _separate(self, results: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """Results in memory of their own, as those of the operations are. Code that gives others is not used again."""
        self._looked_at = True
        keys = [storage_key(value) if isinstance(value, torch.Tensor) else None for value in (*args, *results)]
        shared = [key is not None and key in keys[:at] for at, key in enumerate(keys)][len(args) :]
        if not any(shared):
            return results
        self._give_up("unit_alias")
        return [result.clone() if again else result for result, again in zip(results, shared, strict=True)]

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._refused(reason)

    def _apart(self, args: Sequence[Any]) -> list[Any]:
        """The same arguments, but for copies of those that are written."""
        return [_copy(arg) if i in self._written else arg for i, arg in enumerate(args)]

    def _eager_error(self, args: Sequence[Any]) -> Exception | None:
        """The error that the operations give, one by one; ``None`` if they give none."""
        finder = _Finder(self.eager)
        try:
            finder.run(*self._apart(args))
        except Exception as error:
            error.bcg_unit_node = finder.at  # type: ignore[attr-defined]
            return error
        return None

    def compiled_as(self, run: Callable[..., Any]) -> "CompiledUnit":
        """The same unit with what another compile made of it; what was found out of it is kept."""
        made = CompiledUnit(self.eager, run, self._written, self._shares, self._refused)
        made._tried, made._given_up = self._tried, self._given_up
        return made

    def _overlapping(self, args: Sequence[Any]) -> bool:
        ranges = {i: _byte_range(arg) for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        return any(
            i != j and start < other_end and other_start < end
            for i, (start, end) in ((i, ranges[i]) for i in self._written)
            for j, (other_start, other_end) in ranges.items()
        )


# Note [Errors of a unit]
# On a CPU Inductor's code checks indices, and says "index out of bounds" with a place in a C++ file; eager code raises
# an IndexError, and the user wants to know in which layer. So the operations run once more, one by one, on copies of
# what they write: what fails is raised, with its position in the unit, from which the runtime finds the user's line. (A
# unit of one key runs for many layers; only the position is the same in all.) On a GPU such an error ends the context,
# and nothing can be run again. Memory that the unit writes is left as the compiled code left it.


# Note [Memory of results]
# What is a view in eager code may be a copy in compiled code, by a decomposition, and what is a copy may be the value
# itself, where a compiler leaves out an operation that changes no number. A break, another unit or the caller that
# writes the one value then changes the other, or does not. What a compiler has done cannot be asked. Where results are
# views, the code runs once before they are used, on copies of what it writes. Where they are not, the first results are
# looked at: what a unit writes may be all of a cache, of which there is no room for a copy.


class _Finder(Interpreter):
    """Runs a graph and knows the position of the operation that runs, among those that are no inputs."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the text of an error stays as it is
        self.at = -1

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        self.at += n.op not in ("placeholder", "get_attr")
        return super().run_node(n)


def is_odd(value: Any) -> bool:
    """Whether a tensor says more of itself than shape, strides and dtype: a fake of it would not."""
    if not isinstance(value, torch.Tensor):
        return False
    return not is_plain(value) or is_traceable_wrapper_subclass(value) or value.is_conj() or value.is_neg()


def _sharing(values: Sequence[Any]) -> list[Any]:
    """For each tensor the first one over the same memory, and which lazy bits it has."""
    first: dict[int, int] = {}
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [
        (first.setdefault(t.untyped_storage()._cdata, index), t.is_conj(), t.is_neg())
        for index, t in enumerate(tensors)
    ]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, which compiled code takes for granted."""
    flat = tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,))
    return flat.clone().as_strided(tensor.shape, tensor.stride(), 0)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + span(tensor.shape, tensor.stride()) * tensor.element_size()


#: Who is to be called in place of compiled units, whose operations cannot be seen from outside.
_recorder: ContextVar[Callable[[CompiledUnit, tuple[Any, ...]], Any] | None] = ContextVar("bcg_recorder", default=None)


@contextmanager
def units_seen_by(recorder: Callable[[CompiledUnit, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within it calls of compiled units go to ``recorder``."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
