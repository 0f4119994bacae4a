"""Which programs are alive. Dynamo owns them; this only looks."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.compat import dynamo
from bcg_compiler.runtime.program import Program
from bcg_compiler.runtime.unsplit import UnsplitProgram

AnyProgram = Program | UnsplitProgram

_programs: "weakref.WeakKeyDictionary[AnyProgram, Any]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Stats:
    """What one compiled callable amounts to; of the whole process if none is given.

    ``graphs``                  programs that have run: one for each graph between Dynamo's own breaks, and for each
                                recompile
    ``segments``, ``breaks``    steps of their plans; ``reasons`` operations outside of segments, by reason code
    ``unique_units``            different parts of segments to compile; ``eager_units`` those that are not, by reason;
                                ``specialized_units`` those that were compiled once more for exactly one bucket
    ``forecast_bytes``, ``measured_bytes``  what captures were forecast to hold, and what they and the slots do hold
    ``captures``, ``recaptures``, ``replays``  see ``Counters``
    ``bucket_replays``          replays whose inputs were padded, by the rows of the bucket; the ``live_rows`` that they
                                had, and the ``padded_rows`` that the buckets added
    ``eager_runs``              runs of whole programs without replay, by reason code
    ``dynamo_graph_breaks``     Dynamo's own breaks, by reason
    ``recompile_limit_hits``    how often Dynamo gave a function up, which it then runs eagerly without telling anyone.
                                Dynamo counts this and its breaks for the whole process
    """

    graphs: int
    segments: int
    breaks: int
    captures: int
    recaptures: int
    replays: int
    bucket_replays: dict[int, int]
    live_rows: int
    padded_rows: int
    eager_runs: dict[str, int]
    reasons: dict[str, int]
    unique_units: int
    specialized_units: int
    eager_units: dict[str, int]
    forecast_bytes: int
    measured_bytes: int
    dynamo_graph_breaks: dict[str, int]
    recompile_limit_hits: int


def register(program: AnyProgram) -> None:
    """Remember a program, weakly, with the compiled callable that this thread is in."""
    _programs[program] = dynamo.running_owner()


def register_for(program: AnyProgram, owner: object) -> None:
    """Let a program belong to an object that calls it without Dynamo."""
    _programs[program] = weakref.ref(owner)


def programs_of(compiled: Callable[..., Any] | None = None) -> list[AnyProgram]:
    """The programs that have run for ``compiled``, in the order they were made; all if ``None``.

    They belong to the code of the callable, as Dynamo's entries do: two instances of one class share them. One that
    Dynamo asked for and dropped never ran and does not show.
    """
    owned = [p for p, o in list(_programs.items()) if isinstance(o, weakref.ref) and o() is compiled is not None]
    if owned:
        return owned
    key = None if compiled is None else dynamo.code_key(compiled)
    if compiled is not None and key is None:
        raise TypeError(f"{compiled!r} is not a compiled function or module.")
    return [p for p, owner in list(_programs.items()) if p.eager_runs and (key is None or owner is key)]


def stats(compiled: Callable[..., Any] | None = None) -> Stats:
    """Count what ``compiled``, the result of ``torch.compile``, has been compiled to and how it ran."""
    # Counters are copied, which is one step of the interpreter: other threads may run the model meanwhile.
    programs = programs_of(compiled)
    plans = [p.plan for p in programs if p.plan is not None]
    in_buckets: Counter[int] = sum((Counter(p.bucket_replays) for p in programs), Counter())
    live_rows = sum(p.live_rows for p in programs)
    return Stats(
        graphs=len(programs),
        segments=sum(len(plan.segments) for plan in plans),
        breaks=sum(len(plan.breaks) for plan in plans),
        captures=sum(p.captures for p in programs),
        recaptures=sum(p.recaptures for p in programs),
        replays=sum(p.replays for p in programs),
        bucket_replays=dict(sorted(in_buckets.items())),
        live_rows=live_rows,
        padded_rows=sum(rows * times for rows, times in in_buckets.items()) - live_rows,
        eager_runs=dict(sum((Counter(p.eager_runs) for p in programs), Counter())),
        reasons=dict(sum((plan.reasons() for plan in plans), Counter())),
        unique_units=len({unit.key for plan in plans for step in plan.segments for unit in step.units}),
        specialized_units=sum(p.specialized_units for p in programs),
        eager_units=dict(sum((p.eager_units for p in programs), Counter())),
        forecast_bytes=sum(p.forecast_bytes for p in programs),
        measured_bytes=sum(p.measured_bytes for p in programs),
        dynamo_graph_breaks=dynamo.graph_breaks(),
        recompile_limit_hits=dynamo.recompile_limit_hits(),
    )


def reset() -> None:
    """Free every program: drops all compiled code of this process (``torch.compiler.reset``).

    Dynamo keeps hold of some programs even then (those after its own graph breaks), so each lets go of what it holds.
    """
    torch.compiler.reset()
    for program in list(_programs):
        program.release()
    _programs.clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # nothing else gives the memory of a freed pool to other allocations
