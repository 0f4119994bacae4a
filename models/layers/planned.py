"""Attention breaks whose plan runs once a call for all layers, and whose run is captured: with FlashInfer.

What they compute is what ``attention.paged_attention`` and ``attention.mla_attention`` compute. All layers that share a
plan share one object of this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

import bcg_compiler as bcg
from bcg_compiler.models.layers import flashinfer
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.errors import ModelError

#: For how many requests a capture has room where nobody says how many a batch may have.
_REQUESTS = 64


@dataclass(eq=False)
class Prepared:
    """What runs that are given ``rows`` rows read.

    If they are captured (``written`` is not ``None``) all of it stands at fixed addresses: ``slots`` int64 ``[rows]``,
    where rows of the caches are written, and ``written`` int64 ``[rows]``, which row is written there. Padded rows
    write the last live row again, where it is written anyway. If they are not captured, ``slots`` are the batch's.

    ``asked``: whether admission keeps away batches of more than ``requests`` requests.
    """

    wrapper: flashinfer.Wrapper
    rows: int
    slots: torch.Tensor
    written: torch.Tensor | None = None
    requests: int = 0
    asked: bool = False

    def fill(self, batch: PrefillBatch) -> None:
        """Plan for a batch of at most ``rows`` tokens."""
        self.wrapper.plan(batch)
        if self.written is None:
            self.slots = batch.slots
            return
        live = batch.tokens
        self.slots[:live].copy_(batch.slots)
        self.slots[live:].copy_(batch.slots[-1:].expand(self.rows - live))
        torch.arange(self.rows, out=self.written)
        self.written.clamp_(max=live - 1)

    def write(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the live ones of ``rows`` ``[rows, ...]`` where the tokens of the batch belong."""
        live = rows[: len(self.slots)] if self.written is None else rows[self.written]
        cache.flatten(0, 1)[self.slots] = live.to(cache.dtype)

    def run(self, queries: tuple[torch.Tensor, ...], caches: tuple[Any, ...], out: torch.Tensor) -> None:
        """Attend. Padded rows of ``out`` are zeroed: a captured run knows not how many there are, and zeroes all."""
        live = slice(len(self.slots))
        out[0 if self.written is not None else len(self.slots) :].zero_()
        self.wrapper.library.run(*(query[live] for query in queries), *caches, out=out[live])


class Planner:
    """Plans for the batch that is published. ``now`` is what runs read until the next plan."""

    def __init__(self, shape: flashinfer.Shape) -> None:
        self.shape = shape
        self.now: Prepared | None = None
        self._workspace: torch.Tensor | None = None
        self._eager: Prepared | None = None
        self._captured: dict[int, Prepared] = {}

    def prepare(self) -> None:
        """The plan of a call, or of a capture: see ``docs/hoisting.md``.

        Raises ``ModelError`` for a batch that the cache is not made for, and for one of more requests than what is
        captured has room for, where nothing has kept it away.
        """
        context = bcg.current_context()
        batch: PrefillBatch | None = context.prefill if "prefill" in context else None
        if context.capturing:
            self.now = self._for_capture(batch, context.bucket_rows, context.limits)
            return
        batch = context.prefill
        if batch.share is not None:
            raise ModelError(
                "The published batch is a context-parallel rank's, and planned attention writes the rows of that rank "
                "alone: build the model with context_parallel=True."
            )
        if "live_rows" in context:
            batch.check_tokens(context.live_rows)
        batch.check_cache(self.shape.pages, self.shape.page_size)
        rows = batch.tokens if context.bucket_rows is None else context.bucket_rows
        self.now = self._for_call(batch, rows)
        self.now.fill(batch)

    def _for_capture(self, batch: PrefillBatch | None, bucket: int | None, limits: bcg.Limits) -> Prepared:
        if bucket is None and batch is None:
            raise ModelError("Without a ladder a capture is planned with the batch of its call, and none is published.")
        rows = batch.tokens if bucket is None else bucket  # type: ignore[union-attr]
        if rows not in self._captured:
            asked = bucket is not None and limits.max_requests is not None
            most = limits.max_requests or _REQUESTS
            if batch is not None and not asked:
                most = max(most, len(batch.lengths))
            # A request has at least one token; with room for more requests than rows the library's sizes wrap.
            most = min(most, rows)
            wrapper = flashinfer.Wrapper(self.shape, self._scratch(), rows, most)
            with torch.inference_mode(False):  # as in Wrapper
                slots, written = torch.zeros(2, rows, dtype=torch.int64, device=self.shape.device)
            self._captured[rows] = Prepared(wrapper, rows, slots, written, most, asked)
        return self._captured[rows]

    def _for_call(self, batch: PrefillBatch, rows: int) -> Prepared:
        captured = self._captured.get(rows)
        if captured is not None and len(batch.lengths) <= captured.requests:
            return captured
        if captured is not None and not captured.asked:
            raise ModelError(
                f"The batch has {len(batch.lengths)} requests, and what is captured for {rows} tokens has room for "
                f"{captured.requests}: give a ladder, and options={{'limits': bcg.Limits(max_requests=...)}}."
            )
        if self._eager is None:
            self._eager = Prepared(flashinfer.Wrapper(self.shape, self._scratch()), 0, batch.slots)
        self._eager.rows = rows
        return self._eager

    def _scratch(self) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = flashinfer.workspace(self.shape.device)
        return self._workspace

    def ready(self, query: torch.Tensor) -> Prepared:
        """What the last plan prepared. Raises ``ModelError`` if it is not for a run over ``query`` ``[rows, ...]``."""
        if query.device != self.shape.device or query.dtype != self.shape.dtype:
            raise ModelError(
                f"Attention is planned for {self.shape.dtype} on {self.shape.device} and called with {query.dtype} on "
                f"{query.device}: build the model in the dtype and on the device where it runs."
            )
        assert self.now is not None  # the plan of a break runs before its body
        if query.shape[0] != self.now.rows:
            raise ModelError(
                f"The published batch has {self.now.rows} tokens and the model is called with {query.shape[0]}: "
                f"publish the batch of this call, with batch.published(): model(...)."
            )
        return self.now


def _plan(self: _Planned) -> None:
    self.planner.prepare()


class _Planned:
    """Attention for all layers of a shape. Hold it as long as what is compiled with it."""

    def __init__(self, shape: flashinfer.Shape) -> None:
        self.planner = Planner(shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model's copy plans for itself."""
        return type(self)(self.planner.shape)


class PlannedAttention(_Planned):
    """Grouped-query attention, of a ``PagedShape``."""

    @bcg.eager_break(
        plan=_plan,
        reason="attention",
        mutates_args=("key_cache", "value_cache", "out"),
        reads_live_rows=True,
        writes_every_row=True,
    )
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``attention.paged_attention``, with the scale and the window of the shape."""
        now = self.planner.ready(query)
        now.write(key_cache, key)
        now.write(value_cache, value)
        now.run((query,), ((key_cache, value_cache),), out)


class PlannedLatentAttention(_Planned):
    """Absorbed MLA to all tokens before, of a ``LatentShape``."""

    @bcg.eager_break(
        plan=_plan,
        reason="attention",
        mutates_args=("latent_cache", "rotary_cache", "out"),
        reads_live_rows=True,
        writes_every_row=True,
    )
    def attend(
        self,
        q_latent: torch.Tensor,
        q_rotary: torch.Tensor,
        latent: torch.Tensor,
        k_rotary: torch.Tensor,
        latent_cache: torch.Tensor,
        rotary_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``attention.mla_attention``, with the scale of the shape."""
        now = self.planner.ready(q_latent)
        now.write(latent_cache, latent)
        now.write(rotary_cache, k_rotary)
        now.run((q_latent, q_rotary), (latent_cache, rotary_cache), out)


def planned_attention(shape: flashinfer.PagedShape) -> PlannedAttention | None:
    """For all layers of a shape; ``None`` where FlashInfer is not there or cannot do it (``kernels.choices``)."""
    return None if flashinfer.unavailable(shape.device) or shape.refuses() else PlannedAttention(shape)


def planned_latent_attention(shape: flashinfer.LatentShape) -> PlannedLatentAttention | None:
    """For all layers of a shape; ``None`` where FlashInfer is not there or cannot do it (``kernels.choices``)."""
    return None if flashinfer.unavailable(shape.device) or shape.refuses() else PlannedLatentAttention(shape)
