"""Row counts: what one row gets from the others, whatever was in the buffer before; and ops that tune themselves."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

WAYS = ("captured",)
ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


def _quantised(h: Tensor) -> Any:
    scale = h.abs().amax().clamp(min=1e-6) / 127
    return (h / scale).round().clamp(-127, 127) * scale, scale


def _softmax_over_rows(h: Tensor) -> Any:
    return h.softmax(0), h.logsumexp(0)


def _normalised_over_rows(h: Tensor) -> Any:
    return (h - h.mean(0)) / (h.std(0, correction=0) + 1e-5)


def _cumulative(h: Tensor) -> Any:
    return h.cumsum(0), h.flip(0).cumsum(0), h.cummax(0).values


def _sorted(h: Tensor) -> Any:
    return h.sort(0).values, h.argmax(0), h[h.sum(-1).argsort()]


def _neighbours(h: Tensor) -> Any:
    return h.roll(1, 0) + h, h[-1], h.diff(dim=0)


def _attention(h: Tensor) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def _causal_attention(h: Tensor) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True)[0]


def _counted(h: Tensor) -> Any:
    return h.shape[0] * h, h.numel(), (h > 0).sum(), h.isnan().any(), h.prod(0)


def _by_itself(h: Tensor) -> Any:
    return h.t() @ h, torch.cdist(h, h) if h.isfinite() is None else h @ h.t()


class _Mixing(nn.Module):
    def __init__(self, breaks: SimpleNamespace, body: Callable[[Tensor], Any], training: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8).train(training)
        self.breaks, self.body = breaks, body

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.lin(x))
        return self.body(self.breaks.wall(h)), self.body(x)


@pytest.mark.parametrize(
    "body",
    [
        *(_quantised, _softmax_over_rows, _normalised_over_rows, _cumulative, _sorted, _neighbours, _attention),
        *(_causal_attention, _counted, _by_itself),
    ],
    ids=lambda f: f.__name__[1:],
)
@ONE_FORM
def test_live_rows_do_not_see_other_rows(
    check: Any, breaks: SimpleNamespace, rand: Any, body: Callable[[Tensor], Any]
) -> None:
    """Rows that fill a bucket held NaN, old values or zeros, and an operation over all rows spread them to the real
    ones (flashinfer-ai/flashinfer#2883).
    """
    poisoned = rand(8, 8)
    poisoned[5:] = float("nan")
    large, small = rand(8, 8) * 1e4, rand(5, 8) * 1e-3
    calls = [large, small, rand(3, 8), poisoned, rand(5, 8), torch.full((8, 8), float("inf")), small]
    check(_Mixing(breaks, body).eval(), [(x,) for x in calls])


@ONE_FORM
def test_averages_over_a_batch_take_live_rows_only(check: Any, breaks: SimpleNamespace, rand: Any) -> None:
    """Running averages count as results (flashinfer-ai/flashinfer#2861)."""
    check(_Mixing(breaks, _quantised, training=True), [(rand(n, 8),) for n in (8, 5, 3, 8, 2)])


# -- ops that tune themselves -----------------------------------------------------------------------------------------

_tuned: dict[Any, int] = {}
_events: list[Any] = []
_workspace: list[Tensor] = []


def _key(x: Tensor) -> Any:
    return tuple(x.shape), x.dtype


@torch.library.custom_op("bcgtest::tuned", mutates_args=())
def tuned(x: Tensor, w: Tensor) -> Tensor:
    """Tries its variants at the first call for a shape, and reads their times on the host."""
    variants = (lambda: x @ w, lambda: (w.t() @ x.t()).t().contiguous())
    if _key(x) not in _tuned:
        _events.append(_key(x))
        sums = [float(variant().sum()) for variant in variants]
        _tuned[_key(x)] = 0 if sums else 1
    return variants[_tuned[_key(x)]]()


@tuned.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("bcgtest::lazy", mutates_args=())
def lazy(x: Tensor, w: Tensor) -> Tensor:
    """Makes a workspace of its own at its first call, and a larger one when it needs it."""
    if not _workspace or _workspace[0].shape[0] < x.shape[0]:
        _events.append(x.shape[0])
        _workspace[:] = [torch.empty(x.shape[0], w.shape[1], device=x.device)]
    out = _workspace[0][: x.shape[0]]
    torch.matmul(x, w, out=out)
    return out.clone()


@lazy.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@pytest.mark.parametrize("name", ["tuned", "lazy"])
@pytest.mark.parametrize("declared", [True, False], ids=["capturable", "undeclared"])
def test_op_that_tunes_itself_tunes_as_often_as_in_eager(
    compile_pair: Any, rand: Any, name: str, declared: bool
) -> None:
    """An op tuned itself, or allocated, at its first call for a shape, inside a capture (vllm-project/vllm#40742)."""
    op = getattr(torch.ops.bcgtest, name)

    def program(x: Tensor, w: Tensor) -> Tensor:
        h = op(x.relu(), w)
        return op(h.sin(), w) + x

    pair = compile_pair(program, options={"capturable": [f"bcgtest::{name}"]} if declared else {})
    w = rand(8, 8)
    calls = [(rand(n, 8), w) for n in (16, 8, 16, 4, 24, 4)]
    counts = []
    for fn in (pair.eager, pair.compiled):
        _tuned.clear()
        _events.clear()
        _workspace.clear()
        results = [fn(*args).clone() for args in calls]
        before = list(_events)
        results += [fn(*args).clone() for args in calls]
        assert _events == before, "tuned again for a shape that it knew"
        counts.append((before, results))
    assert counts[0][0] == counts[1][0]
    assert all(map(torch.equal, counts[0][1], counts[1][1]))
