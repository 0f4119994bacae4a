"""Real CUDA graphs: raw begin and end for each segment, one pool and one stream for all of them."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from bcg_compiler.compat.addresses import current_raw_stream
from bcg_compiler.runtime.capture.protocol import Replay


class _Lane:
    """What all programs of one device share: the stream they capture on, and the stream of the last replay.

    cuBLAS keeps a workspace for each stream (32 MiB on Hopper), whose address captures hold: one stream for all
    programs is one workspace for all. Replays that share it must not overlap, so one on another stream waits for the
    last.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.lock = threading.Lock()  # one capture at a time
        self.last_stream: torch.cuda.Stream | None = None
        self.last_raw = -1


_lanes: dict[int, _Lane] = {}


class CudaCapture:
    """One pool for all segments of a program: they share the memory of what dies inside them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._lane = _lanes.setdefault(device.index, _Lane(device))
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        """Capture on the lane's stream, with the collector at rest: a tensor freed by it would end the capture."""
        with self._lane.lock:
            current = torch.cuda.current_stream(self._device)
            collecting = gc.isenabled()
            gc.disable()
            try:
                self._lane.stream.wait_stream(current)
                with torch.cuda.stream(self._lane.stream):
                    yield
                current.wait_stream(self._lane.stream)
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
        lane, raw = self._lane, current_raw_stream(self._device.index)
        if raw != lane.last_raw:
            current = torch.cuda.current_stream(self._device)
            if lane.last_stream is not None:
                current.wait_stream(lane.last_stream)
            lane.last_stream, lane.last_raw = current, raw

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
