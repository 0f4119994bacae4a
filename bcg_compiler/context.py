"""The forward context: what differs from call to call and therefore is never an argument of a break.

Sequence lengths, page tables, the number of live rows: a captured graph would freeze them. The caller publishes them
around the forward, and break bodies read them:

    with bcg.forward_context(seq_lens=lens, page_table=table):
        compiled(ids)

    @bcg.eager_break(mutates_args=("out",))
    def attention(q, k, v, out):
        lens = bcg.current_context().seq_lens
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from bcg_compiler.errors import ContextError, nearest


class ForwardContext:
    """Named values of one forward call, read as attributes. Read-only; an unknown name raises ``ContextError``."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", MappingProxyType(dict(fields)))

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields as a read-only mapping."""
        return self._fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            known = [field for field in self._fields if field != PLANNED]
            raise ContextError(
                f"The forward context has no field {name!r}. {nearest(name, known)} "
                f"Set it with bcg.forward_context({name}=...)."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"The forward context is read-only; set {name!r} with bcg.forward_context(...).")

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __repr__(self) -> str:
        return f"ForwardContext({', '.join(sorted(self._fields))})"


class CapturedContext(ForwardContext):
    """What a body may read while it is captured: what is the same at each replay. All else would be frozen."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._fields:
            return super().__getattr__(name)
        raise ContextError(
            f"A body that is captured reads {name!r} of the forward context, which a replay would not read again. Read "
            f"it in the plan, and let the plan write what the body needs into a buffer."
        )

    def __contains__(self, name: object) -> bool:
        return name in self._fields or getattr(self, str(name))


#: The field with the keys of the plans that have run in this call of a program (``hoisting.py``).
PLANNED = "_planned"

#: What does not differ from one replay of a capture to another.
_FIXED = ("bucket_rows", PLANNED)


# A context variable and not a global: threads and tasks that serve different batches must not see each other's.
_current: ContextVar[ForwardContext | None] = ContextVar("bcg_forward_context", default=None)


@contextmanager
def forward_context(**fields: Any) -> Iterator[ForwardContext]:
    """Publish ``fields`` to the break bodies of every forward run inside the ``with`` block.

    Contexts nest: an inner one adds to the outer one and hides fields of the same name. The outer one is back after
    the block, exceptions included.
    """
    outer = _current.get()
    context = ForwardContext({**(outer.fields if outer else {}), **fields})
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


@contextmanager
def captured_context() -> Iterator[None]:
    """Keep what differs from call to call from bodies that are captured. See ``CapturedContext``."""
    outer = _current.get()
    token = _current.set(CapturedContext({k: v for k, v in outer.fields.items() if k in _FIXED} if outer else {}))
    try:
        yield
    finally:
        _current.reset(token)


def published(name: str) -> Any:
    """A field of the innermost context; ``None`` if it, or any context, is not there."""
    context = _current.get()
    return None if context is None else context.fields.get(name)


def current_context() -> ForwardContext:
    """The innermost forward context. For break bodies; raises ``ContextError`` where none is set."""
    context = _current.get()
    if context is None:
        raise ContextError(
            "No forward context is set. Wrap the call of the model: "
            "with bcg.forward_context(name=value, ...): model(...)."
        )
    return context
