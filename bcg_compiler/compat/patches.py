"""Another function in place of one of torch's, for one thread and for a while."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
#: By owner and name: what stood there, and for each thread what stands for it, the innermost last.
_standing: dict[tuple[Any, str], tuple[Any, dict[int, list[Any]]]] = {}


@contextmanager
def patched_here(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``make(what stood there)`` stand for the function ``owner.name`` in this thread, and in no other one.

    Threads may come and go in any order; the last one leaves the owner as the first one found it.
    """
    key, thread = (owner, name), threading.get_ident()
    with _lock:
        if key not in _standing:
            _standing[key] = (getattr(owner, name), {})
            setattr(owner, name, _dispatcher(*_standing[key]))
        original, by_thread = _standing[key]
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
                setattr(owner, name, original)
                del _standing[key]


def _dispatcher(original: Any, by_thread: dict[int, list[Any]]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        stack = by_thread.get(threading.get_ident())
        return (stack[-1] if stack else original)(*args, **kwargs)

    return call
