"""What one pipeline stage hands to the next: the tensors, and what is agreed about them.

It stands this low because the compiler knows it: ``passes.bind_pp_proxies`` finds the inputs of a graph that lie in a
``PipelineProxy``. Users get both names from ``bcg_compiler.distributed.pipeline``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bcg_compiler.compat.pytree import register_dataclass
from bcg_compiler.errors import PipelineError


@dataclass(frozen=True, eq=False)
class PipelineProxy:
    """The rows between two pipeline stages: an argument of the later one, the result of the earlier one.

    Attributes:
        hidden_states: ``[tokens, hidden]``, of a floating type; as wide as all its streams together
            (``hc_hidden_size``) in a model with hyper-connections, which has no ``residual``.
        residual: ``[tokens, hidden]`` or ``[tokens, blocks, hidden]``, where a model carries one beside.
        topk_indices: int32 ``[tokens, topk]``, the tokens that an indexer before the border has chosen for layers
            behind it.

    Raises ``PipelineError`` for what is none of that. It is a pytree of its tensors.
    """

    hidden_states: Tensor
    residual: Tensor | None = None
    topk_indices: Tensor | None = None

    def __post_init__(self) -> None:
        _check("hidden_states", self.hidden_states, (2,), self.hidden_states)
        if self.residual is not None:
            _check("residual", self.residual, (2, 3), self.hidden_states)
            if self.residual.shape[-1] != self.hidden_states.shape[1]:
                raise PipelineError(
                    f"A proxy's residual is {_form(self.residual)}, and its hidden_states are "
                    f"{_form(self.hidden_states)}: both must be as wide."
                )
        if self.topk_indices is not None:
            _check("topk_indices", self.topk_indices, (2,), self.hidden_states)

    @property
    def rows(self) -> int:
        """Tokens."""
        return self.hidden_states.shape[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are there, by name, always in the same order."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor

    def cut(self, rows: int) -> PipelineProxy:
        """The first ``rows`` rows: the live ones of a padded proxy. Raises ``PipelineError`` if there are fewer."""
        if rows > self.rows:
            raise PipelineError(f"A proxy of {self.rows} rows cannot be cut to {rows}.")
        return PipelineProxy(**{name: tensor[:rows] for name, tensor in self.tensors()})


register_dataclass(PipelineProxy)


@dataclass(frozen=True)
class ProxyForm:
    """What a proxy at one border looks like, but for its number of rows: both stages know it before they talk.

    Attributes:
        border: which border of which stages, for errors: ``"stages 0 and 1 of 2"``.
        hidden: width of ``hidden_states``.
        dtype: of ``hidden_states`` and ``residual``.
        residual: shape of a row of ``residual``, ``()`` if there is none.
        topk: width of ``topk_indices``, 0 if there are none.
    """

    border: str
    hidden: int
    dtype: torch.dtype
    residual: tuple[int, ...] = ()
    topk: int = 0

    def wanted(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape of a row and type of each tensor that a proxy must hold, by name."""
        found = {
            "hidden_states": ((self.hidden,), self.dtype),
            "residual": (self.residual, self.dtype),
            "topk_indices": ((self.topk,) if self.topk else (), torch.int32),
        }
        return {name: form for name, form in found.items() if form[0]}

    def check(self, proxy: PipelineProxy, rows: int) -> None:
        """Raise ``PipelineError`` unless ``proxy`` holds these tensors and no others, of so many rows."""
        wanted = self.wanted()
        given = dict(proxy.tensors())
        for name, (row, dtype) in wanted.items():
            tensor = given.pop(name, None)
            if tensor is None:
                raise PipelineError(
                    f"The proxy between {self.border} lacks {name}, which the later stage reads: the stage before must "
                    f"hand it on."
                )
            if tensor.dtype != dtype or tuple(tensor.shape[1:]) != row:
                raise PipelineError(
                    f"{name} of the proxy between {self.border} is {_form(tensor)}; it must be {dtype} of "
                    f"[rows, {', '.join(map(str, row))}]."
                )
            if tensor.shape[0] != rows:
                raise PipelineError(
                    f"{name} of the proxy between {self.border} has {tensor.shape[0]} rows, and this call has {rows}: "
                    f"both stages must run the same batch, and padded rows be cut off (PipelineProxy.cut)."
                )
        if given:
            raise PipelineError(
                f"The proxy between {self.border} has {', '.join(given)}, which the later stage does not read."
            )

    def empty(self, rows: int, device: torch.device | str) -> PipelineProxy:
        """A proxy of that form to receive into."""
        return PipelineProxy(
            **{
                name: torch.empty(rows, *row, dtype=dtype, device=device)
                for name, (row, dtype) in self.wanted().items()
            }
        )


def _check(name: str, tensor: object, dims: tuple[int, ...], hidden: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise PipelineError(f"A proxy's {name} is {tensor!r:.80}; it must be a tensor.")
    if tensor.dim() not in dims:
        raise PipelineError(
            f"A proxy's {name} is {_form(tensor)}; it must have {' or '.join(map(str, dims))} dimensions."
        )
    if name == "topk_indices":
        if tensor.dtype != torch.int32:
            raise PipelineError(f"A proxy's {name} is {_form(tensor)}; it must be int32.")
    elif not tensor.is_floating_point() or tensor.dtype != hidden.dtype:
        raise PipelineError(f"A proxy's {name} is {_form(tensor)}; it must be of one floating type with the others.")
    if tensor.shape[0] != hidden.shape[0]:
        raise PipelineError(
            f"A proxy's {name} has {tensor.shape[0]} rows, and its hidden_states have {hidden.shape[0]}."
        )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
