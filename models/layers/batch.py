"""What differs from batch to batch: published around the call of a model and read by the bodies of its breaks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

import bcg_compiler as bcg
from bcg_compiler.distributed import RowGather, Zigzag
from bcg_compiler.models.layers.errors import ModelError


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a batch, as a break body sees it: rows ``start:stop`` of the batch are its new tokens.

    ``context`` counts the tokens that the last of them may look at: the prefix and the new ones. ``slots`` is int64
    ``[context]``: where each token of the context stands in a cache seen as ``[pages * page_size, ...]``.
    """

    start: int
    stop: int
    prefix: int
    slots: torch.Tensor

    @property
    def context(self) -> int:
        """Tokens of the request in the cache, once the new ones are written."""
        return self.prefix + self.stop - self.start


@dataclass(frozen=True, eq=False)
class Share:
    """Of which batch a batch of one context-parallel rank is a part, and how all rows come together again.

    Its methods take rows of the batch's device. Indices are found once a batch, for all layers.
    """

    whole: PrefillBatch
    layout: Zigzag
    gather: RowGather

    @functools.cached_property
    def order(self) -> torch.Tensor:
        """Int64: which rows of the whole batch this rank holds, in its order."""
        return self.layout.order(self.whole.lengths, self.gather.rank).to(self.whole.slots.device)

    @functools.cached_property
    def _gathered(self) -> tuple[int, torch.Tensor]:
        lengths = self.whole.lengths
        return self.layout.longest(lengths), self.layout.places(lengths).to(self.whole.slots.device)

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows of those of the whole batch ``[tokens, ...]``: of ids, say."""
        self.whole.check_tokens(len(rows))
        return rows[self.order]

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the whole batch ``[tokens, ...]`` in order, of this rank's. All ranks call it together."""
        longest, places = self._gathered
        return self.gather.all_gather(rows, longest).flatten(0, 1)[places]


@dataclass(frozen=True, eq=False)
class PrefillBatch:
    """The new tokens of several requests, one request after the other, and where their keys and values are kept.

    Make it with ``PrefillBatch.of``, which checks it. Decoding is a batch of one new token a request.

    Attributes:
        lengths: new tokens of each request, at least 1.
        prefixes: tokens of each request that the cache holds already.
        page_table: int32 ``[requests, most pages of a request]``, the pages of each request in order; 0 behind the
            last one.
        slots: int64 ``[tokens]``, where each new token is written: ``page * page_size + place in the page``.
        positions: int64 ``[tokens]``, the place of each new token in its request. The model's input of that name.
        page_size: tokens of a page.
        pages: pages of the cache.
        share: what context parallelism has made of the batch, ``None`` without it. See ``context_parallel``.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    page_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    page_size: int
    pages: int
    share: Share | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        page_lists: Sequence[Sequence[int]],
        *,
        prefixes: Sequence[int] | None = None,
        page_size: int,
        pages: int,
        device: torch.device | str = "cpu",
    ) -> PrefillBatch:
        """A batch from plain numbers: ``page_lists[i]`` are the pages of request ``i`` in order, prefix included.

        Raises ``ModelError`` for a request without new tokens, too few pages, a page that the cache does not have, or
        one that two places use.
        """
        prefixes = [0] * len(lengths) if prefixes is None else prefixes
        if not lengths or not len(lengths) == len(prefixes) == len(page_lists):
            raise ModelError(
                f"A batch is made of one length, one prefix and one list of pages a request: there are {len(lengths)}, "
                f"{len(prefixes)} and {len(page_lists)}."
            )
        owners: dict[int, int] = {}
        for at, (length, prefix, owned) in enumerate(zip(lengths, prefixes, page_lists, strict=True)):
            if length < 1 or prefix < 0:
                raise ModelError(
                    f"Request {at} has {length} new tokens behind {prefix}: a request without new tokens is left out "
                    f"of the batch."
                )
            if len(owned) * page_size < prefix + length:
                raise ModelError(
                    f"Request {at} has {prefix + length} tokens and {len(owned)} pages of {page_size}: give it "
                    f"{-(-(prefix + length) // page_size)} pages."
                )
            for page in owned:
                if not 0 <= page < pages:
                    raise ModelError(f"Page {page} of request {at} is out of range: the cache has {pages} pages.")
                if page in owners:
                    raise ModelError(f"Page {page} is given twice: to request {owners[page]} and to request {at}.")
                owners[page] = at
        table = torch.zeros(len(lengths), max(map(len, page_lists)), dtype=torch.int32)
        for row, owned in zip(table, page_lists, strict=True):
            row[: len(owned)] = torch.tensor(owned)
        positions = [torch.arange(p, p + n) for p, n in zip(prefixes, lengths, strict=True)]
        slots = [
            row[at // page_size].long() * page_size + at % page_size for row, at in zip(table, positions, strict=True)
        ]
        return cls(
            tuple(lengths),
            tuple(prefixes),
            table.to(device),
            torch.cat(slots).to(device),
            torch.cat(positions).to(device),
            page_size,
            pages,
        )

    @property
    def tokens(self) -> int:
        """New tokens of all requests: the live rows of the call."""
        return sum(self.lengths)

    @property
    def longest_context(self) -> int:
        """The most tokens that a token of this batch may look at."""
        return max((prefix + length for prefix, length in zip(self.prefixes, self.lengths, strict=True)), default=0)

    @functools.cached_property
    def requests(self) -> tuple[Request, ...]:
        """The requests in order, with the slots of their whole contexts: found once for all layers."""
        found, start = [], 0
        for row, length, prefix in zip(self.page_table, self.lengths, self.prefixes, strict=True):
            at = torch.arange(prefix + length, device=row.device)
            slots = row[at // self.page_size].long() * self.page_size + at % self.page_size
            found.append(Request(start, start + length, prefix, slots))
            start += length
        return tuple(found)

    @functools.cached_property
    def owners(self) -> torch.Tensor:
        """Int64 ``[tokens]``: the request of each new token, found once for all layers."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return torch.arange(len(lengths)).repeat_interleave(lengths).to(self.page_table.device)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Int32 ``[requests + 1]``: the first new token of each request, and where the last one ends."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32).to(self.page_table.device)

    def context_parallel(self, layout: Zigzag, gather: RowGather) -> PrefillBatch:
        """What rank ``gather.rank`` computes of this batch. All ranks make it of the same one.

        Each part of a request that the rank holds is to attention a request of its own, behind a prefix: its context
        ends with the part. What a layer keeps of tokens is gathered over the ranks before it is written
        (``cache.write``), so that each rank's cache has all of them. Parts without a row are left out; a rank may hold
        none at all. Call the model with ``share.split(ids)`` and ``positions``, and give its rows to ``share.restore``.

        Raises ``ModelError`` for a batch of a rank, and for a layout over another number of ranks.
        """
        if self.share is not None:
            raise ModelError("The batch is one rank's already: make the batch of a rank of the whole one.")
        if layout.size != gather.size:
            raise ModelError(f"The layout is over {layout.size} ranks, and rows are gathered of {gather.size}.")
        share = Share(self, layout, gather)
        held = [
            (at, part)
            for at, length in enumerate(self.lengths)
            for part in layout.held(length, gather.rank)
            if len(part)
        ]
        owners = torch.tensor([at for at, _ in held], dtype=torch.int64, device=self.page_table.device)
        return replace(
            self,
            lengths=tuple(len(part) for _, part in held),
            prefixes=tuple(self.prefixes[at] + part.start for at, part in held),
            page_table=self.page_table[owners],
            slots=self.slots[share.order],
            positions=self.positions[share.order],
            share=share,
        )

    def check_tokens(self, given: int) -> None:
        """Raise ``ModelError`` if the batch is not of a call of so many tokens."""
        if self.tokens != given:
            raise ModelError(
                f"The published batch has {self.tokens} tokens and the model is called with {given}: publish the batch "
                f"of this call, with batch.published(): model(...)."
            )

    def check_cache(self, pages: int, page_size: int) -> None:
        """Raise ``ModelError`` if the batch was made for another cache."""
        if (self.pages, self.page_size) != (pages, page_size):
            raise ModelError(
                f"The published batch is for a cache of {self.pages} pages of {self.page_size} tokens, and the model's "
                f"has {pages} of {page_size}."
            )

    @contextmanager
    def published(self) -> Iterator[None]:
        """Publish the batch for the calls within: to break bodies as ``prefill``, to admission as ``batch``.

        Admission is told of the whole batch, on all ranks alike.
        """
        whole, local = self, None
        if self.share is not None:
            whole, local = self.share.whole, self.share.layout.required(self.share.whole.lengths)
        admitted = bcg.Batch(
            rows=whole.tokens, local_rows=local, requests=len(whole.lengths), prefix_lengths=whole.prefixes
        )
        with bcg.forward_context(prefill=self, batch=admitted):
            yield


def live_batch(rows: torch.Tensor, cache: torch.Tensor | None = None) -> PrefillBatch:
    """The batch that is published, for a break body that was given ``rows`` ``[tokens, ...]``.

    There may be padded rows behind, if ``live_rows`` in the forward context says how many are not: a runner's does.
    Raises ``ModelError`` if the batch has other tokens than the call, or was made for another cache ``[pages,
    page_size, ...]``. Only numbers of the host are looked at.
    """
    context = bcg.current_context()
    batch: PrefillBatch = context.prefill
    batch.check_tokens(context.live_rows if "live_rows" in context else rows.shape[0])
    if cache is not None:
        batch.check_cache(*cache.shape[:2])
    return batch
