"""What a compile assumes of open sizes, kept with its code in Inductor's caches (run with torch 2.11, 2.13 and 2.14).

Inductor keeps what must hold of the sizes that a graph takes as numbers, in terms of these; of sizes of tensors it
keeps nothing, as Dynamo hands over a number for each. A unit takes fewer: n // 2 and a tensor of n // 2 rows, without
n. What was kept then named an input of the whole model, and looking the code up was a KeyError; or what was assumed
while a process compiled was not assumed in the next one, which found the code.

So it is kept here in terms of the symbols, by name: two units have one key only if the symbols of their inputs have the
same names. And where code is found, it is assumed again: the trace has the guards that it would have after a compile.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from bcg_compiler.compat.patches import patched_here


@contextmanager
def assumptions_kept(envs: Iterable[ShapeEnv | None]) -> Iterator[None]:
    """Keep what compiles within it assume of the sizes of ``envs``, with the code that they put into the caches."""
    known = {env: len(env.guards) for env in envs if env is not None}

    def produce(original: Callable[..., str | None]) -> Callable[..., str | None]:
        def produced(self: ShapeEnv, *args: Any, **kwargs: Any) -> str | None:
            if self not in known:
                return original(self, *args, **kwargs)
            assumed = dict.fromkeys(PythonPrinter().doprint(guard.expr) for guard in self.guards[known[self] :])
            return " and ".join(f"({condition})" for condition in assumed) or None

        return produced

    def evaluate(original: Callable[..., bool]) -> Callable[..., bool]:
        def holds(self: ShapeEnv, code: str, args: Any) -> bool:
            if self not in known:
                return original(self, code, args)
            try:
                return bool(self.evaluate_symexpr(code)) and bool(self.deserialize_symexpr(code))
            except (NameError, ArithmeticError):  # of other symbols, or n % (n // 3) for two rows
                return False

        return holds

    with (
        patched_here(ShapeEnv, "produce_guards_expression", produce),
        patched_here(ShapeEnv, "evaluate_guards_expression", evaluate),
    ):
        yield
