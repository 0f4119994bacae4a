"""Real CUDA graphs: raw begin and end for each segment, one pool and one stream for all of them."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bcg_compiler.compat.addresses import current_raw_stream
from bcg_compiler.compat.cuda_graphs import StreamPool, mend, pool_bytes
from bcg_compiler.runtime.capture.protocol import CaptureError, Replay


class _Lane:
    """What all programs of one device share: the stream they capture on, and the stream of the last replay.

    cuBLAS keeps a workspace for each stream (32 MiB on Hopper), whose address captures hold: one stream for all
    programs is one workspace for all. Replays that share it must not overlap, so one on another stream waits for the
    last.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = StreamPool(device)
        self.lock = threading.RLock()  # one capture at a time; what a stub calls may be captured in between
        self.last_stream: torch.cuda.Stream | None = None
        self.last_raw = -1


_lanes: dict[int, _Lane] = {}


class CudaCapture:
    """One pool for all segments of a program: they share the memory of what dies inside them."""

    name = "cuda"
    keeps_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._lane = _lanes.setdefault(device.index, _Lane(device))
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

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
        try:
            return self._record(segment, args)
        except RuntimeError as error:
            if "unjoined" not in str(error):
                raise
            return self._record(segment, args, name_streams=True)  # looking at all streams takes longer than a capture

    def _record(
        self, segment: Callable[..., Any], args: tuple[Any, ...], name_streams: bool = False
    ) -> tuple[Any, Replay]:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool that all graphs have left
        graph = torch.cuda.CUDAGraph()
        forked: set[torch.cuda.Stream] = set()
        elsewhere = self._lane.pool.capturing() if name_streams else set()
        # thread_local: what other threads do meanwhile (NCCL's proxies, a second model) is none of this capture's.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = segment(*args)
            if name_streams:
                forked = self._lane.pool.capturing() - elsewhere - {self._lane.stream}
            graph.capture_end()
        except BaseException as error:
            self._abandon(graph)
            if forked and "unjoined" in str(error):
                names = ", ".join(str(stream) for stream in forked)
                raise CaptureError(f"Work on a side stream is not joined; those that took part: {names}") from error
            raise
        self._graphs.add(graph)
        return result, graph.replay

    @property
    def bytes(self) -> int:
        """What the pool holds of the device."""
        return pool_bytes(self._pool) if self._graphs else 0

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
        for graph in list(self._graphs):
            graph.reset()
        self._graphs.clear()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Throw a capture away. That it cannot be ended is no news: the first error is the one to see."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
                graph.capture_end()
        except RuntimeError:
            mend(self._device, self._pool, self._lane.stream)
        graph.reset()
