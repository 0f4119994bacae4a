"""What serving models declare of themselves for a layout over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bcg_compiler.distributed.rules import Parallel, evaluate
from bcg_compiler.errors import RankError
from bcg_compiler.models import serving, zoo
from bcg_compiler.models.layers.all_to_all import Shard, SingleRank
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.mla import LatentAttention


@pytest.mark.parametrize(
    ("name", "dense_mla"),
    [("deepseek_v2", True), ("deepseek_v3", True), ("deepseek_v32", False), ("glm5", False), ("gpt_oss", False)],
)
def test_a_model_says_what_its_layers_are(name: str, dense_mla: bool) -> None:
    found = serving.layout(zoo.fields(name), cp=2, dp=2)
    assert found == Parallel(
        cp=2, dp=2, attention_does_cp=True, all_to_all_declared=True, dense_mla=dense_mla, prefix_captured=True
    )
    assert evaluate(found) == ()


def test_what_is_chosen_counts_more_than_what_is_declared() -> None:
    fields = zoo.fields("deepseek_v3")
    assert serving.layout(fields, ep=2, dp=2).all_to_all == "torch"
    mine = serving.layout(fields, ep=2, dp=2, all_to_all="mine", prefix_captured=False)
    assert [rule.code for rule in evaluate(mine)] == ["all_to_all_undeclared", "dense_mla_prefix"]


def test_attention_that_does_not_take_parts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentAttention, "takes_parts", False)
    assert [rule.code for rule in evaluate(serving.layout(zoo.fields("deepseek_v3"), cp=2))] == ["cp_attention"]


@pytest.mark.parametrize(
    ("name", "given", "error", "says"),
    [
        ("llama", dict(cp=2), ModelError, "no serving model of the family 'llama'"),
        ("gpt_oss", dict(dp=2, ep=2), ModelError, "experts of a gpt_oss are not shared out over ranks yet"),
        ("deepseek_v3", dict(pc=2), RankError, "no field 'pc'"),
        ("deepseek_v3", dict(cp=0), RankError, "cp is 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, given: dict[str, int], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        serving.layout(zoo.fields(name), **given)


@pytest.mark.parametrize("name", ["glm5", "gpt_oss"])
def test_fields_are_those_of_the_model_that_is_built(name: str) -> None:
    asked: dict[str, Any] = dict(layers=3, config={"hidden_size": 96})
    built: Any = zoo.build(name, device="meta", **asked).model
    assert {**zoo.fields(name, **asked), "dtype": "float32"} == built.config.to_dict()
    with pytest.raises(ValueError, match="has no field 'hiden_size'"):
        zoo.fields(name, config={"hiden_size": 96})
    with pytest.raises(ValueError, match="is a factory"):
        zoo.fields("module:factory")


def test_random_experts_of_a_rank_are_those_of_the_whole_model() -> None:
    fields, sizes = zoo.fields("deepseek_v3"), dict(pages=1, page_size=4, seed=3)
    whole = dict(serving.build(fields, **sizes).named_parameters())
    backend = SingleRank(8)
    backend.shard = Shard(8, ranks=2, rank=1)
    of_a_rank = 0
    for name, parameter in serving.build(fields, **sizes, all_to_all=backend).named_parameters():
        expected = whole[name]
        if parameter.shape != expected.shape:
            of_a_rank += 1
            expected = expected[4:]
        assert torch.equal(parameter, expected), name
    assert of_a_rank == 2
