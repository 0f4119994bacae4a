"""Which all-to-all backend carries rows to experts, and what a break does with it: dispatch, experts, combine."""

from __future__ import annotations

import difflib

import torch
import torch.distributed as dist

import bcg_compiler as bcg
from bcg_compiler.models.layers.all_to_all import AllToAll, SingleRank
from bcg_compiler.models.layers.all_to_all_deepep import DeepEPAllToAll
from bcg_compiler.models.layers.all_to_all_torch import TorchAllToAll
from bcg_compiler.models.layers.batch import live_batch
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.experts import ExpertGroup
from bcg_compiler.models.layers.kernels import run

#: The backends that are here, by name.
NAMES = ("none", "torch", "deepep")

#: What a backend must say of itself, see Note [What an all-to-all backend declares].
DECLARED = ("shard", "mode", "stub", "barrier", "bucket_multiple", "reserve_bytes")


def open_all_to_all(
    asked: str | AllToAll, *, experts: int, hidden: int, group: dist.ProcessGroup | None = None
) -> AllToAll:
    """The backend of a name of ``NAMES``, or one of your own, if it declares itself.

    ``group``: the ranks that the ``experts`` of a layer are shared out over; all ranks unless given. Raises
    ``ModelError`` for an unknown name, with the nearest; for a backend that is refused, with the reason; and where a
    backend of several ranks is named and ``torch.distributed`` has not begun.
    """
    if not isinstance(asked, str):
        _check(asked, experts)
        return asked
    if asked not in NAMES:
        near = difflib.get_close_matches(asked, NAMES)
        offered = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(NAMES)}."
        raise ModelError(f"There is no all-to-all backend {asked!r}; {offered}")
    if asked == "none":
        if group is not None and group.size() > 1:
            raise ModelError(
                f"The all-to-all backend 'none' is for one rank, and the group has {group.size()}: use 'torch' or "
                f"'deepep'."
            )
        return SingleRank(experts)
    if group is None and not dist.is_initialized():
        raise ModelError(
            f"The all-to-all backend {asked!r} needs a process group: call torch.distributed.init_process_group, or "
            f"use 'none' on one rank."
        )
    ranks = group if group is not None else dist.group.WORLD
    assert ranks is not None
    return TorchAllToAll(experts, ranks) if asked == "torch" else DeepEPAllToAll(experts, hidden, ranks)


def _check(backend: AllToAll, experts: int) -> None:
    who = f"The all-to-all backend {type(backend).__name__} is refused:"
    if lacking := [name for name in DECLARED if getattr(backend, name, None) is None]:
        raise ModelError(
            f"{who} it does not declare {', '.join(lacking)}. What a break may do at capture, which rows it takes and "
            f"what memory it needs is not guessed: see AllToAll."
        )
    if backend.mode != "normal":
        raise ModelError(
            f"{who} its mode is {backend.mode!r}. The break of a prefill runs 'normal', the high-throughput mode; "
            f"'low_latency' is for decoding."
        )
    if backend.shard.experts != experts:
        raise ModelError(f"{who} it is for {backend.shard.experts} experts, and the model has {experts}.")


def through_experts(
    backend: AllToAll,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    group: ExpertGroup,
    out: torch.Tensor,
) -> None:
    """The body of a break of routed experts: send each live row to its experts, run them, bring back weighted sums.

    ``hidden`` and ``out`` ``[rows, hidden]``, ``ids`` int64 and ``weights`` float32 ``[rows, chosen]``; ``group`` are
    the experts of this rank. Meanwhile, and no longer, the field ``all_to_all_mode`` of the
    forward context is the backend's: decoding keeps the mode of its own.
    """
    live = slice(live_batch(hidden).tokens)
    with bcg.forward_context(all_to_all_mode=backend.mode):
        received = backend.dispatch(hidden[live], ids[live], weights[live])
        rows = torch.empty_like(received.hidden)
        run("experts", hidden.device, received.hidden, received.ids, received.weights, group, rows)
        backend.combine(rows, received, out[live])
