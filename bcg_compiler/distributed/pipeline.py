"""Pipeline parallelism: which layers each stage has, and how the rows go from one stage to the next.

A stage is compiled like any model. Between stages nothing is captured: a proxy is received, the program called with it,
and its result, cut to the live rows, is sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

from bcg_compiler.errors import PipelineError
from bcg_compiler.proxies import PipelineProxy, ProxyForm

__all__ = ["PipelineProxy", "ProxyForm", "Stage", "check_stages", "exchange_stages", "receive", "send"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers ``start`` to ``end - 1`` of a model of ``layers`` layers: stage ``index`` of ``stages``.

    It may have no layers. Raises ``PipelineError``, which names the stage, for a range that cannot be.
    """

    start: int
    end: int
    layers: int
    index: int
    stages: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.stages:
            raise PipelineError(f"There is no stage {self.index} of {self.stages}: they count from 0.")
        if not 0 <= self.start <= self.end <= self.layers:
            raise PipelineError(f"{self} runs over: a range of {self.layers} layers has 0 <= start <= end <= layers.")
        if self.is_first and self.start:
            raise PipelineError(f"{self} is the first one and leaves out layers 0 to {self.start - 1}.")
        if self.is_last and self.end < self.layers:
            raise PipelineError(f"{self} is the last one and leaves out layers {self.end} to {self.layers - 1}.")

    @classmethod
    def of(cls, layers: int, stages: int, index: int, *, start: int | None = None, end: int | None = None) -> Stage:
        """The stage with the layers from ``start`` to before ``end``; without both, its even share."""
        if start is None and end is None:
            return cls.even(layers, stages, index)
        if start is None or end is None:
            given, missing = ("end", "start") if start is None else ("start", "end")
            raise PipelineError(f"Stage {index} of {stages} is given {given} and no {missing}: give both, or neither.")
        return cls(start=start, end=end, layers=layers, index=index, stages=stages)

    @classmethod
    def even(cls, layers: int, stages: int, index: int) -> Stage:
        """The share of a stage where all have as many layers; those before have one more if it does not come out."""
        if stages < 1 or layers < 0:
            raise PipelineError(f"{layers} layers cannot be shared out over {stages} stages.")
        share, more = divmod(layers, stages)
        start = index * share + min(index, more)
        return cls(start=start, end=start + share + (index < more), layers=layers, index=index, stages=stages)

    @property
    def is_first(self) -> bool:
        """Whether it embeds ids; every other one takes a proxy."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits; every other one gives a proxy."""
        return self.index == self.stages - 1

    @property
    def border(self) -> str:
        """Its border with the stage behind it, for ``ProxyForm``."""
        return f"stages {self.index} and {self.index + 1} of {self.stages}"

    @property
    def border_before(self) -> str:
        """Its border with the stage before it."""
        return f"stages {self.index - 1} and {self.index} of {self.stages}"

    def place(self, make: Callable[[int], _T]) -> list[_T | None]:
        """``make(i)`` for each layer of the stage, at the place of its global index; ``None`` at all others.

        Lists that go with the layers are made alike, so that one index is right for all of them.
        """
        return [make(i) if self.start <= i < self.end else None for i in range(self.layers)]

    def __str__(self) -> str:
        return f"Stage {self.index} of {self.stages} (start {self.start}, end {self.end})"


def check_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a model in order. Raises ``PipelineError`` if a layer is in none of them, or in several."""
    found = tuple(sorted(stages, key=lambda stage: stage.index))
    if not found:
        raise PipelineError("There is no stage.")
    for stage in found:
        if (stage.layers, stage.stages) != (found[0].layers, len(found)):
            raise PipelineError(
                f"{stage} is of {stage.layers} layers and one of {stage.stages}, and there are {len(found)} stages of "
                f"{found[0].layers} layers."
            )
    for before, stage in pairwise(found):
        if before.index == stage.index:
            raise PipelineError(f"{before} and {stage} are given, of which there can be one.")
        if stage.start < before.end:
            raise PipelineError(f"{stage} begins within {before}: layers would run twice.")
        if stage.start > before.end:
            raise PipelineError(f"{stage} leaves out layers {before.end} to {stage.start - 1}, behind {before}.")
    return found


def exchange_stages(stage: Stage, group: dist.ProcessGroup | None = None) -> tuple[Stage, ...]:
    """The stages of all ranks of ``group``, which is one pipeline. Collective; raises as ``check_stages``."""
    found: list[Stage] = [stage] * dist.get_world_size(group)
    dist.all_gather_object(found, stage, group=group)
    return check_stages(found)


def send(
    proxy: PipelineProxy, form: ProxyForm, to: int, *, rows: int | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Hand the first ``rows`` rows of a proxy, all of them by default, to rank ``to`` of ``group``.

    Returns once the proxy may be written again. Raises ``PipelineError`` before it sends anything if the proxy is not
    of the form that the receiver expects.
    """
    proxy = proxy if rows is None else proxy.cut(rows)
    form.check(proxy, proxy.rows)
    _exchange(dist.isend, proxy, to, group)


def receive(
    form: ProxyForm,
    rows: int,
    source: int,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> PipelineProxy:
    """The proxy of ``rows`` rows that rank ``source`` of ``group`` sends: its live rows, as both run one batch."""
    proxy = form.empty(rows, device)
    _exchange(dist.irecv, proxy, source, group)
    return proxy


def _exchange(
    direction: Callable[..., dist.Work | None], proxy: PipelineProxy, peer: int, group: dist.ProcessGroup | None
) -> None:
    """All tensors of a proxy in one batch."""
    held = [tensor.contiguous() for _, tensor in proxy.tensors()]
    # Gloo tells tensors from each other by tags, NCCL by their order.
    operations = [dist.P2POp(direction, tensor, group=group, tag=i, group_peer=peer) for i, tensor in enumerate(held)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
