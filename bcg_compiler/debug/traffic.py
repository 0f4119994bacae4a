"""Made-up traffic: which tokens of which prompts are prefilled together, call by call."""

from collections.abc import Hashable, Sequence
from itertools import islice
from random import Random

#: The most prompts that are at hand at a time, which is also the most of one batch.
AT_HAND = 4

#: New tokens of each request of a batch, by its number.
Requests = dict[Hashable, int]


def schedule(prompts: Sequence[int], ceiling: int, seed: int) -> list[Requests]:
    """Batches of at most ``ceiling`` tokens until all prompts, given by their lengths, are prefilled.

    Each batch has a number of tokens of its own, drawn at random, and shares them out over the prompts at hand: so most
    prompts come in several chunks, each behind a prefix. Requests count as the prompts do.
    """
    draw = Random(seed)
    coming = iter(enumerate(prompts))
    left: Requests = {}
    batches: list[Requests] = []
    while True:
        left.update(islice(coming, AT_HAND - len(left)))
        if not left:
            return batches
        tokens = draw.randint(1, ceiling)
        batch: Requests = {}
        for before, (request, more) in enumerate(left.items()):
            share = -(-tokens // (len(left) - before))
            if new := min(share, more):
                batch[request] = new
                tokens -= new
        batches.append(batch)
        left = {request: more - batch.get(request, 0) for request, more in left.items() if more > batch.get(request, 0)}


def ended(batches: Sequence[Requests]) -> list[list[Hashable]]:
    """The requests that have had their last tokens with each batch."""
    last = {request: at for at, batch in enumerate(batches) for request in batch}
    return [[request for request in batch if last[request] == at] for at, batch in enumerate(batches)]


def pages_needed(batches: Sequence[Requests], page_size: int) -> int:
    """The most pages that are in use at a time, if those of a request are given back with its last tokens."""
    held: Requests = {}
    most = 1
    for batch, done in zip(batches, ended(batches), strict=True):
        for request, new in batch.items():
            held[request] = held.get(request, 0) + new
        most = max(most, sum(-(-tokens // page_size) for tokens in held.values()))
        for request in done:
            del held[request]
    return most
