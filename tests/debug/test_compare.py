"""What counts as the same result."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bcg_compiler.debug.compare import compare

NAN, INF = math.nan, math.inf


@dataclass
class Output:
    logits: torch.Tensor
    caches: Any = None


def tensor(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize(
    ("got", "expected", "largest"),
    [
        (tensor(1, 2), tensor(1, 2), None),
        (tensor(1, NAN), tensor(1, NAN), None),
        (tensor(1, INF), tensor(1, INF), None),
        (tensor(1, 2), tensor(1, 2.5), 0.5),
        (tensor(1, NAN), tensor(1, 2), INF),
        (tensor(NAN, 2), tensor(1, NAN), INF),
        (tensor(1, INF), tensor(1, -INF), INF),
        (tensor(0.0), tensor(-0.0), 0.0),
        (tensor(1, 2), tensor(1, 2, 3), INF),
        (tensor(1, 2), tensor(1, 2, dtype=torch.float64), INF),
        (tensor(1, 2, dtype=torch.bfloat16), tensor(1, 3, dtype=torch.bfloat16), 1.0),
        (tensor(1, 2, dtype=torch.float8_e4m3fn), tensor(1, NAN, dtype=torch.float8_e4m3fn), INF),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 4j]), 2.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor(3), torch.tensor(5), 2.0),
        (torch.tensor([]), torch.tensor([]), None),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), None),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), None),
        (3, 3, None),
        (NAN, NAN, None),
        (3, 4, 1.0),
        ("a", "b", INF),
        (None, tensor(1), INF),
        ((tensor(1),), [tensor(1)], INF),
        ({"a": tensor(1)}, {"b": tensor(1)}, INF),
        ([tensor(1)], [tensor(1), tensor(2)], INF),
    ],
)
def test_compare(got: Any, expected: Any, largest: float | None) -> None:
    found = compare(got, expected)
    assert [difference.largest for difference in found.differences] == ([] if largest is None else [largest])


@pytest.mark.parametrize(
    ("got", "expected", "close"),
    [
        (
            tensor(1000.0, 1e-3),
            tensor(1000.0, 2e-3),
            True,
        ),  # over the largest number: small ones are left of large ones
        (tensor(1.0, 1e-3), tensor(1.0, 2e-3), False),
        (tensor(0.0), tensor(-0.0), True),
        (tensor(INF, 2.0), tensor(INF, 2.0 + 1e-6), True),
        (tensor(INF, 2.0), tensor(INF, 3.0), False),
        (tensor(1, NAN), tensor(1, 2), False),
        (tensor(1, INF), tensor(1, 2), False),
        (tensor(1, 2), tensor(1, 2, 3), False),
        (tensor(1.0, dtype=torch.bfloat16), tensor(1.0078125, dtype=torch.bfloat16), True),
        (tensor(1.0, dtype=torch.float16), tensor(1.0078125, dtype=torch.float16), False),
        (torch.tensor([1000000]), torch.tensor([1000001]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (tensor(1.0, dtype=torch.float8_e4m3fn), tensor(1.125, dtype=torch.float8_e4m3fn), False),
        (3.0, 3.0000001, False),
    ],
)
def test_what_is_close(got: Any, expected: Any, close: bool) -> None:
    (found,) = compare(got, expected).differences
    assert found.close == close


def test_every_tensor_of_a_nested_result_is_compared_and_named() -> None:
    got = Output(tensor(1), {"k": [tensor(2), (tensor(3), 7)]})
    expected = Output(tensor(1), {"k": [tensor(2), (tensor(4), 8)]})
    found = compare(got, expected)
    assert found.tensors == 3
    assert [d.where for d in found.differences] == [".caches['k'][1][0]", ".caches['k'][1][1]"]


def test_outputs_of_transformers_are_mappings() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = compare(
        outputs.CausalLMOutputWithPast(logits=tensor(1)), outputs.CausalLMOutputWithPast(logits=tensor(3)), "output"
    )
    assert [(d.where, d.largest) for d in found.differences] == [("output['logits']", 2.0)]


def test_objects_that_refer_to_themselves_end() -> None:
    one, other = Output(tensor(1)), Output(tensor(1))
    one.caches, other.caches = one, other
    assert compare(one, other).equal
