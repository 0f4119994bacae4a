"""From a line of generated text to the step and the operation that it is for: tracebacks, notes on exceptions."""

import linecache
import weakref
from types import TracebackType

from bcg_compiler.errors import BcgError
from bcg_compiler.lower import Code
from bcg_compiler.plan import PlanNode, Step


class Lines:
    """The generated texts of one program."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, tuple[Step, PlanNode]]] = {}

    def add(self, code: Code) -> None:
        """Tracebacks and debuggers show the generated text as if it were a file, as long as this object lives."""
        self._lines[code.filename] = code.lines
        lines = code.source.splitlines(keepends=True)
        linecache.cache[code.filename] = (len(code.source), None, lines, code.filename)
        weakref.finalize(self, linecache.cache.pop, code.filename, None)

    def clear(self) -> None:
        """Forget all texts."""
        self._lines.clear()

    def where(self, error: BaseException) -> tuple[Step, PlanNode] | None:
        """The innermost step and operation that an exception went through."""
        trace: TracebackType | None = error.__traceback__
        found = None
        while trace is not None:
            lines = self._lines.get(trace.tb_frame.f_code.co_filename, {})
            found = lines.get(trace.tb_lineno, found)
            trace = trace.tb_next
        filename, line = getattr(error, "bcg_line", None) or ("", 0)  # the emulated device's own word
        found = self._lines.get(filename, {}).get(line, found)
        return found if found is None else _within_unit(*found, getattr(error, "bcg_unit_node", None))

    def say_where(self, error: Exception) -> None:
        """Add the step, the operation and the user's line to an exception; the exception itself stays as it is."""
        found = None if isinstance(error, BcgError) and error.says_where else self.where(error)
        if found is None:
            return
        step, node = found
        code = f"\n    {node.source.code}" if node.source and node.source.code else ""
        where = f" in {node.module}" if node.module else ""
        note = f"bcg: {step.kind} {step.index}, %{node.ordinal} {node.op}{where} ({node.source}){code}"
        if note not in getattr(error, "__notes__", ()):  # one exception object may be raised again and again
            error.add_note(note)


def _within_unit(step: Step, first: PlanNode, position: int | None) -> tuple[Step, PlanNode]:
    """The operation at a position of a compiled unit, which the text knows by its first one."""
    units = [unit for unit in step.units if unit.nodes[0] == first.ordinal]
    if position is None or not units:
        return step, first
    return step, next(node for node in step.nodes if node.ordinal == units[0].nodes[position])
