"""What is wanted of a batch, and how it is made of the last layer's rows: eagerly, of the live batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from bcg_compiler.buckets import Admission
from bcg_compiler.buckets.admission import HiddenStates
from bcg_compiler.errors import RankError

Logits = Literal["none", "last", "all"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is wanted of a batch besides its keys and values in the cache.

    ``logits``: of the last token of each request, of all tokens, or none. ``logprobs``: what each prompt token got from
    the tokens before it. ``hidden_states``: of the last layer, normed, of the last or of all tokens.
    """

    logits: Logits = "last"
    logprobs: bool = False
    hidden_states: HiddenStates = "none"

    def __post_init__(self) -> None:
        for name, words in (("logits", get_args(Logits)), ("hidden_states", get_args(HiddenStates))):
            if getattr(self, name) not in words:
                raise RankError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(map(repr, words))}.")


@dataclass(frozen=True)
class Prefilled:
    """What came of a batch.

    Ranks that are not the last stage of a pipeline have no logits, and of hidden states the rows that they hold.

    Attributes:
        admission: whether it was replayed, in a bucket of tokens of the whole batch.
        logits: ``[requests or tokens, vocab]``.
        logprobs: float32 for each request ``[its new tokens - 1]``: of each token but the first of the chunk.
        hidden_states: ``[requests or tokens, hidden]``.
        auxiliary: ``[tokens, hidden]`` of each layer that the body hands out besides, in its order.
    """

    admission: Admission
    logits: Tensor | None = None
    logprobs: tuple[Tensor, ...] | None = None
    hidden_states: Tensor | None = None
    auxiliary: tuple[Tensor, ...] = ()


def finish(
    admission: Admission,
    hidden: Tensor,
    auxiliary: tuple[Tensor, ...],
    lengths: Sequence[int],
    ids: Tensor | None,
    wanted: Wanted,
    tail: Callable[[Tensor], Tensor] | None,
) -> Prefilled:
    """What is wanted, of the normed rows ``[tokens, hidden]`` of the whole batch.

    ``tail``: rows to logits, for what asks for those; ``ids`` int64 ``[tokens]``, for ``logprobs``.
    """
    last = torch.tensor([end - 1 for end in accumulate(lengths)], dtype=torch.int64).to(hidden.device)
    logits = logprobs = states = every = None
    if wanted.logits == "all" or wanted.logprobs:
        assert tail is not None
        every = tail(hidden)
    if wanted.logits == "all":
        logits = every
    elif wanted.logits == "last":
        assert tail is not None
        logits = tail(hidden[last]) if every is None else every[last]
    if wanted.logprobs:
        assert every is not None and ids is not None
        logprobs = _logprobs(every, ids, lengths)
    if wanted.hidden_states != "none":
        states = hidden if wanted.hidden_states == "all" else hidden[last]
    return Prefilled(admission, logits, logprobs, states, auxiliary)


def _logprobs(logits: Tensor, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    found, start = [], 0
    for length in lengths:
        rows = logits[start : start + length - 1].float().log_softmax(-1)
        found.append(rows.gather(1, ids[start + 1 : start + length, None])[:, 0])
        start += length
    return tuple(found)
