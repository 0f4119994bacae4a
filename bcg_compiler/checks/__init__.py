"""Replays against eager operations, step by step: what a sanitizer reports, and what a bisection narrows down.

``numbers``   how far apart two tensors are
``fault``     what a check has found, with the operation and the user's line
``segments``  each replay of a segment beside its operations, on the same values
``breaks``    what a break writes and gives, beside what it declares
``watch``     both for all captures of the programs that are made while it is in place
"""

from collections.abc import Iterator
from contextlib import contextmanager

from bcg_compiler.checks.fault import Fault, SanitizerError
from bcg_compiler.checks.watch import Checks
from bcg_compiler.runtime.watch import watched

__all__ = ["Checks", "Fault", "SanitizerError", "sanitizer", "strict"]


@contextmanager
def sanitizer() -> Iterator[Checks]:
    """Have all that is compiled within it captured on the emulated device, and each replay compared with eager code.

    The first fault is raised as ``SanitizerError`` by the call that shows it, with the operation and the user's line.
    The operations of segments run twice; effects of breaks happen once, and twice in a call whose padded rows differ.
    Code that was compiled before has no checks: ``bcg_compiler.reset()`` drops it. What is compiled with
    ``capture="off"`` is left as it is. ``Checks.first`` is the first fault, should somebody have caught the error.
    """

    def refuse(fault: Fault) -> None:
        __tracebackhide__ = True
        checks.first = checks.first or fault
        raise SanitizerError(fault)

    checks = Checks(refuse, emulated=True)
    with watched(checks):
        yield checks


@contextmanager
def strict() -> Iterator[None]:
    """The same, but for faults, which nobody is told of, and for CUDA, which captures what computes on it: to see what
    numbers come of them.
    """
    with watched(Checks(lambda fault: None)):
        yield
