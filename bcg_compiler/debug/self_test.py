"""Whether this machine captures and replays: a tiny program with a break, compared with eager bit for bit."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from bcg_compiler.breaks import eager_break
from bcg_compiler.debug.reasons import EAGER_UNITS, meaning_of_eager_run
from bcg_compiler.errors import BcgError
from bcg_compiler.runtime import Stats, reset, stats
from bcg_compiler.runtime.fused_fill import FusedFill

#: Enough rows that a bucket of the ladder is used, and is not full.
ROWS, OTHER_ROWS, LADDER = 5, 7, [8, 16]


@dataclass(frozen=True)
class Check:
    """One thing that was tried. ``said``: what was seen, and where it failed what to do."""

    name: str
    state: Literal["ok", "failed", "not tried"]
    said: str


class NotTried(Exception):
    """What a check needs is not here, and the rest works without it."""


class Failed(BcgError):
    """A check saw something else than it should."""


@eager_break(fake=torch.empty_like, reads_live_rows=True, writes_every_row=True)
def doubled(x: Tensor) -> Tensor:
    """The break of the program."""
    return x * 2


def program(x: Tensor, weight: Tensor) -> Tensor:
    """Of whole numbers it computes whole numbers, which are the same in whatever order a kernel adds and fuses."""
    hidden = x @ weight + 1
    return doubled(hidden) * hidden - x


def self_test(device: torch.device) -> tuple[Check, ...]:
    """Compile, capture and replay on a device what takes seconds; nothing is raised.

    On a CPU captures are emulated. Drops all compiled code of this process.
    """
    checks: Sequence[tuple[str, Callable[[torch.device], str], str]] = (
        ("backend", _backend, 'Install this package with pip: torch finds backend="bcg" by its entry point.'),
        ("capture and replay", _capture, 'options={"capture": "off"} runs the same steps without capture.'),
        ("ladder", _ladder, "Without a ladder exact shapes are captured."),
        ("Triton", _triton, "Install the Triton that this torch asks for: pip install triton."),
        ("Inductor", _inductor, 'options={"segment_compiler": "eager"} does without it.'),
    )
    return tuple(_try(name, check, remedy, device) for name, check, remedy in checks)


def self_test_view(checks: Sequence[Check]) -> Table:
    """A line for each check."""
    table = Table("self-test", "", "", box=None, pad_edge=False, header_style="bold")
    styles = {"ok": "green", "failed": "bold red", "not tried": "dim"}
    for check in checks:
        table.add_row(check.name, Text(check.state, style=styles[check.state]), Text(check.said))
    return table


def _try(name: str, check: Callable[[torch.device], str], remedy: str, device: torch.device) -> Check:
    reset()
    try:
        with torch.inference_mode():
            return Check(name, "ok", check(device))
    except NotTried as error:
        return Check(name, "not tried", str(error))
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        return Check(name, "failed", f"{kind}{lines[0]} {remedy}")
    finally:
        reset()


def _backend(device: torch.device) -> str:
    if "bcg" not in torch.compiler.list_backends():
        raise Failed("torch does not know the backend.")
    return "torch knows it"


def _capture(device: torch.device) -> str:
    seen = _replays(device, [ROWS] * 4, replays=3, segment_compiler="eager")
    return f"{seen.segments} segments and {seen.breaks} break on {_where(device)}: eager's numbers, bit for bit"


def _ladder(device: torch.device) -> str:
    seen = _replays(device, [ROWS, OTHER_ROWS, ROWS], replays=2, segment_compiler="eager", ladder=LADDER)
    if list(seen.bucket_replays) != LADDER[:1]:
        raise Failed(f"Buckets {list(seen.bucket_replays)} replayed, and not {LADDER[:1]}.")
    return f"{ROWS} and {OTHER_ROWS} rows in a bucket of {LADDER[0]}: eager's numbers, bit for bit"


def _triton(device: torch.device) -> str:
    if device.type != "cuda":
        raise NotTried("there is no CUDA device")
    if find_spec("triton") is None:
        raise NotTried("it is not installed: slots are filled one by one, and segments run uncompiled")
    slots = [torch.ones(8, width, device=device) for width in (3, 4)]
    given = [torch.full((ROWS, width), 2.0, device=device) for width in (3, 4)]
    FusedFill(slots)(ROWS, *given)
    for slot, rows in zip(slots, given, strict=True):
        if not torch.equal(slot[:ROWS], rows) or bool(slot[ROWS:].any()):
            raise Failed("The kernel that fills slots wrote other numbers than it was given.")
    return "a kernel filled two slots"


def _inductor(device: torch.device) -> str:
    with _quiet_log():
        seen = _replays(device, [ROWS] * 4, replays=3, segment_compiler="inductor")
    if "no_compiler" in seen.eager_units:
        raise NotTried(f"nothing to compile with: {EAGER_UNITS['no_compiler'].remedy}")
    if seen.eager_units:
        codes = ", ".join(f"{code} ({EAGER_UNITS[code].why})" for code in seen.eager_units)
        raise Failed(f"Not all units were compiled: {codes}.")
    return f"{seen.unique_units} units compiled, captured and replayed: eager's numbers, bit for bit"


def _replays(device: torch.device, rows: Sequence[int], replays: int, **options: Any) -> Stats:
    """Call the program compiled and as it is, and count. Raises ``Failed`` where results or counts are others."""
    made: Any = torch.compile(program, backend="bcg", fullgraph=True, options={"min_segment_kernels": 1, **options})
    weight = torch.arange(16.0, device=device).view(4, 4)
    for call, count in enumerate(rows):
        x = torch.arange(4.0 * count, device=device).view(count, 4) - call
        if "ladder" in options:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        got = made(x, weight)
        if not torch.equal(got, program(x, weight)):
            raise Failed(f"Call {call} gave other numbers than eager.")
    seen = stats(made)
    if (seen.replays, seen.breaks) != (replays, 1):
        reasons = {code for code in seen.eager_runs if code != "warm_up"}
        why = "; ".join(f"{code}: {meaning_of_eager_run(code).why}" for code in sorted(reasons))
        raise Failed(f"{seen.replays} of {replays} calls replayed, with {seen.breaks} breaks. {why}".rstrip())
    return seen


def _where(device: torch.device) -> str:
    return "the emulated device" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)}"


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What a warning says of a unit, the line of the check says."""
    log = logging.getLogger("bcg_compiler")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
