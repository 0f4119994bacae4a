"""torch's structured trace, which ``TORCH_TRACE`` writes and ``tlparse`` shows (run with torch 2.11, 2.13 and 2.14)."""

from torch._guards import CompileContext, compile_context
from torch._logging import trace_structured
from torch._logging._internal import LazyTraceHandler, trace_log


def is_traced() -> bool:
    """Whether torch writes a trace: without ``TORCH_TRACE`` its handler goes at Dynamo's first message, before a
    backend is called. Other handlers are of those who collect all logs, such as pytest.
    """
    return any(isinstance(handler, LazyTraceHandler) for handler in trace_log.handlers)


def current_compile() -> CompileContext | None:
    """The compile that this thread is in, which ``tlparse`` lists artifacts under; ``None`` outside of one."""
    return CompileContext.try_get()


def trace_artifact(name: str, encoding: str, text: str, compiled: CompileContext | None) -> None:
    """Add a text to the trace, under the compile ``compiled``. ``encoding``: ``string`` or ``json``."""
    with compile_context(compiled):
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": encoding},
            payload_fn=lambda: text,
            expect_trace_id=False,
        )
