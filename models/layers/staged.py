"""A language model, or one pipeline stage of it: what it has beside its layers, what goes in and what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from bcg_compiler.distributed.pipeline import PipelineProxy, ProxyForm, Stage
from bcg_compiler.models.layers.basic import Embedding, Linear, RMSNorm
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.gather_tail import gather_rows

Handed = PipelineProxy | tuple[PipelineProxy, tuple[torch.Tensor, ...]]


class StageDecoder(nn.Module):
    """The layers of a stage, each at its global index among all; the others are ``None``.

    The first stage has the embedding, and so has the last one where its weight is that of the logits, too (``tied``).
    The last one has the norm.
    """

    def __init__(
        self,
        stage: Stage | None,
        layers: int,
        make: Callable[[int], nn.Module],
        *,
        vocab: int,
        hidden: int,
        eps: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.stage = stage = Stage.even(layers, 1, 0) if stage is None else stage
        if stage.layers != layers:
            raise ModelError(f"{stage} is one of {stage.layers} layers, and the configuration has {layers}.")
        self.vocab, self.hidden, self.tied = vocab, hidden, tied
        #: Layers of this stage whose rows are handed out, too, behind the proxy: what a draft model reads, say.
        self.auxiliary: tuple[int, ...] = ()
        self.embed_tokens = Embedding(vocab, hidden) if stage.is_first or (stage.is_last and tied) else None
        self.layers = nn.ModuleList(stage.place(make))  # type: ignore[arg-type]  # torch takes None for a module
        self.norm = RMSNorm(hidden, eps) if stage.is_last else None

    def own_layers(self) -> list[tuple[int, nn.Module]]:
        """The layers that are here, in order, with their numbers."""
        return [(i, self.layers[i]) for i in range(self.stage.start, self.stage.end)]

    def forward(self, proxy: PipelineProxy, positions: torch.Tensor) -> Handed:
        """From embedded ids, or what the stage before hands on, to what the next one takes, or normed hidden states.

        ``positions`` int64 ``[tokens]``. With ``auxiliary`` layers also the rows behind each of them.
        """
        raise NotImplementedError

    def handed(self, proxy: PipelineProxy, rows: dict[int, torch.Tensor]) -> Handed:
        """The result of ``forward``: ``rows`` are those behind the layers that are here."""
        return (proxy, tuple(rows[i] for i in self.auxiliary)) if self.auxiliary else proxy


class StagedModel(nn.Module):
    """A language model whose first argument is ids: all of it, or its first stage.

    ``takes`` and ``gives`` are the forms of the proxies before and behind the stage, ``None`` at the ends of the
    model. ``form(border, layer)`` says what a proxy in front of a layer looks like. ``gathers``: rows are those of one
    context-parallel rank, and logits those of the whole batch, on each.
    """

    def __init__(self, decoder: StageDecoder, form: Callable[[str, int], ProxyForm]) -> None:
        super().__init__()
        self.stage = stage = decoder.stage
        self.takes = None if stage.is_first else form(stage.border_before, stage.start)
        self.gives = None if stage.is_last else form(stage.border, stage.end)
        self.model = decoder
        self.gathers = False
        self.lm_head = Linear(decoder.hidden, decoder.vocab) if stage.is_last else None
        if self.lm_head is not None and decoder.tied:
            assert decoder.embed_tokens is not None
            self.lm_head.weight = decoder.embed_tokens.weight

    def from_ids(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | PipelineProxy:
        """Logits ``[tokens, vocab]`` for the flattened new tokens of a batch, or the proxy for the next stage.

        Both inputs are int64 ``[tokens]``, under context parallelism of the tokens that the rank holds. Each family has
        a ``forward`` of its own that calls it: Dynamo keeps what it compiles by the code of that method, and gives up
        where there is too much for one.
        """
        embed = self.model.embed_tokens
        assert embed is not None  # the first stage has it
        return _handed_on(self.model(PipelineProxy(embed(input_ids)), positions), self)


class LaterStage(nn.Module):
    """A stage behind the first one: it has no ids, and takes a proxy in their place. Parameters keep their names."""

    def __init__(self, built: StagedModel) -> None:
        super().__init__()
        assert built.takes is not None
        self.stage, self.takes, self.gives = built.stage, built.takes, built.gives
        self.model, self.lm_head, self.gathers = built.model, built.lm_head, built.gathers

    def forward(self, proxy: PipelineProxy, positions: torch.Tensor) -> torch.Tensor | PipelineProxy:
        """Logits or the next proxy, as of ``StagedModel.from_ids``; ``positions`` int64 ``[tokens]``.

        Raises ``PipelineError`` for a proxy that is not of the form of ``takes``.
        """
        self.takes.check(proxy, positions.shape[0])
        return _handed_on(self.model(proxy, positions), self)


def _handed_on(handed: Handed, stage: StagedModel | LaterStage) -> torch.Tensor | PipelineProxy:
    proxy = handed[0] if isinstance(handed, tuple) else handed
    if stage.lm_head is None:
        return proxy
    return stage.lm_head(gather_rows(proxy.hidden_states) if stage.gathers else proxy.hidden_states)


def is_of_another_stage(name: str, decoder: StageDecoder) -> bool:
    """Whether a tensor of a checkpoint of the whole model is held by other stages only."""
    stage = decoder.stage
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        return int(layer[1]) < stage.layers and not stage.start <= int(layer[1]) < stage.end
    if name.startswith("model.embed_tokens."):
        return decoder.embed_tokens is None
    return name.startswith(("model.norm.", "lm_head.")) and not stage.is_last
