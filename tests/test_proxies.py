"""What goes from one pipeline stage to the next is checked where it is made and where it is taken."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from bcg_compiler.errors import PipelineError
from bcg_compiler.proxies import PipelineProxy, ProxyForm

HIDDEN = torch.randn(5, 4)
TOPK = torch.zeros(5, 3, dtype=torch.int32)
FORM = ProxyForm("stages 0 and 1 of 2", 4, torch.float32, topk=3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(hidden_states=None), "hidden_states is None; it must be a tensor"),
        (dict(hidden_states=torch.randn(2, 5, 4)), r"hidden_states is float32 \[2, 5, 4\]; it must have 2 dimensions"),
        (dict(hidden_states=torch.ones(5, 4).int()), "hidden_states is int32 .* floating"),
        (dict(residual=torch.randn(5, 4).double()), "residual is float64 .* one floating type"),
        (dict(residual=torch.randn(5)), "residual is .* must have 2 or 3 dimensions"),
        (dict(residual=torch.randn(5, 2, 3)), r"residual is float32 \[5, 2, 3\], .* both must be as wide"),
        (dict(residual=torch.randn(6, 4)), "residual has 6 rows, and its hidden_states have 5"),
        (dict(topk_indices=TOPK.long()), "topk_indices is int64 .* must be int32"),
        (dict(topk_indices=TOPK[0]), "topk_indices is .* must have 2 dimensions"),
        (dict(topk_indices=TOPK[1:]), "topk_indices has 4 rows"),
    ],
)
def test_what_is_no_proxy_is_refused_by_the_name_of_the_tensor(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        PipelineProxy(**{"hidden_states": HIDDEN, **given})


@pytest.mark.parametrize(
    ("proxy", "rows", "says"),
    [
        (PipelineProxy(HIDDEN), 5, "lacks topk_indices, which the later stage reads"),
        (PipelineProxy(HIDDEN, topk_indices=TOPK), 4, "hidden_states .* has 5 rows, and this call has 4"),
        (PipelineProxy(HIDDEN[:, 1:], topk_indices=TOPK), 5, r"hidden_states .* is float32 \[5, 3\]; .* \[rows, 4\]"),
        (PipelineProxy(HIDDEN.half(), topk_indices=TOPK), 5, r"hidden_states .* is float16 .* torch.float32"),
        (PipelineProxy(HIDDEN, topk_indices=TOPK[:, :2]), 5, r"topk_indices .* is int32 \[5, 2\]"),
        (PipelineProxy(HIDDEN, HIDDEN, TOPK), 5, "has residual, which the later stage does not read"),
    ],
)
def test_a_proxy_of_another_form_is_refused_by_the_stages_that_it_is_between(
    proxy: PipelineProxy, rows: int, says: str
) -> None:
    with pytest.raises(PipelineError, match=says) as caught:
        FORM.check(proxy, rows)
    assert "stages 0 and 1 of 2" in str(caught.value)


@pytest.mark.parametrize("residual", [(), (4,), (2, 4)])
@pytest.mark.parametrize("topk", [0, 3])
def test_a_form_makes_what_it_takes(residual: tuple[int, ...], topk: int) -> None:
    form = ProxyForm("stages 0 and 1 of 2", 4, torch.bfloat16, residual, topk)
    made = form.empty(7, "cpu")
    form.check(made, 7)
    assert made.rows == 7 and (made.residual is None) == (not residual) and (made.topk_indices is None) == (not topk)


def test_padded_rows_are_cut_off_all_tensors() -> None:
    cut = PipelineProxy(HIDDEN, HIDDEN + 1, TOPK).cut(2)
    assert {name: len(tensor) for name, tensor in cut.tensors()} == dict.fromkeys(
        ("hidden_states", "residual", "topk_indices"), 2
    )
    assert torch.equal(cut.hidden_states, HIDDEN[:2])
    with pytest.raises(PipelineError, match="5 rows cannot be cut to 6"):
        PipelineProxy(HIDDEN).cut(6)


def test_a_proxy_is_a_pytree_of_its_tensors() -> None:
    doubled = pytree.tree_map(lambda tensor: tensor * 2, PipelineProxy(HIDDEN, topk_indices=TOPK))
    assert isinstance(doubled, PipelineProxy) and torch.equal(doubled.hidden_states, HIDDEN * 2)
    assert doubled.residual is None
