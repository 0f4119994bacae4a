"""Python's garbage collector while a graph is compiled."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects between two collections of the youngest ones; Python's own number is 700 up to 3.11, 2000 since.
YOUNG = 50_000
#: How many of these collections there are until older objects are looked at.
OLDER = 20

_lock = threading.Lock()
_compiles = 0
_before = _within = (0, 0, 0)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for garbage less often inside the ``with`` block. Thresholds that somebody sets in it are left, and so are
    those that ask for fewer collections.

    A trace makes objects by the hundred thousand that all live on, and each look at the oldest ones goes through all of
    the process: for 61 layers that was a tenth of the time. Garbage of a compile is collected still, by then or after.
    """
    global _compiles, _before, _within
    with _lock:
        _compiles += 1
        if _compiles == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < YOUNG:
                gc.set_threshold(YOUNG, max(OLDER, _before[1]), _before[2])
            _within = gc.get_threshold()
    try:
        yield
    finally:
        with _lock:
            _compiles -= 1
            if _compiles == 0 and gc.get_threshold() == _within:
                gc.set_threshold(*_before)
