"""bcg_compiler: ``torch.compile(model, backend="bcg")``.

Splits a model at the operations that no CUDA graph can hold into segments joined by eager breaks. Importing the package
is not needed to use the backend; these are the names for those who declare breaks or look inside.

Each name is imported when it is first used: pytest loads the plugin of this package into all test runs where it is
installed, and those that do not use it must not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcg_compiler.aot import aot_compile
    from bcg_compiler.breaks import call_with_break, eager_break
    from bcg_compiler.buckets import Batch, Ladder, Limits
    from bcg_compiler.context import current_context, forward_context
    from bcg_compiler.debug.prometheus import prometheus
    from bcg_compiler.debug.timeline import trace
    from bcg_compiler.errors import BcgError, LadderError
    from bcg_compiler.options import Options
    from bcg_compiler.plan import Plan
    from bcg_compiler.prefill import PrefillRunner
    from bcg_compiler.runtime import admission, capture, counters, programs_of, reset, stats
    from bcg_compiler.wanted import Prefilled, Wanted

__all__ = [
    "Batch",
    "BcgError",
    "Ladder",
    "LadderError",
    "Limits",
    "Options",
    "Plan",
    "PrefillRunner",
    "Prefilled",
    "Wanted",
    "admission",
    "aot_compile",
    "call_with_break",
    "capture",
    "counters",
    "current_context",
    "eager_break",
    "forward_context",
    "programs_of",
    "prometheus",
    "reset",
    "stats",
    "trace",
]

#: Where each name is, by module.
_HOMES = {
    "aot": ("aot_compile",),
    "breaks": ("call_with_break", "eager_break"),
    "buckets": ("Batch", "Ladder", "Limits"),
    "context": ("current_context", "forward_context"),
    "debug.prometheus": ("prometheus",),
    "debug.timeline": ("trace",),
    "errors": ("BcgError", "LadderError"),
    "options": ("Options",),
    "plan": ("Plan",),
    "prefill": ("PrefillRunner",),
    "runtime": ("admission", "capture", "counters", "programs_of", "reset", "stats"),
    "wanted": ("Prefilled", "Wanted"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
