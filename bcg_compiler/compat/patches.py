"""Another function in place of one of torch's, for one thread and for a while."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
#: By owner and name: what stood there, as it is called and as it is kept, and for each thread what stands for it, the
#: innermost last.
_standing: dict[tuple[Any, str], tuple[Any, Any, dict[int, list[Any]]]] = {}


@contextmanager
def patched_here(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``make(what stood there)`` stand for the function ``owner.name`` in this thread, and in no other one.

    Threads may come and go in any order; the last one leaves the owner as the first one found it.
    """
    key, thread = (owner, name), threading.get_ident()
    with _lock:
        if key not in _standing:
            kept = inspect.getattr_static(owner, name)
            _standing[key] = (getattr(owner, name), kept, {})
            dispatcher = _dispatcher(_standing[key][0], _standing[key][2])
            # What is called takes the class, or nothing, already.
            setattr(
                owner, name, staticmethod(dispatcher) if isinstance(kept, (classmethod, staticmethod)) else dispatcher
            )
        original, kept, by_thread = _standing[key]
        stack = by_thread.setdefault(thread, [])
        stack.append(make(stack[-1] if stack else original))
    try:
        yield
    finally:
        with _lock:
            stack.pop()
            if not stack:
                del by_thread[thread]
            if not by_thread:
                setattr(owner, name, kept)
                del _standing[key]


def _dispatcher(original: Any, by_thread: dict[int, list[Any]]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        stack = by_thread.get(threading.get_ident())
        return (stack[-1] if stack else original)(*args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):  # of functions that keep what they returned
        if hasattr(original, name):
            setattr(call, name, getattr(original, name))
    return call
