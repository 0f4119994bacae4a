"""Capture before the first request: all buckets of a compiled callable at once; and questions about admission."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bcg_compiler.buckets import Admission, Batch, Ladder
from bcg_compiler.errors import LadderError
from bcg_compiler.runtime.program import Program, Rung
from bcg_compiler.runtime.registry import AnyProgram, programs_of


@dataclass(frozen=True)
class CaptureReport:
    """What ``capture`` did: the rungs in the order of their capture, seconds in all, bytes forecast and measured.

    ``reserved_bytes`` are what break functions take for themselves beside what captures hold (``reserve_bytes``).
    """

    rungs: tuple[Rung, ...]
    seconds: float
    forecast_bytes: int
    measured_bytes: int
    reserved_bytes: int = 0

    @property
    def dropped(self) -> tuple[Rung, ...]:
        """The rungs that could not be captured."""
        return tuple(rung for rung in self.rungs if rung.error)

    def __str__(self) -> str:
        lines = [
            f"{len(self.rungs) - len(self.dropped)} of {len(self.rungs)} buckets captured in {self.seconds:.2f} s: "
            f"{self.measured_bytes:,} bytes, {self.forecast_bytes:,} were forecast."
        ]
        if self.reserved_bytes:
            lines.append(f"Break functions take {self.reserved_bytes:,} bytes beside that.")
        return "\n".join([*lines, *(f"{rung.rows} is dropped: {rung.error}" for rung in self.dropped)])


def capture(
    compiled: Callable[..., Any], ladder: Ladder | Iterable[int] | None = None, *, progress: bool = True
) -> CaptureReport:
    """Capture all buckets of ``compiled``, the result of ``torch.compile``, the largest first.

    ``ladder`` takes the place of the one that it was compiled with. Call the model once before, with inputs of any
    length: only then is it compiled, and its sizes other than the number of rows are captured as they were in the calls
    so far. Nothing that the model does is done. After this the program is complete: ``options["on_late_capture"]`` says
    what a call does that needs another capture. Raises ``LadderError`` where nothing can be padded, with the reasons.
    """
    found = programs_of(compiled)
    programs = [program for program in found if isinstance(program, Program)]
    if found and not programs:
        raise LadderError("The model was called under grad mode only, where nothing is captured. Use torch.no_grad().")
    if not programs:
        raise LadderError(
            "The model has not run yet, or no graph of it. Call it once, with inputs of any length, then capture."
        )
    if ladder is not None:
        for program in programs:
            program.use_ladder(ladder if isinstance(ladder, Ladder) else Ladder(tuple(ladder)))
    padded = [program for program in programs if program.plan.padding is not None and program.never is None]
    if not padded:
        reasons = "; ".join(dict.fromkeys(map(_why_unpadded, programs)))
        raise LadderError(f"No graph of the model can be padded: {reasons}.")
    if any(not program.planned for program in padded):
        raise LadderError("The model has not run with this ladder yet. Call it once, and capture then.")
    forecast = sum(program.planned_bytes for program in padded)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        rungs = list(_with_progress(padded, forecast, progress))
    finally:
        if collecting:
            gc.enable()
    measured = sum(program.measured_bytes for program in padded)
    # Graphs of one model call the same functions, each of which takes its memory once.
    reserves = {reserve for program in padded for reserve in program.plan.reserves}
    reserved = sum(reserve.bytes for reserve in reserves)
    return CaptureReport(tuple(rungs), sum(rung.seconds for rung in rungs), forecast, measured, reserved)


def admission(compiled: Callable[..., Any], batch: Batch | None = None, **fields: Any) -> Admission:
    """Whether a call of ``compiled`` with this batch would replay, by the function that the call itself asks.

    ``fields`` are those of ``Batch``, in place of one: ``admission(compiled, rows=300)``. Where the model is several
    graphs, the first that refuses answers; else that with the largest bucket.
    """
    asked = batch if batch is not None else Batch(**fields)
    programs = [program for program in programs_of(compiled) if isinstance(program, Program)]
    padded = [program for program in programs if program.plan.padding is not None] or programs
    if not padded:
        return Admission(None, "not_compiled", "The model has not run yet: call it once.", asked.rows)
    # Of graphs that Dynamo made of one function, a call runs the one that its length belongs to.
    padded = [program for program in padded if program.takes(asked.rows)] or padded
    answers = [program.admit(asked) for program in padded]
    return next((a for a in answers if a.bucket is None), max(answers, key=lambda a: a.bucket or 0))


def _why_unpadded(program: AnyProgram) -> str:
    plan = program.plan
    if plan is not None and plan.unpadded is not None:
        return plan.unpadded.text
    if isinstance(program, Program) and program.never is not None:
        return f"its calls run eagerly, for the reason {program.never}"
    return "it was compiled without options={'ladder': ...}"


def _with_progress(programs: Iterable[Program], forecast: int, shown: bool) -> Iterable[Rung]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not shown, transient=True) as bar:
        for program in programs:
            task = bar.add_task(f"capture ({forecast:,} bytes forecast)", total=len(program.planned))
            for rung in program.capture_ladder():
                bar.update(task, advance=1, description=f"captured {rung.rows} ({rung.bytes:,} bytes)")
                yield rung
