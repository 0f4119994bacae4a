"""What stands in the padded rows of an input, and what is refused before anything runs."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.buckets import SlotPolicy

LENGTHS = (5, 7, 12, 3, 31, 5, 32, 9, 17)


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


def buffer_of(pair: Any, ordinal: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A slot as it is in memory."""
    storage = pair.program._arena._storages[f"slot {ordinal}"]
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)


def only_slot(pair: Any) -> int:
    (slot,) = pair.plan.slots
    return int(slot.ordinal)


def double(x: Tensor) -> Tensor:
    return x * 2 + 1


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[0])
    return torch.where(at[None, :] <= at[:, None], x @ x.t(), 0.0) @ x


@pytest.mark.parametrize(
    ("policy", "tail"), [("zero", 0.0), (7.5, 7.5), (-3, -3.0), (True, 1.0), (math.inf, math.inf), (math.nan, None)]
)
def test_padded_rows_are_filled_at_each_call(padded: Any, policy: Any, tail: float | None) -> None:
    """A number that is not finite failed at the first replay: its name was written into the program."""
    pair = padded(double, slots={"x": policy}, max_padding_factor=8)
    pair(rows(32))  # the largest first: all lie in its memory
    for n in LENGTHS:
        buffer_of(pair, only_slot(pair), (8, 4)).fill_(99.0)
        pair(rows(n))
        if n < 8:
            behind = buffer_of(pair, only_slot(pair), (8, 4))[n:]
            assert behind.isnan().all() if tail is None else (behind == tail).all()
    assert pair.stats.captures == 3


@pytest.mark.parametrize("dim", [0, 1])
def test_all_padded_dimensions_are_filled(padded: Any, dim: int) -> None:
    """A square input has rows along both."""
    pair = padded(lambda m: m * 2 + m.t(), open=(0, 1), slots={"m": 5.0}, token_dim=dim)

    def square(n: int) -> Tensor:
        return torch.randn(n, n)

    for n in (5, 6, 7):
        pair(square(n))
    if len(pair.plan.rows) == 1:
        assert (buffer_of(pair, only_slot(pair), (8, 8))[7:] == 5).all()


def test_kept_rows_are_those_of_earlier_calls_and_reach_nobody(padded: Any) -> None:
    pair = padded(double, slots={"x": "keep"}, max_padding_factor=8)
    pair(rows(32))
    pair(rows(32))
    slot = buffer_of(pair, only_slot(pair), (32, 4))
    before = slot.clone()
    pair(rows(20))
    assert torch.equal(slot[20:], before[20:])
    for n in LENGTHS:
        slot.fill_(math.nan)
        pair(rows(n))


def test_what_is_copied_once_is_not_copied_again(padded: Any) -> None:
    pair = padded(lambda x, t: x * t + 1, slots={"t": "once"}, max_padding_factor=8)
    pair.open = [0, None]
    table = torch.full((4,), 3.0)
    for n in (5, 7, 12, 31):
        pair(rows(n), table)
    x = rows(6)
    torch._dynamo.mark_dynamic(x, 0)
    assert torch.equal(pair.compiled(x, torch.zeros(4)), x * 3 + 1)


@pytest.mark.parametrize("how", ["first_call_is_too_long", "captured_ahead", "another_ladder", "ahead_and_moved"])
def test_what_is_copied_once_is_there_whenever_its_program_is_captured(padded: Any, how: str) -> None:
    """It was filled with rubbish by a capture ahead: its values were those of a call that had passed."""
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    module = type("Scaled", (torch.nn.Module,), {"forward": lambda self, x, t: x * t + self.weight})()
    module.weight = weight
    pair = padded(module, slots={"t": "once"}, max_padding_factor=8)
    pair.open = [0, None]
    table = torch.full((4,), 3.0)
    pair(rows(40 if how == "first_call_is_too_long" else 5), table)
    for _ in range(2 if how == "ahead_and_moved" else 1):
        bcg.capture(pair.compiled, [8, 24] if how == "another_ladder" else None, progress=False)
    if how == "ahead_and_moved":
        pair.module.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    for n in (5, 7, 12, 20):
        pair(rows(n), table)
    assert pair.stats.replays == 4


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[int], Any], Any, tuple[str, ...]]] = {
    "keep_of_ids": (lambda x: x * 2, lambda n: torch.randint(0, 9, (n,)), {"x": "keep"}, ("KEEP", "x", "int64")),
    "keep_of_a_mask": (lambda x: ~x, lambda n: torch.randn(n) > 0, {"x": "keep"}, ("KEEP", "bool")),
    "keep_where_causal": (causal, rows, {"x": "keep"}, ("finite (causal)", "KEEP", "ZERO or SENTINEL")),
    "infinite_where_causal": (causal, rows, {"x": math.inf}, ("inf", "causal", "finite number")),
    "nan_where_causal": (causal, rows, {"x": math.nan}, ("nan", "causal")),
    "too_large_where_causal": (
        lambda x: causal(x.half()),
        lambda n: rows(n).half(),
        {"x": 1e5},
        ("100000.0", "float16"),
    ),
    "once_with_rows": (double, rows, {"x": "once"}, ("'once'", "x", "other rows at each call")),
    "unknown_name": (double, rows, {"y": 1}, ("'y'", "no input", "x")),
    "half_of_an_id": (lambda x: x * 2, lambda n: torch.randint(0, 9, (n,)), {"x": 0.5}, ("0.5", "int64")),
    "nan_of_an_id": (lambda x: x * 2, lambda n: torch.randint(0, 9, (n,)), {"x": math.nan}, ("nan", "int64")),
    "number_out_of_range": (lambda x: x + 1, lambda n: torch.ones(n, dtype=torch.uint8), {"x": 300}, ("300", "uint8")),
    "two_of_a_mask": (lambda x: ~x, lambda n: torch.randn(n) > 0, {"x": 2}, ("2", "bool")),
    "word": (double, rows, {"x": "zeros"}, ("'zeros'", "'x'", "'keep'")),
    "complex": (double, rows, {"x": 1j}, ("1j", "'x'")),
    "tensor": (double, rows, {"x": torch.ones(1)}, ("'x'", "number")),
    "none": (double, rows, {"x": None}, ("None", "'x'")),
    "list": (double, rows, ["x"], ("'slots'", "dictionary")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_policy_that_an_input_cannot_have_is_refused_when_compiled(padded: Any, name: str) -> None:
    fn, make, slots, words = REFUSED[name]
    pair = padded(fn, slots=slots)
    with pytest.raises(Exception, match="OptionError") as seen:
        pair(make(5))
    for word in words:
        assert word in str(seen.value)


def test_a_policy_of_an_input_without_rows_is_refused(padded: Any) -> None:
    for slots, word in (({"t": "keep"}, "no padded rows"), ({"t": 3.0}, "no padded rows")):
        pair = padded(lambda x, t: x * t + 1, slots=slots)
        pair.open = [0, None]
        with pytest.raises(Exception, match="OptionError") as seen:
            pair(rows(5), torch.ones(4))
        assert word in str(seen.value)


def test_what_is_copied_once_must_keep_its_size(padded: Any) -> None:
    """Its slot kept the values of the first size."""
    pair = padded(lambda x, t: x * 2 + t.sum(), slots={"t": "once"}, token_dim="x:0")
    with pytest.raises(Exception, match="OptionError") as seen:
        pair(rows(5), torch.ones(3, 4))
    assert "of other sizes" in str(seen.value)


@pytest.mark.parametrize("number", [numpy.float32(2), numpy.int64(2), Fraction(1, 2), True, 2**40])
def test_numbers_of_other_kinds_are_numbers(padded: Any, number: Any) -> None:
    """Their names were written into the program, where nobody knows them."""
    pair = padded(double, slots={"x": number})
    for n in (5, 6, 7):
        pair(rows(n))
    assert (buffer_of(pair, only_slot(pair), (8, 4))[7:] == float(number)).all()


def test_policies_by_the_name_of_the_plan(padded: Any) -> None:
    pair = padded(double, slots={"in1": 4.0})  # in0 is the size
    for n in (5, 6, 7):
        pair(rows(n))
    assert (buffer_of(pair, only_slot(pair), (8, 4))[7:] == 4).all()


def test_a_policy_is_written_as_it_is_given() -> None:
    assert [str(SlotPolicy.parse("x", given)) for given in ("zero", "keep", "once", 3, 0.5)] == [
        *("zero", "keep", "once"),
        *("sentinel 3", "sentinel 0.5"),
    ]


# -- memory -----------------------------------------------------------------------------------------------------------


def addresses(pair: Any) -> set[int]:
    return {storage.data_ptr() for storage in pair.program._arena._storages.values()}


def test_smaller_buckets_lie_in_the_slots_of_the_largest(padded: Any) -> None:
    pair = padded(double, max_padding_factor=8)
    pair(rows(30))
    taken, bytes_before = addresses(pair), pair.program._arena.bytes
    for n in (12, 5, 30, 7, 16):
        pair(rows(n))
    assert addresses(pair) == taken and pair.program._arena.bytes == bytes_before
    assert pair.stats.captures == 3


def test_a_larger_bucket_later_leaves_smaller_ones_as_they_are(padded: Any) -> None:
    pair = padded(double, max_padding_factor=8)
    for n in (5, 5, 12, 5, 30, 12, 5, 30):
        pair(rows(n))
    assert pair.stats.captures == 3


def test_bytes_are_forecast_and_measured(padded: Any) -> None:
    pair = padded(double, max_padding_factor=8)
    pair(rows(5))
    stats = pair.stats
    assert stats.measured_bytes >= 8 * 4 * 4 and stats.forecast_bytes >= 8 * 4 * 4
    report = bcg.capture(pair.compiled, progress=False)
    after = pair.stats
    assert report.measured_bytes == after.measured_bytes > stats.measured_bytes
    assert report.forecast_bytes == after.forecast_bytes
