"""Whether padded rows can reach live ones: a verdict for small graphs, and a run that shows it.

Each case is a function of tensors with one dimension of rows. A case that is judged safe is run once with its rows
alone and once with rubbish behind them: live rows must be the same. Rubbish is NaN where the verdict says that padding
may hold anything, and large finite numbers else.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import bcg_compiler as bcg

Collect = Callable[..., Any]
Inputs = Callable[[int], tuple[Tensor, ...]]

W = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


def rows(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(n, 4),)


def batch(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, n, 4),)


def heads(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 1, 2, n, 4),)


def of_heads(fn: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of query, key and value."""
    return lambda qkv: fn(*qkv.unbind(0))


def ids(n: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 32, (n,)),)


def two(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 4), torch.randn(n, 4)


def causal_mask(n: int) -> Tensor:
    at = torch.arange(n)
    return at[None, :] <= at[:, None]


def masked_scores(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    return scores.masked_fill(~causal_mask(q.shape[-2]), float("-inf"))


def masked_by(at: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(at[None, :] > at[:, None], float("-inf")).softmax(-1)


def shifted_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:-1] = x[1:]
    return y


def padded_by_writing(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0] + 8, 4)
    y[: x.shape[0]] = x
    return y


@bcg.eager_break(fake=torch.empty_like, reads_live_rows=True)
def careful(x: Tensor) -> Tensor:
    return x * 2


@bcg.eager_break(fake=torch.empty_like)
def unknown(x: Tensor) -> Tensor:
    return x - x.mean(0)


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def careful_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x + 1)


def written_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:].mul_(3)
    y.add_(1).relu_()
    return y


def into_a_buffer(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    careful_into(x.sin(), out)
    return out * 2


def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    mask = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def rotary(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[0]).unsqueeze(1).float() * torch.tensor([1.0, 0.5])
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def layer(x: Tensor) -> Tensor:
    h = F.rms_norm(x, (4,))
    q = (h @ W).view(x.shape[0], 2, 3).transpose(0, 1)
    return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1).reshape(x.shape[0], 6)[:, :4]


ROW_WISE: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "pointwise": (lambda x: (x.sin() + 1) * x.sigmoid(), rows),
    "two_arguments": (lambda x, y: x * y - y.exp(), two),
    "linear": (lambda x: F.linear(x, W.t()), rows),
    "linear_of_a_batch": (lambda x: F.silu(x @ W), batch),
    "embedding": (lambda i: F.embedding(i, TABLE), ids),
    "index_into_a_table": (lambda i: TABLE[i] * 2, ids),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), rows),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), rows),
    "rms_norm as on CUDA": (lambda x: torch.ops.aten._fused_rms_norm(x, [4], None, 1e-6)[0], rows),
    "norm_by_hand": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), batch),
    "softmax_of_each_row": (lambda x: x.softmax(-1), rows),
    "sum_of_each_row": (lambda x: x.sum(-1), rows),
    "argmax_of_each_row": (lambda x: (x + 1).argmax(-1), rows),
    "top_k_of_each_row": (lambda x: x.topk(2, -1), rows),
    "sort_of_each_row": (lambda x: x.sort(-1), rows),
    "gather_in_each_row": (lambda x: x.gather(1, x.topk(2, -1).indices), rows),
    "scatter_in_each_row": (lambda x: torch.zeros_like(x).scatter(1, x.topk(2, -1).indices, 1.0), rows),
    "transposed": (lambda x: x.t().contiguous() * 2, rows),
    "permuted": (lambda x: x.permute(2, 0, 1) + 1, batch),
    "heads_and_back": (lambda x: x.view(x.shape[0], 2, 2).transpose(0, 1).transpose(0, 1).reshape(x.shape[0], 4), rows),
    "batch_flattened_and_back": (lambda x: (x.view(-1, 4) @ W).view(2, -1, 6), batch),
    "features_as_bytes": (lambda x: torch.cat([x, x.sum(-1, True)], -1).view(torch.uint8) + 1, rows),
    "bytes_of_features_and_back": (lambda x: x.view(torch.int16).flip(-1).view(torch.float32).nan_to_num(), rows),
    "bits_shifted": (lambda x: (x.view(torch.int32) >> torch.arange(4)) & 255, rows),
    "split_features": (lambda x: torch.cat([p * 2 for p in x.split(2, -1)], -1), rows),
    "unbound_features": (lambda x: x.unbind(1)[3] + x[:, 0], rows),
    "features_joined": (lambda x: torch.cat((x, x * 2), -1), rows),
    "stacked": (lambda x: torch.stack((x, x + 1), 1), rows),
    "expanded": (lambda x: x.unsqueeze(1).expand(-1, 3, -1) * 2, rows),
    "positions": (lambda x: x + torch.arange(x.shape[0]).unsqueeze(1), rows),
    "positions_from_a_table": (lambda x: x + TABLE[: x.shape[0]], rows),
    "rotary": (rotary, rows),
    "first_rows": (lambda x: x[:2] * 2, rows),
    "all_but_the_first": (lambda x: x[1:] + 1, rows),
    "one_row": (lambda x: x[0] * 2, rows),
    "shifted": (lambda x: torch.cat((x[:1], x), 0)[: x.shape[0]], rows),
    "differences": (lambda x: torch.diff(x, dim=0, prepend=x[:1]), rows),
    "sum_so_far": (lambda x: x.cumsum(0) * 2, rows),
    "convolution_of_the_past": (
        lambda x: F.conv1d(F.pad(x.t().unsqueeze(0), (2, 0)), torch.ones(4, 1, 3), groups=4),
        rows,
    ),
    "convolution_cut_to_the_past": (
        lambda x: F.conv1d(x.t().unsqueeze(0), torch.ones(4, 1, 3), padding=2, groups=4)[..., : x.shape[0]],
        rows,
    ),
    "written_in_place": (written_in_place, rows),
    "filled": (lambda x: torch.zeros(x.shape[0], 3) + x[:, :3], rows),
    "chosen": (lambda x, y: torch.where(x > y, x, y), two),
    "break_that_reads_live_rows": (lambda x: careful(x.sin()) + 1, rows),
    "break_into_a_buffer": (into_a_buffer, rows),
    "not_rows_at_all": (lambda x: (x * 2, W.sum()), rows),
    "max_of_features": (lambda x: x.view(x.shape[0], 2, 2).amax((-1, -2)), rows),
}

CAUSAL: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "attention_said_to_be_causal": (
        of_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        heads,
    ),
    "attention_under_a_mask_of_positions": (
        of_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q.shape[-2]))),
        heads,
    ),
    "attention_in_a_window": (of_heads(sliding), heads),
    "attention_by_hand": (of_heads(lambda q, k, v: masked_scores(q, k).softmax(-1) @ v), heads),
    "attention_under_a_lower_triangle": (
        of_heads(lambda q, k, v: (q @ k.transpose(-1, -2)).tril() @ v),
        heads,
    ),
    "attention_under_a_float_mask": (
        of_heads(
            lambda q, k, v: F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=torch.zeros(q.shape[-2], q.shape[-2]).masked_fill(~causal_mask(q.shape[-2]), float("-inf")),
            )
        ),
        heads,
    ),
    "sum_of_what_is_not_masked": (
        of_heads(lambda q, k, v: torch.where(causal_mask(q.shape[-2]), q @ k.mT, 0.0).sum(-1)),
        heads,
    ),
    "a_layer_of_a_decoder": (layer, rows),
}

#: What mixes, and a word of the reason.
MIXING: dict[str, tuple[Callable[..., Any], Inputs, str]] = {
    "mean_over_rows": (lambda x: x - x.mean(0), rows, "mean runs over all rows"),
    "sum_over_rows": (lambda x: x.sum(0), rows, "sum runs over all rows"),
    "softmax_over_rows": (lambda x: x.softmax(0), rows, "softmax runs over all rows"),
    "attention_to_all": (
        of_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
        heads,
        "attention reads all rows",
    ),
    "mask_that_looks_ahead": (
        of_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(q.shape[-2]).mT)),
        heads,
        "attention reads all rows",
    ),
    "mask_one_too_far": (
        of_heads(
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.arange(q.shape[-2])[None, :] <= torch.arange(q.shape[-2])[:, None] + 1
            )
        ),
        heads,
        "attention reads all rows",
    ),
    "mask_of_the_caller_s": (
        lambda m: F.scaled_dot_product_attention(*[m.view(1, 1, *m.shape)[..., :4]] * 3, attn_mask=m > 0),
        lambda n: (torch.randn(n, n),),
        "attention reads all rows",
    ),
    "scores_of_the_past_and_then_all": (
        of_heads(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
        heads,
        "softmax runs over all rows",
    ),
    "products_over_rows": (lambda x: x.t() @ x, rows, "matrix product adds up over rows"),
    "last_row": (lambda x: x[-1] * 2, rows, "counts rows from the end"),
    "last_rows": (lambda x: x[-2:] * 2, rows, "counts rows from the end"),
    "last_row_by_size": (lambda x: x[x.shape[0] - 1] * 2, rows, "counts rows from the end"),
    "all_but_the_last": (lambda x: torch.cat((x[1:], x[:1]), 0), rows, "made of padded ones"),
    "reversed": (lambda x: x.flip(0), rows, "flip moves rows"),
    "rolled": (lambda x: x.roll(1, 0), rows, "roll moves rows"),
    "sorted": (lambda x: x.sort(0).values, rows, "sort compares rows"),
    "top_k_of_rows": (lambda x: x.sum(-1).topk(2).values, rows, "topk compares rows"),
    "size_as_a_number": (lambda x: x / x.shape[0], rows, "computes with the number of rows"),
    "size_as_a_result": (lambda x: (x * 2, x.shape[0]), rows, "the number of rows is a result"),
    "random_numbers": (lambda x: x + torch.rand_like(x), rows, "draws random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5, True), rows, "draws random numbers"),
    "rows_by_number": (lambda x: x[(x[:, 0] > 0).long()], rows, "rows by number"),
    "rows_by_mask": (lambda x: x[x[:, 0] > 0], rows, ""),
    "break_that_says_nothing": (lambda x: unknown(x.sin()) + 1, rows, "declare reads_live_rows=True"),
    "break_given_rows_made_of_padding": (
        lambda x: careful(F.pad(x * 2, (0, 0, 0, 1))[1:]),
        rows,
        "made of padded ones",
    ),
    "number_read_from_mixed_rows": (lambda x: x * x.mean().item(), rows, "mean runs over all rows"),
    "positions_that_wrap_around": (lambda x: x[torch.arange(x.shape[0]) - 1], rows, "takes rows by number"),
    "mask_over_columns_that_end_too_early": (
        lambda x: torch.where(causal_mask(x.shape[0]), x @ torch.cat([x[1:], x[:1]], 0).t(), 0.0) @ x,
        rows,
        "matrix product adds up over rows",
    ),
    # what a fresh pair of eyes found judged safe
    "written_up_to_the_last": (lambda x: shifted_in_place(x), rows, "a write ends at a number of rows"),
    "written_into_more_memory": (lambda x: padded_by_writing(x), rows, "a write ends at a number of rows"),
    "one_row_of_a_flattened_batch": (lambda x: x.view(-1, 4)[5] * 2, batch, "a reshape has merged"),
    "attention_over_a_flattened_batch": (
        lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, 4)] * 3, is_causal=True),
        batch,
        "a reshape has merged",
    ),
    "row_of_a_table_by_size": (lambda x: x + TABLE[x.shape[0] - 1], rows, "counts rows from the end"),
    "rolled_by_size": (lambda x: x.roll(x.shape[0], 1), rows, "computes with the number of rows"),
    "norm_with_a_size_in_it": (lambda x: F.layer_norm(x, (4,), eps=1 / x.shape[0]), rows, "with the number of rows"),
    "positions_too_coarse_to_compare": (
        of_heads(lambda q, k, v: masked_by(torch.arange(q.shape[-2], dtype=torch.bfloat16), q, k) @ v),
        heads,
        "softmax runs over all rows",
    ),
    "one_position_for_all": (
        of_heads(lambda q, k, v: masked_by(torch.arange(1).expand(q.shape[-2]), q, k) @ v),
        heads,
        "softmax runs over all rows",
    ),
    "rows_as_bytes": (
        lambda x: x.t().contiguous().view(torch.uint8),
        rows,
        "a view as another type cuts through rows",
    ),
    "two_rows_in_one": (lambda x: x.view(-1, 8), lambda n: (torch.randn(2 * n, 4),), ""),
    "convolution_that_looks_ahead": (
        lambda x: F.conv1d(x.t().unsqueeze(0), torch.ones(4, 1, 3), padding=1, groups=4),
        rows,
        "made of padded ones",
    ),
    "cumulative_sum_backwards": (lambda x: x.flip(0).cumsum(0).flip(0), rows, "flip moves rows"),
    "joined_behind": (lambda x: torch.cat((x, x), 0), rows, "made of padded ones"),
    "every_other_row": (lambda x: x[::2], rows, "does not grow row by row"),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), rows, ""),
}


@pytest.mark.parametrize(
    ("fn", "least"),
    [
        (lambda x: x * 2, 1),
        (lambda x: x[:3] * 2, 3),
        (lambda x: x[1:][:2] * 2, 3),
        (lambda x: x * x[2], 3),
    ],
    ids=["all", "first", "first_behind_the_first", "one"],
)
def test_fewest_rows_for_which_a_verdict_holds(facts_of: Collect, fn: Callable[..., Any], least: int) -> None:
    """With one live row the second is padding, and a graph that takes the first three takes it."""
    assert verdict(facts_of, fn, rows).least == least


@torch.library.custom_op("bcg_tests_rows::count", mutates_args=("total",))
def count(total: Tensor) -> None:
    total.add_(1)


def test_operation_that_has_no_part_in_rows_needs_no_rule(facts_of: Collect) -> None:
    """A counter, say. One that returns nothing and writes must not stop the compile either."""
    total = torch.zeros(2)

    def counted(x: Tensor) -> Tensor:
        count(total)
        return x.sin() + total[0]

    assert verdict(facts_of, counted, rows).kind == "row_wise"


def verdict(facts_of: Collect, fn: Callable[..., Any], inputs: Inputs) -> Any:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        graph = facts_of(fn, *inputs(5), again=inputs(8)).graph
    # Torch 2.11 may leave other sizes open, too: those that vary in tests before this one.
    one, other = inputs(5)[0], inputs(8)[0]
    dim = next(d for d in range(one.dim()) if one.shape[d] != other.shape[d])
    return next(rows for rows in graph.rows if (min(place for place, _ in rows.inputs), dim) in rows.inputs)


def padded(inputs: Inputs, live: tuple[Tensor, ...], bucket: int, filler: float) -> tuple[Tensor, ...]:
    """``live`` with rubbish behind its rows."""
    found = []
    for tensor, larger in zip(live, inputs(bucket), strict=True):
        larger = larger.clone() if larger.dtype.is_floating_point is False else torch.full_like(larger, filler)
        larger[tuple(slice(0, size) for size in tensor.shape)] = tensor
        found.append(larger)
    return tuple(found)


def check(fn: Callable[..., Any], inputs: Inputs, filler: float) -> None:
    """Live rows with padding behind them are those without."""
    torch.manual_seed(0)
    for n, bucket in ((5, 8), (7, 16), (3, 32)):
        live = inputs(n)
        alone = fn(*(t.clone() for t in live))
        among = fn(*padded(inputs, live, bucket, filler))
        alone, among = (r if isinstance(r, (tuple, list)) else (r,) for r in (alone, among))
        for one, other in zip(alone, among, strict=True):
            there = other[tuple(slice(0, size) for size in one.shape)]
            torch.testing.assert_close(
                there, one, rtol=1e-4, atol=1e-4
            )  # products of other sizes add up in another order


@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_that_padding_never_reaches(facts_of: Collect, name: str) -> None:
    fn, inputs = ROW_WISE[name]
    found = verdict(facts_of, fn, inputs)
    assert (found.kind, found.text) == ("row_wise", "")
    check(fn, inputs, float("nan"))


@pytest.mark.parametrize("name", CAUSAL)
def test_rows_that_finite_padding_never_reaches(facts_of: Collect, name: str) -> None:
    fn, inputs = CAUSAL[name]
    found = verdict(facts_of, fn, inputs)
    assert (found.kind, found.text) == ("causal", "")
    check(fn, inputs, 1e4)


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_padding_can_reach(facts_of: Collect, name: str) -> None:
    fn, inputs, text = MIXING[name]
    found = verdict(facts_of, fn, inputs)
    assert found.kind == "mixing" and text in found.text
    assert found.op and found.source is not None and found.source.file == __file__


# -- random programs ---------------------------------------------------------------------------------------------------

#: ``{x}`` and ``{y}`` are values of n×4, ``{new}`` a new one. Some of the lines mix rows.
LINES = (
    "{new} = {x} * 0.5 + {y}",
    "{new} = torch.relu({x}) - {y}.sum(-1, keepdim=True)",
    "{new} = ({x} @ W)[:, 1:5]",
    "{new} = {x}.cumsum(0) + {y}",
    "{new} = torch.cat([{x}[:1], {y}], 0)[: {x}.shape[0]]",
    "{new} = torch.cat([{x}, {y}[:2]], 0)[: {x}.shape[0]]",
    "{new} = torch.cat([{x}[1:], {y}[:1]], 0)",
    "{new} = F.pad({x}, (0, 0, 1, 1))[: {x}.shape[0]]",
    "{new} = F.pad({x}, (0, 0, 1, 1))[1:][: {x}.shape[0]]",
    "{new} = F.pad({x}, (0, 0, 0, 2))[2:]",
    "{new} = {x}.t().reshape(2, 2, -1).transpose(0, 1).reshape(4, -1).t()",
    "{new} = {x}.view(-1, 2, 2).transpose(0, 1).reshape(2, -1, 2).transpose(0, 1).reshape(-1, 4)",
    "{new} = {x}.unsqueeze(0).expand(3, -1, -1).sum(0) + {y}",
    "{new} = {x} + torch.arange({y}.shape[0]).unsqueeze(1)",
    "{new} = {x}[torch.arange({y}.shape[0])]",
    "{new} = {x}[torch.arange({y}.shape[0]).clamp(max=2)]",
    "{new} = {x}[(torch.arange({y}.shape[0]) - 1).clamp(min=0)]",
    "{new} = torch.where(causal_mask({x}.shape[0]), {x} @ {y}.t(), 0.0) @ {x}",
    "{new} = masked_scores({x}, {y}).softmax(-1) @ {y}",
    "{new} = masked_scores({x}, {y}).softmax(-1).t() @ {y}",
    "{new} = ({x} @ {y}.t()).tril() @ {x}",
    "{new} = ({x} @ {y}.t()).triu() @ {x}",
    "{new} = ({x} @ {y}.t()).tril(1) @ {x}",
    "{new} = {x} * ({x}.shape[0] > 0)",
    "{new} = {x}.flip(0) + {y}.flip(0)",
    "{new} = {x} - {y}.mean(0)",
    "{new} = {x} + {y}[-1]",
    "{new} = {x}.roll(1, 0)",
    "{x}.mul_(0.5)",
    "{x}[1:].add_({y}[1:])",
    "{x}[:1] = {y}[1:2].clone()",
    "{x}.copy_({y}.flip(1))",
    "{new} = careful({x})",
)


@st.composite
def programs(draw: Any) -> str:
    """The text of a function of ``a``, whose rows are those of most values in it."""
    values, lines = ["a", "b"], ["b = a.sin() + 0.5"]
    for _ in range(draw(st.integers(1, 4))):
        new, line = f"v{len(values)}", draw(st.sampled_from(LINES))
        x, y = draw(st.sampled_from(values[1:])), draw(st.sampled_from(values))
        lines.append(line.format(x=x, y=y, new=new))
        values += [new] if "{new}" in line else []
    return "def program(a):\n    " + "\n    ".join([*lines, f"return {values[-1]}, b"])


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.nightly)])
def test_random_programs_judged_safe_are_safe(facts_of: Collect, examples: int) -> None:
    """Whatever the verdict rests on, it must hold when the program is run."""
    kinds: list[str] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(text=programs())
    def example(text: str) -> None:
        note(text)
        torch.compiler.reset()
        scope: dict[str, Any] = {}
        exec(text, globals(), scope)
        found = verdict(facts_of, scope["program"], rows)
        kinds.append(found.kind)
        assert "nothing could be shown" not in found.text
        if found.kind != "mixing":
            check(scope["program"], rows, float("nan") if found.kind == "row_wise" else 3.0)

    example()
    assert min(kinds.count("row_wise"), kinds.count("causal"), kinds.count("mixing")) > 5
