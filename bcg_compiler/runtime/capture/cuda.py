"""Real CUDA graphs: raw begin and end for each segment, one pool and one stream for all of them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from bcg_compiler.compat.addresses import current_raw_stream
from bcg_compiler.runtime.capture.protocol import Replay


class CudaCapture:
    """One pool and one stream; segments share the memory of what dies inside them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._last_stream: torch.cuda.Stream | None = None
        self._last_raw = -1
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        """Capture on the program's stream, with the collector at rest: a tensor freed by it would end the capture."""
        current = torch.cuda.current_stream(self._device)
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)
        finally:
            if collecting:
                gc.enable()

    def capture(self, segment: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Replay]:
        """Record ``segment(*args)`` as one graph."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile (NCCL's proxies, a second model) is none of this capture's.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = segment(*args)
        except BaseException:
            self._abandon(graph)
            raise
        graph.capture_end()
        self._graphs.append(graph)
        return result, graph.replay

    def before_replay(self) -> None:
        """Order this replay behind the last one where the caller has changed streams: both use the same memory."""
        raw = current_raw_stream(self._device.index)
        if raw != self._last_raw:
            current = torch.cuda.current_stream(self._device)
            if self._last_stream is not None:
                current.wait_stream(self._last_stream)
            self._last_stream, self._last_raw = current, raw

    def release(self) -> None:
        """Free graphs and pool, once nothing replays any more."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    @staticmethod
    def _abandon(graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed. Ending raises, too, once it was invalidated; the first error is the one to see."""
        with suppress(RuntimeError):
            graph.capture_end()
        graph.reset()
