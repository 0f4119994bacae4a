"""FlashInfer (Ye et al., 2025) for attention over a paged cache: on CUDA, where it is installed.

FlashInfer splits its work: a *plan* on the host turns the lengths of a batch into index buffers, and a *run* on the
device reads them. ``Wrapper`` keeps the two apart; ``planned`` builds on it breaks whose plan runs once for all layers.
Here also stand plan and run in one, under the signatures of ``reference``.

Note [What a captured run has taken from its plan]
    A captured run holds numbers that its plan gave to the host: the grid, and where in the workspace each list begins.
    Only lists are read again. With ``use_cuda_graph`` the numbers of the grouped-query wrapper depend on the first plan
    alone, which is why that one must be for the most rows. Those of the MLA wrapper do not quite: it takes clusters of
    two blocks where a request has more than 64 rows of heads on average. ``LatentShape.least_rows`` keeps the average
    on the side where it was at the first plan. ``Wrapper.plan`` compares the numbers: another release may choose
    otherwise.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.gpus import lacking

#: The oldest release that this was tried with.
MINIMUM = "0.6.4"

#: Scratch memory of a wrapper, as its documentation advises.
_WORKSPACE = 128 << 20


def unavailable(device: torch.device) -> str:
    """Why FlashInfer is not used on a device; "" if it is. Warns once of a release that is too old."""
    if why := lacking(device, (8, 0)):
        return why
    try:
        found = _library().__version__
    except ImportError as error:
        if error.name == "flashinfer":
            return "it is not installed: pip install 'bcg-compiler[flashinfer]'"
        return f"it cannot be imported: {error}"
    if _numbers(found) < _numbers(MINIMUM):
        why = f"release {found} is too old: install {MINIMUM} or newer"
        _warn_once(f"FlashInfer is not used: {why}.")
        return why
    return ""


def _library() -> Any:
    return importlib.import_module("flashinfer")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


@dataclass(frozen=True, eq=False)
class Lengths:
    """What a plan is told of a batch: int32 tensors on the host, but for ``pages``.

    Attributes:
        rows: ``[requests + 1]``, where the rows of each request begin.
        starts: ``[requests + 1]``, where the pages of each request begin.
        pages: int32 on the device, the pages of all requests, one request after the other.
        contexts: ``[requests]``, tokens in the cache.
        last: ``[requests]``, how many of them are in the last page.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    pages: torch.Tensor
    contexts: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, batch: PrefillBatch, room: int | None = None, padding: int = 0) -> Lengths:
        """Those of a batch, filled up to ``room`` requests with empty ones.

        ``padding``: so many rows behind the live ones belong to one more request, which looks at page 0 again and
        again.
        """
        contexts = [prefix + length for prefix, length in zip(batch.prefixes, batch.lengths, strict=True)]
        counts = [-(-context // batch.page_size) for context in contexts]
        pages = [row[:count] for row, count in zip(batch.page_table, counts, strict=True)]
        lengths = list(batch.lengths)
        if padding:
            pages.append(batch.page_table.new_zeros(-(-padding // batch.page_size)))
            lengths.append(padding)
            contexts.append(padding)
        return cls._made(lengths, contexts, torch.cat(pages), batch.page_size, room)

    @classmethod
    def most(cls, rows: int, room: int, page_size: int, device: torch.device) -> Lengths:
        """All rows in one request of ``room``: what a capture is planned with."""
        pages = torch.zeros(-(-rows // page_size), dtype=torch.int32, device=device)
        return cls._made([rows], [rows], pages, page_size, room)

    @classmethod
    def _made(
        cls, lengths: list[int], contexts: list[int], pages: torch.Tensor, page_size: int, room: int | None
    ) -> Lengths:
        empty = [0] * (0 if room is None else room - len(lengths))
        lengths, contexts = lengths + empty, contexts + empty
        rows, starts = [0], [0]
        for length, context in zip(lengths, contexts, strict=True):
            rows.append(rows[-1] + length)
            starts.append(starts[-1] - (-context // page_size))
        last = [context - (context - 1) // page_size * page_size if context else 0 for context in contexts]
        made = (torch.tensor(numbers, dtype=torch.int32) for numbers in (rows, starts, contexts, last))
        host_rows, host_starts, host_contexts, host_last = made
        return cls(host_rows, host_starts, pages, host_contexts, host_last)


@dataclass(frozen=True, eq=False)
class Room:
    """Buffers at fixed addresses for the lengths of up to ``requests`` requests with ``pages`` pages in all."""

    requests: int
    pages: int
    device: torch.device

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For ``rows``, ``starts``, ``pages`` and ``contexts`` or ``last`` of ``Lengths``."""
        sizes = self.requests + 1, self.requests + 1, self.pages, self.requests
        first, second, third, fourth = (torch.zeros(n, dtype=torch.int32, device=self.device) for n in sizes)
        return first, second, third, fourth


@dataclass(frozen=True)
class PagedShape:
    """Grouped-query attention: what layers that share a plan have in common. ``window`` as of ``reference``."""

    heads: int
    key_heads: int
    width: int
    scale: float
    window: int
    page_size: int
    pages: int
    dtype: torch.dtype
    device: torch.device

    def refuses(self) -> str:
        """Why FlashInfer cannot do it; "" if it can."""
        if self.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 and bfloat16, not in {self.dtype}"
        if self.width not in (64, 128, 256):
            return f"its heads are 64, 128 or 256 wide, not {self.width}"
        if self.heads % self.key_heads:
            return f"{self.heads} heads cannot share {self.key_heads} key heads"
        return ""

    def wrapper(self, workspace: torch.Tensor, room: Room | None) -> Any:
        """A wrapper of the library, for captures if ``room`` is given."""
        kind = _library().BatchPrefillWithPagedKVCacheWrapper
        if room is None:
            return kind(workspace, "NHD")
        rows, starts, pages, last = room.buffers()
        return kind(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=rows,
            paged_kv_indptr_buf=starts,
            paged_kv_indices_buf=pages,
            paged_kv_last_page_len_buf=last,
        )

    def plan(self, wrapper: Any, lengths: Lengths) -> None:
        """Plan runs of the library's wrapper for a batch."""
        wrapper.plan(
            lengths.rows,
            lengths.starts,
            lengths.pages,
            lengths.last,
            self.heads,
            self.key_heads,
            self.width,
            self.page_size,
            causal=True,
            sm_scale=self.scale,
            window_left=self.window - 1,  # theirs does not count the token itself; -1 is none
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def room(self, requests: int, rows: int) -> Room:
        """For captures of ``rows`` rows in up to ``requests`` requests."""
        return Room(requests, self.pages + -(-rows // self.page_size), self.device)

    def least_rows(self, rows: int, requests: int) -> int:
        """How many rows each plan for a capture of ``rows`` must have at least."""
        return 0


#: Of the MLA wrapper: the dimensions that it is compiled for, how many rows of heads a block takes, and the length of
#: its lists of work, which it does not check.
_RANK, _ROTARY, _BLOCK, _WORKS = 512, 64, 64, 16384


@dataclass(frozen=True)
class LatentShape:
    """Absorbed MLA: what layers that share a plan have in common."""

    heads: int
    rank: int
    rotary_width: int
    scale: float
    page_size: int
    pages: int
    dtype: torch.dtype
    device: torch.device

    def refuses(self) -> str:
        """Why FlashInfer cannot do it; "" if it can."""
        if self.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 and bfloat16, not in {self.dtype}"
        if (self.rank, self.rotary_width) != (_RANK, _ROTARY):
            return (
                f"its latents are {_RANK} wide with {_ROTARY} rotary, not {self.rank} with {self.rotary_width} rotary"
            )
        return ""

    def wrapper(self, workspace: torch.Tensor, room: Room | None) -> Any:
        """A wrapper of the library, for captures if ``room`` is given."""
        kind = importlib.import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        if room is None:
            return kind(workspace)
        rows, starts, pages, contexts = room.buffers()
        return kind(
            workspace, use_cuda_graph=True, qo_indptr=rows, kv_indptr=starts, kv_indices=pages, kv_len_arr=contexts
        )

    def plan(self, wrapper: Any, lengths: Lengths) -> None:
        """Plan runs of the library's wrapper for a batch. Raises ``ModelError`` for more than its lists hold."""
        rows = int(lengths.rows[-1])
        # Blocks of rows, each cut into at most as many parts as the device has clusters; 256 is more than those.
        if rows * self.heads // _BLOCK + len(lengths.contexts) + 256 > _WORKS:
            raise ModelError(
                f"{rows} tokens of {self.heads} heads are more than FlashInfer's MLA plans for at once: call the model "
                f"with at most {(_WORKS - 256 - len(lengths.contexts)) * _BLOCK // self.heads} tokens."
            )
        wrapper.plan(
            lengths.rows,
            lengths.starts,
            lengths.pages,
            lengths.contexts,
            self.heads,
            self.rank,
            self.rotary_width,
            self.page_size,
            True,
            self.scale,
            self.dtype,
            self.dtype,
        )

    def room(self, requests: int, rows: int) -> Room:
        """For captures of ``rows`` rows in up to ``requests`` requests; one more is for padding."""
        return Room(requests + 1, self.pages + -(-rows // self.page_size), self.device)

    def least_rows(self, rows: int, requests: int) -> int:
        """How many rows each plan for a capture of ``rows`` must have at least.

        See Note [What a captured run has taken from its plan].
        """
        least = -(-(_BLOCK + 1) * requests // self.heads)
        return least if least <= rows else 0


Shape = PagedShape | LatentShape


class Wrapper:
    """A wrapper of the library that does not overtake itself; with ``rows`` and ``requests`` one for captures.

    ``library`` is the wrapper itself, for its ``run``.
    """

    def __init__(self, shape: Shape, workspace: torch.Tensor, rows: int = 0, requests: int = 0) -> None:
        self.shape = shape
        self.rows = rows
        self._room = shape.room(requests, rows) if rows else None
        with torch.inference_mode(False):  # what is made under it could not be written by a plan outside of it
            self.library = shape.wrapper(workspace, self._room)
        self._copied = torch.cuda.Event() if shape.device.type == "cuda" else None
        self._held: list[int] | None = None
        if self._room is not None:
            self._plan(Lengths.most(rows, self._room.requests, shape.page_size, shape.device))
            self._held = self._numbers()

    def plan(self, batch: PrefillBatch) -> None:
        """Plan runs for a batch. Raises ``ModelError`` if that is not what runs were captured for."""
        if self._room is None:
            self._plan(Lengths.of(batch))
            return
        room = self._room.requests
        padding = max(0, self.shape.least_rows(self.rows, room) - batch.tokens)
        self._plan(Lengths.of(batch, room, padding))
        if self._numbers() != self._held:
            raise ModelError(
                f"FlashInfer plans a batch of {batch.tokens} tokens in another way than the {self.rows} that were "
                f"captured ({self._numbers()} in place of {self._held}): a replay would compute nonsense. Compile "
                f"with options={{'disable_passes': ['hoist_plans']}}, and please report it with the release."
            )

    def _plan(self, lengths: Lengths) -> None:
        # A plan writes into pinned memory, from where the device copies it when it comes to it.
        if self._copied is not None:
            self._copied.synchronize()
        self.shape.plan(self.library, lengths)
        if self._copied is not None:
            self._copied.record()

    def _numbers(self) -> list[int]:
        """What the library hands from its plan to its runs; nothing, for kernels that it does not plan."""
        return [int(number) for number in self.library._plan_info or ()]


def workspace(device: torch.device) -> torch.Tensor:
    """Scratch memory for wrappers that never run at the same time."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def grouped_query_attention(
    batch: PrefillBatch,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> None:
    """``reference.grouped_query_attention``, planned for this call alone."""
    shape = _paged_shape(query, key_cache, scale, window)
    wrapper = _unplanned(shape, _stream(query.device))
    wrapper.plan(batch)
    wrapper.library.run(query, (key_cache, value_cache), out=out)


def refuses_grouped_query_attention(
    batch: PrefillBatch,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
) -> str:
    """Why FlashInfer cannot do such a call; "" if it can."""
    if sinks is not None:
        return "it has no attention sinks"
    return _paged_shape(query, key_cache, scale, window).refuses() or _refuses_mixed(query, key_cache, value_cache)


def mla_attention(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor | None,
) -> None:
    """``reference.mla_attention`` to all tokens before, planned for this call alone. ``chosen`` is ``None``."""
    wrapper = _unplanned(_latent_shape(q_latent, q_rotary, latent_cache, scale), _stream(q_latent.device))
    wrapper.plan(batch)
    wrapper.library.run(q_latent, q_rotary, latent_cache, rotary_cache, out=out)


def refuses_mla_attention(
    batch: PrefillBatch,
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: torch.Tensor | None,
) -> str:
    """Why FlashInfer cannot do such a call; "" if it can."""
    shape = _latent_shape(q_latent, q_rotary, latent_cache, scale)
    return shape.refuses() or _refuses_mixed(q_latent, latent_cache, rotary_cache)


def _refuses_mixed(query: torch.Tensor, *caches: torch.Tensor) -> str:
    kinds = {tensor.dtype for tensor in (query, *caches)}
    return "" if len(kinds) == 1 else f"queries and caches are of different dtypes ({', '.join(map(str, kinds))})"


def _paged_shape(query: torch.Tensor, key_cache: torch.Tensor, scale: float, window: int) -> PagedShape:
    pages, page_size, key_heads, width = key_cache.shape
    return PagedShape(query.shape[1], key_heads, width, scale, window, page_size, pages, query.dtype, query.device)


def _latent_shape(
    q_latent: torch.Tensor, q_rotary: torch.Tensor, latent_cache: torch.Tensor, scale: float
) -> LatentShape:
    pages, page_size, rank = latent_cache.shape
    _, heads, rotary_width = q_rotary.shape
    return LatentShape(heads, rank, rotary_width, scale, page_size, pages, q_latent.dtype, q_latent.device)


def _stream(device: torch.device) -> int:
    """Runs on one stream never overlap, so they can share a wrapper."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=32)
def _unplanned(shape: Shape, stream: int) -> Wrapper:
    return Wrapper(shape, _scratch(shape.device, stream))


@functools.cache
def _scratch(device: torch.device, stream: int) -> torch.Tensor:
    return workspace(device)
