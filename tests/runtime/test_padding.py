"""Inputs of any length in buckets: results are those of eager code at the exact length, whatever they look like."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

LENGTHS = (5, 7, 12, 3, 31, 5, 32, 9, 40, 17)


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


def batch(n: int) -> Tensor:
    return torch.randn(2, n, 4)


W = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))


def lower_triangle(n: int) -> Tensor:
    at = torch.arange(n)
    return at[None, :] <= at[:, None]


def attention(x: Tensor) -> Tensor:
    q, k, v = (x @ W[:, :4]).tanh(), (x @ W[:, 1:5]).tanh(), x @ W[:, 2:]
    scores = (q @ k.t()).masked_fill(~lower_triangle(x.shape[0]), float("-inf"))
    return x + scores.softmax(-1) @ v


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def two_results_over_one_memory(x: Tensor) -> Any:
    y = x * 2
    return y, y[:, 1:], y[0]


#: A function, its inputs, the dimension that is open.
RESULTS: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int]] = {
    "plain": (lambda x: x * 2 + 1, rows, 0),
    "some_features": (lambda x: (x * 2)[:, :2], rows, 0),
    "expanded": (lambda x: (x * 2).unsqueeze(1).expand(-1, 3, -1), rows, 0),
    "turned": (lambda x: (x * 2).t(), rows, 0),
    "of_a_batch": (lambda x: x * 2, batch, 1),
    "some_features_of_a_batch": (lambda x: (x * 2)[..., 1:3], batch, 1),
    "expanded_batch": (lambda x: (x * 2).unsqueeze(2).expand(-1, -1, 3, -1), batch, 1),
    "turned_batch": (lambda x: (x * 2).permute(2, 0, 1), batch, 1),
    "in_inference_mode": (in_inference_mode, batch, 1),
    "one_memory": (two_results_over_one_memory, rows, 0),
    "all_but_the_first": (lambda x: x[1:] + 1, rows, 0),
    "twice_as_many": (lambda x: torch.stack((x, x + 1), 1).view(-1, 4), rows, 0),
    "flattened": (lambda x: x.view(-1, 4) * 2, lambda n: torch.randn(n, 3, 4), 0),
    "rows_by_rows": (lambda x: x[:, None, 0] * x[None, :, 1], rows, 0),
    "positions": (lambda x: (x + 1, torch.arange(x.shape[0])), rows, 0),
    "integers": (lambda x: (x.argmax(-1), x > 0, x.to(torch.bfloat16)), rows, 0),
    "the_input_too": (lambda x: (x, x * 2), rows, 0),
    "written_input": (lambda x: x.add_(1) * 2, rows, 0),
    "written_input_of_other_strides": (lambda x: x.add_(1) * 2, lambda n: torch.randn(4, n).t(), 0),
    "first_rows": (lambda x: x[:3] * 2, rows, 0),
    "odd_strides": (lambda x: x * 2, lambda n: torch.randn(n, 8)[:, ::2], 0),
    "turned_input": (lambda x: x * 2, lambda n: torch.randn(4, n).t(), 0),
    "expanded_input": (lambda x: (x + 0).t(), lambda n: torch.randn(1, 4).expand(n, 4), 0),
    "overlapping_input": (lambda x: x * 2, lambda n: torch.randn(3 * n + 1).as_strided((n, 4), (3, 1)), 0),
    "part_of_more_memory": (lambda x: x * 2, lambda n: torch.randn(2, 48, 4)[:, :n], 1),
    "ids": (lambda i: nn.functional.embedding(i, TABLE) * 2, lambda n: torch.randint(0, 64, (n,)), 0),
    "ids_of_32_bits": (lambda i: TABLE[i.long()] * 2, lambda n: torch.randint(0, 64, (n,), dtype=torch.int32), 0),
    "empty_memory_that_is_filled": (lambda x: torch.empty_like(x).copy_(x), rows, 0),
}

CLOSE: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int]] = {
    "linear": (lambda x: (x @ W).relu(), rows, 0),
    "flattened_batch_and_back": (lambda x: (x.view(-1, 4) @ W).view(2, -1, 6), batch, 1),
    "causal_attention": (attention, rows, 0),
    "causal_attention_of_a_batch": (
        lambda x: nn.functional.scaled_dot_product_attention(*[x[:, None] @ W[:, :4]] * 3, is_causal=True),
        batch,
        1,
    ),
}


@pytest.mark.parametrize("name", [*RESULTS, *CLOSE])
def test_results_are_those_of_the_exact_length(padded: Any, poisoned: None, name: str) -> None:
    """Results that are not dense, or expanded, came back with strides that eager code does not make."""
    fn, make, dim = {**RESULTS, **CLOSE}[name]
    pair = padded(fn, open=dim, close=name in CLOSE, max_padding_factor=8)
    for n in LENGTHS:
        pair(make(n))
    assert pair.plan.padding is not None
    assert (pair.stats.captures, pair.stats.eager_runs) == (3, {"warm_up": 1, "too_long": 1})
    assert pair.stats.replays == len(LENGTHS) - 2


#: Results over one memory in which rows are not outermost.
SHARED: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int]] = {
    "features": (lambda y: (y, y[..., 1:]), batch, 1),
    "last_of_the_batch": (lambda y: (y[1], y, y[1, :, 2:]), batch, 1),
    "last_only": (lambda y: (y[1], y[1, 2:, 1:]), batch, 1),
    "turned": (lambda y: (y, y[:, :2], y[3:, 1]), lambda n: torch.randn(4, n).t(), 0),
    "expanded": (lambda y: (y, y.unsqueeze(1).expand(-1, 3, -1, -1)), batch, 1),
    "heads": (lambda y: (y, y[1], y[:, 1], y.transpose(1, 2)), lambda n: torch.randn(2, 3, n, 4), 2),
}


@pytest.mark.parametrize("name", SHARED)
def test_results_over_one_memory_have_the_strides_of_eager(padded: Any, poisoned: None, name: str) -> None:
    """They had the strides of the bucket where rows are not outermost."""
    fn, make, dim = SHARED[name]
    pair = padded(lambda x: fn(x * 2), open=dim, max_padding_factor=8)
    for n in (8, 7, 5, 12, 30):
        x = make(n)
        result = pair(x)
        want = fn(x * 2)
        want[0].add_(1)
        result[0].add_(1)
        pair.same(result, want, "result after a write to another one")
    assert pair.stats.captures == 3


def mean_of_rows(x: Tensor) -> Tensor:
    return x - x.mean(0)


#: What is captured for exact shapes, with the code of the reason and a word of it.
UNPADDED: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int, str, str]] = {
    "mean": (mean_of_rows, rows, 0, "mixing_rows", "mean runs over all rows"),
    "last_row": (lambda x: x[-1] * 2, rows, 0, "mixing_rows", "from the end"),
    "size": (lambda x: (x * 2, x.shape[0]), rows, 0, "mixing_rows", "the number of rows is a result"),
    "size_and_one": (lambda x: (x * 2, x.shape[0] + 1), rows, 0, "mixing_rows", "the number of rows is a result"),
    "elements": (lambda x: (x * 2, x.numel()), rows, 0, "mixing_rows", "the number of rows is a result"),
    "view_of_the_input": (lambda x: (x[:, :2], x * 2), rows, 0, "input_returned", "view of an input"),
    "flattened_batch": (lambda x: x.view(-1, 4) * 2, batch, 1, "mixing_rows", "has merged the rows of a result"),
}


@pytest.mark.parametrize("name", UNPADDED)
def test_what_cannot_be_padded_is_captured_exactly(padded: Any, name: str) -> None:
    """A flattened batch was padded, and cut to its first rows: those of the first sequence, with its padding."""
    fn, make, dim, code, text = UNPADDED[name]
    pair = padded(fn, open=dim)
    for n in (5, 7, 5, 5, 7):
        pair(make(n))
    assert pair.plan.padding is None
    assert pair.plan.unpadded.code == code and text in pair.plan.unpadded.text
    assert pair.stats.eager_runs == {"warm_up": 2} and pair.stats.replays == 3


def test_a_size_that_is_returned_is_exact_whatever_the_user_says_of_rows(padded: Any) -> None:
    pair = padded(lambda x: (x * 2, x.shape[0] + 1), assume_rows_independent=True)
    for n in (5, 7, 5):
        pair(rows(n))
    assert pair.plan.unpadded.code == "rows_returned"
    pair = padded(lambda x: (x * 2, x.shape[0]), assume_rows_independent=True)
    for n in (5, 7, 5):
        pair(rows(n))
    assert pair.plan.padding is not None  # that is the caller's own number


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def double(x: Tensor, out: Tensor) -> None:
    assert x.shape == out.shape
    out.copy_(2 * x)


def test_a_break_is_not_given_rows_of_the_bucket_beside_a_buffer_of_the_live_ones() -> None:
    """A buffer that was sized by a number of the caller's had the live rows, and what a body got beside it those of the
    bucket: ``torch.mul(x, 2, out=out)`` then gave results of the bucket's rows, and a kernel would write beyond it.
    """

    def fn(x: Tensor, n: int) -> Tensor:
        out = x.new_empty(n, 4)
        double(x.sin() + 1, out)
        return out.cos()

    options = {"capture": "emulated", "ladder": [8, 16], "token_dim": "x:0"}
    compiled = torch.compile(fn, backend="bcg", dynamic=True, options=options)
    for n in (5, 7, 5, 5, 7):
        x = rows(n)
        torch.testing.assert_close(compiled(x, n), fn(x, n))
    (program,) = bcg.programs_of(compiled)
    assert program.plan.unpadded is not None and program.plan.unpadded.code == "open_number"
    assert "double is given rows, and" in program.plan.unpadded.text
    assert bcg.stats(compiled).replays == 3


def test_a_size_that_was_read_before_a_graph_break_counts_as_a_number() -> None:
    """As above: ``x`` is no input of the second graph, its size is."""

    def fn(x: Tensor) -> Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        out = torch.empty(x.shape[0], 4)
        double(y + 1, out)
        return out.cos()

    compiled = torch.compile(fn, backend="bcg", options={"capture": "emulated", "ladder": [8, 16]})
    for n in (5, 7, 9, 5, 5, 7):
        x = rows(n)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), fn(x))
    first, *_, last = bcg.programs_of(compiled)
    assert first.plan.padding is not None
    assert last.plan.unpadded is not None and last.plan.unpadded.code == "open_number"


def test_the_user_s_word_stands_in_for_a_proof(padded: Any) -> None:
    """The tail is zero, so that a sum over rows happens to be right."""
    pair = padded(lambda x: x + x.sum(0), assume_rows_independent=True, close=True)
    for n in (5, 7, 12, 16):
        pair(rows(n))
    assert pair.plan.padding.proof == "assumed" and pair.stats.captures == 2


def test_the_user_s_word_says_nothing_of_where_rows_lie(padded: Any) -> None:
    """Live rows of a flattened batch do not come first: cut as if they did, results were wrong."""
    pair = padded(lambda x: x.view(-1, 4) * 2, open=1, assume_rows_independent=True)
    for n in (5, 7, 6):
        pair(batch(n))
    assert pair.plan.unpadded.code == "unknown_layout"


def test_lengths_that_no_bucket_serves_run_eagerly(padded: Any) -> None:
    pair = padded(lambda x: x * 2 + 1, max_padding_factor=1.5)
    for n in (6, 33, 9, 8, 10, 17, 24):
        pair(rows(n))
    assert pair.stats.eager_runs == {"warm_up": 1, "too_long": 1, "padding": 3}
    assert pair.stats.captures == 2  # 8 and 32; 16 holds 11 to 16
    pair(rows(11))
    assert pair.stats.captures == 3 and pair.stats.replays == 3


def test_lengths_that_dynamo_makes_constants_are_right(padded: Any) -> None:
    """It compiles anew for 0 and 1, for that length only."""
    pair = padded(lambda x: x * 2 + 1)
    pair.mark = lambda args: torch._dynamo.maybe_mark_dynamic(args[0], 0)
    for n in (5, 1, 0, 2, 1, 0, 5, 1, 0, 7):
        pair(rows(n))
    assert bcg.programs_of(pair.compiled)[0].plan.padding is not None
    assert pair.stats.graphs == 3


def test_buckets_come_back_in_any_order_with_other_memory_between(padded: Any) -> None:
    pair = padded(attention, close=True, ladder=[64, 128, 256])
    kept = []
    for n in (200, 100, 256, 128, 256, 50, 100, 256):
        kept.append(torch.full((n, 64), float("nan")))
        pair(rows(n))
        del kept[::2]
    assert pair.stats.captures == 3


def test_fewer_rows_than_a_graph_takes_run_eagerly(padded: Any) -> None:
    """With four live rows the fifth is padding, and this graph returns it."""
    pair = padded(lambda x: x[:5] * 2)
    for n in (6, 7, 8, 12):
        pair(rows(n))
    program = pair.program
    assert program.plan.padding.least == 5
    assert program.admit(bcg.Batch(rows=4)).reason == "few_rows"
    pair(rows(4))
    pair(rows(3))
    pair(rows(5))


def chosen_by_length(x: Tensor) -> Tensor:
    if x.shape[0] < 20:
        return x * 2 + 1
    if x.shape[0] % 8 == 0:
        return x * 3 + 1
    return x * 4 + 1


def test_a_graph_uses_only_buckets_of_which_its_guards_hold(padded: Any) -> None:
    pair = padded(chosen_by_length, ladder=[8, 16, 30, 32], max_padding_factor=8)
    for n in (5, 9, 30, 32, 24, 17, 19, 15, 12, 16, 31, 25):
        pair(rows(n))
    below, odd, even = bcg.programs_of(pair.compiled)
    assert below.admit(bcg.Batch(rows=16)).bucket == 16 and even.admit(bcg.Batch(rows=24)).bucket == 32
    assert [bcg.admission(pair.compiled, rows=n).bucket for n in (9, 25, 24, 31)] == [16, 30, 32, None]
    assert below.admit(bcg.Batch(rows=19)).reason == "too_long"  # 30 and 32 are another graph
    assert even.admit(bcg.Batch(rows=32)).bucket == 32
    assert odd.admit(bcg.Batch(rows=31)).reason == "too_long"


def test_a_bucket_outside_of_the_range_that_was_marked_is_not_used(padded: Any) -> None:
    pair = padded(lambda x: x * 2 + 1 if x.shape[0] <= 16 else x * 3)
    pair.mark = lambda args: torch._dynamo.mark_dynamic(args[0], 0, min=4, max=16)
    for n in (5, 9, 16):
        pair(rows(n))
    assert pair.program.admit(bcg.Batch(rows=17)).reason == "too_long"


def test_batch_and_sequence_may_both_be_open(padded: Any) -> None:
    """The ladder is for one; the other is captured as it is."""
    pair = padded(lambda x: (x @ W).relu(), open=(1, 0), close=True, token_dim="x:1", max_padding_factor=8)
    for b, n in ((2, 5), (3, 5), (2, 7), (3, 9), (2, 30), (3, 7), (4, 40)):
        pair(torch.randn(b, n, 4))
    assert pair.stats.captures == 4 and pair.stats.replays == 5
    assert pair.stats.eager_runs == {"warm_up": 1, "too_long": 1}


def test_both_open_on_the_other_dimension(padded: Any) -> None:
    pair = padded(lambda x: (x * 2).view(-1, 4), open=(0, 1), token_dim=0)
    for b, n in ((5, 3), (6, 3), (5, 4), (12, 4)):
        pair(torch.randn(b, n, 4))
    assert pair.plan.padding.proof == "row_wise"


def test_a_batch_that_is_not_given_is_flattened_exactly(padded: Any) -> None:
    pair = padded(lambda x: x.view(-1, 4) * 2, open=(1, 0), token_dim=1)
    for b, n in ((3, 5), (3, 6), (2, 5), (3, 5)):
        pair(torch.randn(b, n, 4))
    assert pair.plan.unpadded.code == "mixing_rows"


def test_one_input_has_a_row_more(padded: Any) -> None:
    """Bounds of sequences, say: n lengths have n + 1 of them."""
    pair = padded(lambda x, y: y[1:] + x, token_dim="x:0")
    for n in (5, 7, 6):
        pair(rows(n), rows(n + 1))
    assert pair.stats.graphs == 1


def test_inputs_whose_sizes_are_bound_to_each_other_are_right(padded: Any) -> None:
    pair = padded(lambda x, y: y.view(-1, 2, 4).sum(1) + x, token_dim="x:0")
    for n in (5, 7, 6, 7, 6):
        pair(rows(n), rows(2 * n))


@pytest.mark.parametrize("length_first", [True, False])
def test_a_number_that_is_the_length_is_a_number(padded: Any, length_first: bool) -> None:
    """Dynamo may give two equal sizes one symbol."""
    pair = padded((lambda k, x: (x * k).relu() + 1) if length_first else (lambda x, k: (x * k).relu() + 1))
    for n, k in ((5, 5), (6, 6), (7, 7), (7, 3), (6, 6), (6, 6), (12, 12), (12, 5)):
        pair(*((k, rows(n)) if length_first else (rows(n), k)))


def test_an_input_that_nobody_reads_may_have_any_rows(padded: Any) -> None:
    pair = padded(lambda x, y: x * 2 + 1)
    for n in (5, 7, 12):
        pair(rows(n), rows(n))
    assert pair.stats.captures == 2


def test_written_input_that_overlaps_another_runs_eagerly(padded: Any) -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2 + x

    pair = padded(write)
    for n in (5, 7):
        pair(rows(n), rows(n))
    home = torch.randn(16, 4)
    mine, theirs = home.clone(), home.clone()
    got, want = pair.compiled(mine[:7], mine[2:9]), write(theirs[:7], theirs[2:9])
    assert torch.equal(got, want) and torch.equal(mine, theirs)
    assert pair.stats.eager_runs["input_overlap"] == 1


def test_results_of_earlier_calls_stay(padded: Any) -> None:
    pair = padded(lambda x: (x * 2, x + 1))
    kept = [(pair(rows(n)), n) for n in (5, 7, 6, 7)]
    copies = [[t.clone() for t in result] for result, _ in kept]
    pair(rows(8))
    for (result, _), copy in zip(kept, copies, strict=True):
        assert all(map(torch.equal, result, copy))


def test_results_handed_out_uncopied_are_right_until_the_next_call(padded: Any) -> None:
    pair = padded(lambda x: x * 2, outputs="alias")
    for n in (5, 7, 12, 6):
        x = rows(n)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(pair.compiled(x), x * 2)
    assert pair.stats.replays == 3
