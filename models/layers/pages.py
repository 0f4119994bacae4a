"""Which pages of the cache belong to which request, between batches."""

from collections.abc import Hashable, Mapping

import torch

from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.errors import ModelError


class PagePool:
    """Hands pages to requests as they grow, and takes them back: makes the batches of a model step by step.

    One pool serves all layers: a page has the same number in each layer's cache.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        self.pages = pages
        self.page_size = page_size
        self.device = device
        self._free = list(range(pages))
        self._owned: dict[Hashable, list[int]] = {}
        self._tokens: dict[Hashable, int] = {}

    def prefill(self, requests: Mapping[Hashable, int]) -> PrefillBatch:
        """A batch of so many new tokens for each request, behind those that it had before.

        Raises ``ModelError``, and hands out nothing, if there are too few free pages or a request has no new token.
        """
        wanted = {
            request: -(-(self._tokens.get(request, 0) + new) // self.page_size) - len(self._owned.get(request, ()))
            for request, new in requests.items()
        }
        if sum(wanted.values()) > len(self._free):
            raise ModelError(
                f"The batch needs {sum(wanted.values())} more pages of {self.page_size} tokens, and {len(self._free)} "
                f"of {self.pages} are free: free requests that have ended, or build the model with more pages."
            )
        taken = iter(self._free)
        owned = {
            request: [*self._owned.get(request, ()), *(next(taken) for _ in range(more))]
            for request, more in wanted.items()
        }
        prefixes = [self._tokens.get(request, 0) for request in requests]
        batch = PrefillBatch.of(
            list(requests.values()),
            list(owned.values()),
            prefixes=prefixes,
            page_size=self.page_size,
            pages=self.pages,
            device=self.device,
        )
        self._free = list(taken)
        self._owned.update(owned)
        for request, new in requests.items():
            self._tokens[request] = self._tokens.get(request, 0) + new
        return batch

    def idle(self) -> PrefillBatch:
        """The batch of no request: of a rank that has none while others work together with it."""
        table = torch.zeros(0, 1, dtype=torch.int32, device=self.device)
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return PrefillBatch((), (), table, none, none, self.page_size, self.pages)

    def free(self, request: Hashable) -> None:
        """Take back the pages of a request that has ended. Raises ``ModelError`` for one that has none."""
        if request not in self._owned:
            raise ModelError(f"Request {request!r} has no pages: it was never prefilled, or is freed already.")
        self._free += self._owned.pop(request)
        del self._tokens[request]
