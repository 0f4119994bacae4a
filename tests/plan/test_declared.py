"""What break functions declare for the program as a whole: memory of their own, and the row counts they can take."""

from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.errors import BreakArgumentError
from bcg_compiler.plan import plan_from_json, plan_hash, plan_text, plan_to_json
from bcg_compiler.plan.memory import forecast
from bcg_compiler.plan.plan import Reserve

pytestmark = pytest.mark.usefixtures("clean")


def body(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


DECLARED: dict[str, Any] = dict(mutates_args=("out",), reads_live_rows=True)
plain = bcg.eager_break(**DECLARED)(body)
library = bcg.eager_break(reserve_bytes=1 << 30, bucket_multiple=8, **DECLARED)(body)


def twice(call: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        for _ in range(2):
            out = torch.empty_like(x)
            call(x * 2, out)
            x = out + x
        return x * 2

    return forward


def compiled(fn: Any, ladder: bcg.Ladder | None = None, **options: Any) -> Any:
    given = {"min_segment_kernels": 1, **options} | ({} if ladder is None else {"ladder": ladder})
    made = torch.compile(fn, backend="bcg", fullgraph=True, options=given)
    x = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    made(x)
    return made


def plan_of(fn: Any, **kwargs: Any) -> bcg.Plan:
    torch.compiler.reset()
    (program,) = bcg.programs_of(compiled(fn, **kwargs))
    assert program.plan is not None
    return program.plan


def test_a_reserve_is_a_term_of_the_forecast_once_for_all_places() -> None:
    plan = plan_of(twice(library))
    symbols = {value.specs[0].shape[0]: 64 for value in plan.values if value.kind == "input" and value.specs}
    made, without = forecast(plan, symbols), forecast(plan_of(twice(plain)), symbols)
    assert (made.reserves, without.reserves) == (1 << 30, 0)
    assert made.captures == without.captures == without.total > 0
    assert made.total == made.captures + (1 << 30)


def test_a_reserve_stands_on_the_plan_by_name() -> None:
    plan = plan_of(twice(library))
    (reserve,) = plan.reserves
    assert reserve == Reserve(reserve.name, 1 << 30) and reserve.name.endswith(".body")
    assert f"reserve {reserve.name} {1 << 30} bytes" in plan_text(plan).splitlines()
    assert plan_from_json(plan_to_json(plan)).reserves == plan.reserves
    other = plan_of(twice(plain))
    assert other.reserves == () and plan_hash(other) != plan_hash(plan)


def test_capture_says_what_break_functions_take() -> None:
    report = bcg.capture(compiled(twice(library), bcg.Ladder([8, 16], given=False)), progress=False)
    assert report.reserved_bytes == 1 << 30 > report.forecast_bytes
    assert "Break functions take 1,073,741,824 bytes beside that." in str(report).splitlines()
    torch.compiler.reset()
    report = bcg.capture(compiled(twice(plain), bcg.Ladder([8, 16])), progress=False)
    assert report.reserved_bytes == 0 and "Break functions" not in str(report)


def test_a_fitted_ladder_leaves_the_reserve_alone() -> None:
    ladder, lengths = bcg.Ladder([8, 16, 32]), [7, 8, 15, 16, 16, 30]
    fitted = ladder.fit(lengths, lambda bucket: bucket, 150, reserve_bytes=100)
    assert fitted.ladder == ladder.fit(lengths, lambda bucket: bucket, 50).ladder == bcg.Ladder([16, 32])
    assert (fitted.budget, fitted.reserve, fitted.bytes_after) == (150, 100, 48)
    assert "the budget is 150, of which 100 are reserved; " in str(fitted)
    with pytest.raises(bcg.LadderError, match="byte_budget is 150, of which 120 are reserved"):
        ladder.fit(lengths, lambda bucket: bucket, 150, reserve_bytes=120)
    with pytest.raises(bcg.LadderError, match="reserve_bytes is -1"):
        ladder.fit(lengths, lambda bucket: bucket, 150, reserve_bytes=-1)


def buckets(fn: Any, ladder: bcg.Ladder, **options: Any) -> tuple[int, ...]:
    padding = plan_of(fn, ladder=ladder, **options).padding
    assert padding is not None
    return padding.buckets


def test_buckets_are_multiples_of_what_every_break_declares_and_of_the_option() -> None:
    ladder = bcg.Ladder([4, 8, 12, 20], given=False)
    assert buckets(twice(plain), ladder) == (4, 8, 12, 20)
    assert buckets(twice(library), ladder) == (8, 16, 24)
    assert buckets(twice(library), bcg.Ladder([20, 30], given=False), bucket_multiple=3) == (24, 48)


def test_a_ladder_of_the_user_s_is_rounded_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="buckets that are not multiples of 8"):
        assert buckets(twice(library), bcg.Ladder([4, 16])) == (8, 16)


@pytest.mark.parametrize(
    "declared", [dict(reserve_bytes=-1), dict(reserve_bytes=0.5), dict(bucket_multiple=0), dict(bucket_multiple=True)]
)
def test_a_number_out_of_range_is_refused_by_name(declared: dict[str, Any]) -> None:
    ((name, value),) = declared.items()
    with pytest.raises(BreakArgumentError, match=f"{name}={value}; it must be a whole number of at least"):
        bcg.eager_break(**declared)(body)
