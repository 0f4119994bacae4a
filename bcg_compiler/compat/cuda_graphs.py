"""What torch's graph capture leaves undone after a failure, and which streams take part in a capture."""

import typing
import warnings
from contextlib import suppress
from typing import Any

import torch


def mend(device: torch.device, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Restore the process after a capture into ``pool`` on ``stream`` that could not be ended.

    ``capture_end`` raises before it is done. Then (torch 2.11) every random operation of the process fails from there
    on ("Offset increment outside graph capture"), memory that another stream used is never given back, and the pool
    counts one user too many. A capture that ends well puts the generators right; the rest is said to the allocator.
    """
    with suppress(RuntimeError):  # done already, if what failed is to make a graph of what was captured
        torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
        graph.reset()


def unowned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage over the same memory that does not keep it (torch 2.11 to 2.14)."""
    made: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    return typing.cast(torch.UntypedStorage, made)


def pool_bytes(pool: tuple[int, int]) -> int:
    """What a graph pool holds of the device, in bytes."""
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool))


class StreamPool:
    """All streams that torch hands out for one device: ``torch.cuda.Stream()`` walks around a ring of 32 a priority."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device, priority=p) for p in (0, -1) for _ in range(32)]

    def capturing(self) -> set[torch.cuda.Stream]:
        """Those that a capture, whosever, runs on now."""
        current = torch.cuda.current_stream(self._streams[0].device)
        found = set()
        try:
            for stream in self._streams:
                torch.cuda.set_stream(stream)
                if torch.cuda.is_current_stream_capturing():
                    found.add(stream)
        finally:
            torch.cuda.set_stream(current)
        return found
