"""Routing that cannot be is refused; experts are what a loop over tokens gives."""

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.models.layers.all_to_all import SingleRank
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.moe import ExpertParallel, Experts, Routing
from bcg_compiler.models.layers.pages import PagePool

POSSIBLE = dict(
    experts=8, chosen=2, groups=4, best_groups=2, bias_corrected=True, normalised=True, factor=1.0
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(chosen=9), "goes to 9 experts and there are 8"),
        (dict(groups=3), "8 experts in 3 groups"),
        (dict(best_groups=5), "the best 5 are used"),
        (dict(best_groups=0), "the best 0 are used"),
        (dict(chosen=5), "5 experts of its best 2 groups, which have 4"),
        (dict(groups=8, best_groups=4), "groups of one expert"),
    ],
)
def test_routing_that_cannot_be_is_refused(changed: dict[str, int], says: str) -> None:
    Routing(**POSSIBLE)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=says):
        Routing(**(POSSIBLE | changed))  # type: ignore[arg-type]


def test_experts_are_what_a_loop_over_tokens_gives() -> None:
    torch.manual_seed(0)
    experts = Experts(8, 6, ExpertParallel.over(SingleRank(4)))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(7, 8), torch.rand(7, 2)
    ids = torch.tensor([[0, 3], [3, 0], [0, 1], [1, 3], [3, 1], [2, 2], [9, 9]])  # the last one is padding: never read
    with PagePool(1, 8).prefill({0: 6}).published(), bcg.forward_context(live_rows=6):
        found = experts(x, ids, weights)[:6]
    for row in range(6):
        wanted = torch.zeros(8)
        for expert, weight in zip(ids[row], weights[row], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ x[row]).chunk(2)
            wanted += weight * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(found[row], wanted)
