"""Admission: each reason and its edge, and what holds for all batches, buckets and limits."""

import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from fractions import Fraction
from functools import partial
from typing import Any, get_args

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcg_compiler.buckets.admission import Admission, Batch, Limits, Refusal, admit
from bcg_compiler.errors import AdmissionError, BcgError

# One sequence of examples for everybody and always: whether a test fails must not depend on chance or on the clock.
thorough = settings(max_examples=500, deadline=None, derandomize=True, database=None)

LADDER = (8, 16, 32, 128)


def two_of_three(batch: Batch) -> str | None:
    return None if batch.rows % 3 else f"{batch.rows} is a multiple of 3"


def even(batch: Batch) -> str | None:
    return None if batch.rows % 2 else "even"


# -- each reason, and the last batch that it does not concern


@pytest.mark.parametrize(
    ("reason", "limits", "admitted", "refused", "text"),
    [
        ("few_rows", {}, {"rows": 1}, {"rows": 0}, "rows is 0, and the program is right for 1 or more"),
        ("few_rows", {"least": 5}, {"rows": 5}, {"rows": 4}, "rows is 4, .* for 5 or more"),
        ("too_long", {}, {"rows": 128}, {"rows": 129}, "rows is 129, above the last bucket, 128: a larger bucket"),
        (
            "padding",
            {},
            {"rows": 64},
            {"rows": 63},
            r"rows is 63, .* holds them, 128, is more than 2.0 times .* at most 126, or a max_padding_factor of 2.04,",
        ),
        ("padding", {"max_padding_factor": 1.28}, {"rows": 100}, {"rows": 99}, "128, is more than 1.28 times"),
        (
            "cp_capacity",
            {"captured_rows": {16: 4, 32: 8}},
            {"local_rows": 8},
            {"local_rows": 9},
            "local_rows is 9, and at most 8 rows of a rank are captured for .* 16 rows may be padded to, 16, 32:",
        ),
        (
            "cp_capacity",
            {"captured_rows": {128: 99, 8: 0}},
            {"rows": 8, "local_rows": 0},
            {"local_rows": 1},
            "local_rows is 1, and no rows of a rank are known to be captured for",
        ),
        ("requests", {"max_requests": 2}, {"requests": 2}, {"requests": 3}, "requests is 3, and 2 or fewer"),
        ("prefix_chunks", {"max_prefix_chunks": 0}, {"prefix_chunks": 0}, {"prefix_chunks": 1}, "1, and 0 or fewer"),
        (
            "prefix",
            {"prefixes": False},
            {"prefix_lengths": (0, 0)},
            {"prefix_lengths": (0, 7, 3)},
            r"max\(prefix_lengths\) is 7, and 0, no prefix, is captured",
        ),
        (
            "embeddings",
            {"embeddings": {"none", "given"}},
            {"embeddings": "given"},
            {"embeddings": "replaced"},
            "embeddings is 'replaced', and 'given' or 'none' is captured",
        ),
        (
            "adapter",
            {"adapters": {"a", "b"}},
            {"adapters": ("b", "a", "b")},
            {"adapters": ("a", "c")},
            r"adapters is \('a', 'c'\), and 'a' or 'b' is captured",
        ),
        ("adapter", {"adapters": ()}, {"adapters": ()}, {"adapters": ("a",)}, r"\('a',\), and none is captured"),
        (
            "target_verify",
            {"target_verify": False},
            {"target_verify": False},
            {"target_verify": True},
            "target_verify is True, and False is captured",
        ),
        (
            "hidden_states",
            {"hidden_states": "last"},
            {"hidden_states": "last"},
            {"hidden_states": "all"},
            "hidden_states is 'all', and at most 'last' is captured",
        ),
        (
            "hidden_states",
            {"hidden_states": "none"},
            {"hidden_states": "none"},
            {"hidden_states": "last"},
            "hidden_states is 'last', and at most 'none' is captured",
        ),
        ("hidden_states", {"hidden_states": "last"}, {"hidden_states": "none"}, {"hidden_states": "all"}, "'all', and"),
        (
            "logprobs",
            {"logprobs": False},
            {"logprobs": False},
            {"logprobs": True},
            "logprobs is True, and no eager tail",
        ),
        (
            "veto",
            {"vetoes": (two_of_three, even)},
            {"rows": 7},
            {"rows": 8},
            "The veto even returned 'even': None lets a batch replay",
        ),
    ],
)
def test_each_reason_begins_behind_its_edge(
    reason: str, limits: dict[str, Any], admitted: dict[str, Any], refused: dict[str, Any], text: str
) -> None:
    made = Limits(**limits)
    first = Batch(**{"rows": 16, **admitted})
    assert admit(first, LADDER, made).replays
    found = admit(Batch(**{"rows": 16, **refused}), LADDER, made)
    assert (found.bucket, found.reason, found.replays) == (None, reason, False)
    assert re.search(text, found.text), found.text
    if reason not in ("few_rows", "too_long", "padding"):
        assert admit(Batch(**{"rows": 16, **refused}), LADDER, Limits()).replays, "another limit refuses it"


def test_without_a_bucket_nothing_replays() -> None:
    found = admit(Batch(rows=4), (), Limits())
    assert (found.bucket, found.reason) == (None, "no_bucket")
    assert "rows is 4" in found.text


def test_an_admitted_batch_says_where_it_replays() -> None:
    assert admit(Batch(rows=9), LADDER, Limits()) == Admission(16, "", "rows is 9: replays in bucket 16.", 9)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 128), (128, 128)])
def test_a_batch_goes_to_the_smallest_bucket_that_holds_it(rows: int, bucket: int) -> None:
    assert admit(Batch(rows=rows), LADDER, Limits()).bucket == bucket


def test_the_first_bucket_is_exempt_from_the_padding_factor() -> None:
    limits = Limits(max_padding_factor=1)
    assert admit(Batch(rows=1), (8, 9), limits).bucket == 8
    assert admit(Batch(rows=9), (8, 10), limits).reason == "padding"


def test_a_factor_is_taken_as_it_is_written() -> None:
    """In binary, 1.15 * 100 is below 115: a batch exactly at the factor would have been refused."""
    assert 1.15 * 100 < 115
    for factor in (1.15, numpy.float32(1.15), Fraction(23, 20)):
        assert admit(Batch(rows=100), (8, 115), Limits(max_padding_factor=factor)).bucket == 115
        assert admit(Batch(rows=100), (8, 116), Limits(max_padding_factor=factor)).reason == "padding"


def test_an_infinite_factor_allows_any_padding() -> None:
    assert admit(Batch(rows=9), (8, 2**31 - 1), Limits(max_padding_factor=math.inf)).bucket == 2**31 - 1


def test_no_rows_at_all_replay_where_the_program_allows_it() -> None:
    assert admit(Batch(rows=0), LADDER, Limits(least=0)).bucket == 8


def test_a_larger_bucket_is_tried_where_a_rank_would_hold_too_many_rows() -> None:
    def bucket(rows: int, local: int, factor: float = 2.0, **captured: int) -> int | None:
        known = {int(b[1:]): room for b, room in captured.items()}
        limits = Limits(captured_rows=known, max_padding_factor=factor)
        return admit(Batch(rows=rows, local_rows=local), LADDER, limits).bucket

    assert bucket(9, 4, b16=4, b32=8) == 16
    assert bucket(16, 5, b16=4, b32=8) == 32
    assert bucket(16, 9, b16=4, b32=8, b128=32) is None, "128 is beyond twice the rows"
    assert bucket(16, 9, math.inf, b16=4, b32=8, b128=32) == 128
    assert bucket(16, 5, b32=8, b128=32) == 32, "one of unknown room is passed over"
    assert bucket(16, 9, math.inf, b16=4, b32=8) is None
    assert bucket(1, 2, 1, b8=2, b16=4) == 8, "the first one is exempt from the factor"
    assert bucket(1, 3, 1, b8=2, b16=4) is None, "and no other one"


# -- vetoes


def test_what_a_veto_raises_reaches_the_caller() -> None:
    def broken(batch: Batch) -> str | None:
        raise KeyError("loading")

    with pytest.raises(KeyError, match="loading"):
        admit(Batch(rows=9), LADDER, Limits(vetoes=(broken,)))


def test_vetoes_are_asked_last_and_in_order() -> None:
    asked = []

    def ask(name: str, batch: Batch) -> str | None:
        asked.append((name, batch.extra["of"]))
        return "no" if name == "b" else None

    limits = Limits(max_requests=1, vetoes=[partial(ask, name) for name in "abc"])
    assert admit(Batch(rows=9, requests=2, extra={"of": 1}), LADDER, limits).reason == "requests"
    assert admit(Batch(rows=129, requests=1, extra={"of": 2}), LADDER, limits).reason == "too_long"
    assert not asked
    assert admit(Batch(rows=9, requests=1, extra={"of": 3}), LADDER, limits).text.startswith(
        "The veto partial returned"
    )
    assert asked == [("a", 3), ("b", 3)]


@pytest.mark.parametrize("said", ["", False, 0])
def test_whatever_a_veto_returns_refuses_but_for_none(said: Any) -> None:
    """``False`` could mean "no veto" or "no replay": only ``None`` is not in doubt."""
    found = admit(Batch(rows=9), LADDER, Limits(vetoes=(lambda batch: said,)))
    assert found.reason == "veto" and f"returned {said!r}" in found.text


# -- values that cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batch(rows=-1), "rows is -1; it must be at least 0"),
        (lambda: Batch(rows=1.0), r"rows is 1.0 \(float\); it must be an int"),
        (lambda: Batch(rows=True), r"rows is True \(bool\); it must be an int"),
        (lambda: Batch(rows=None), r"rows is None \(NoneType\); it must be an int"),
        (lambda: Batch(rows=1, local_rows=-1), "local_rows is -1; it must be at least 0"),
        (lambda: Batch(rows=1, requests=-1), "requests is -1; it must be at least 0"),
        (lambda: Batch(rows=1, requests="1"), r"requests is '1' \(str\)"),
        (lambda: Batch(rows=1, prefix_lengths=(0, -2)), r"prefix_lengths\[1\] is -2; it must be at least 0"),
        (lambda: Batch(rows=1, prefix_lengths=(0.5,)), r"prefix_lengths\[0\] is 0.5 \(float\)"),
        (lambda: Batch(rows=1, prefix_lengths=3), r"prefix_lengths is 3 \(int\); it must be a tuple"),
        (lambda: Batch(rows=1, prefix_chunks=-1), "prefix_chunks is -1"),
        (lambda: Batch(rows=1, embeddings="give"), "embeddings is 'give', .* Did you mean 'given'"),
        (lambda: Batch(rows=1, embeddings=["given"]), r"embeddings is \['given'\], which is none of its values"),
        (lambda: Batch(rows=1, adapters="a"), r"adapters is 'a' \(str\); it must be a tuple"),
        (lambda: Batch(rows=1, adapters=(1,)), r"An item of adapters is 1 \(int\); it must be a string"),
        (lambda: Batch(rows=1, target_verify=1), r"target_verify is 1 \(int\); it must be True or False"),
        (lambda: Batch(rows=1, hidden_states=True), "hidden_states is True, .* Known: all, last, none"),
        (lambda: Batch(rows=1, logprobs="no"), r"logprobs is 'no' \(str\); it must be True or False"),
        (lambda: Batch(rows=1, extra=3), r"extra is 3 \(int\); it must be a dictionary"),
        (
            lambda: Batch(rows=4, requests=2, prefix_lengths=(0, 0, 0)),
            "requests is 2, and prefix_lengths has 3. Give one length for each request",
        ),
        (lambda: Batch(rows=4, requests=3, prefix_lengths=(0, 0)), "requests is 3, and prefix_lengths has 2"),
        (lambda: Batch(rows=4, requests=0), "requests is 0, and rows is 4: these tokens belong to a request"),
        (lambda: Batch(rows=4, prefix_lengths=()), r"prefix_lengths is \(\), and rows is 4"),
        (lambda: Limits(max_padding_factor=0.9), "max_padding_factor is 0.9; it must be a number of at least 1"),
        (lambda: Limits(max_padding_factor=math.nan), "max_padding_factor is nan"),
        (lambda: Limits(max_padding_factor=True), "max_padding_factor is True"),
        (lambda: Limits(max_padding_factor="2"), "max_padding_factor is '2'"),
        (lambda: Limits(least=-1), "least is -1; it must be at least 0"),
        (lambda: Limits(captured_rows=[4]), r"captured_rows is \[4\] \(list\); it must be a dictionary from buckets"),
        (lambda: Limits(captured_rows={0: 4}), "A bucket of captured_rows is 0; it must be at least 1"),
        (lambda: Limits(captured_rows={8: -1}), r"captured_rows\[8\] is -1; it must be at least 0"),
        (lambda: Limits(max_requests=0), "max_requests is 0; it must be at least 1"),
        (lambda: Limits(max_prefix_chunks=-1), "max_prefix_chunks is -1; it must be at least 0"),
        (lambda: Limits(prefixes=None), r"prefixes is None \(NoneType\); it must be True or False"),
        (lambda: Limits(embeddings={"gven"}), "embeddings is 'gven', .* Did you mean 'given'"),
        (lambda: Limits(embeddings="given"), r"embeddings is 'given' \(str\); it must be a tuple"),
        (lambda: Limits(embeddings=()), "embeddings is empty: no batch would ever replay"),
        (lambda: Limits(adapters="a"), r"adapters is 'a' \(str\)"),
        (lambda: Limits(target_verify=0), r"target_verify is 0 \(int\)"),
        (lambda: Limits(hidden_states="al"), "hidden_states is 'al', .* Did you mean 'all'"),
        (lambda: Limits(logprobs="yes"), "logprobs is 'yes'"),
        (lambda: Limits(vetoes=(even, "odd")), r"vetoes\[1\] is 'odd' \(str\); it must be a function"),
        (lambda: Limits(vetoes=even), r"vetoes is <function even .*> \(function\); it must be a tuple"),
    ],
)
def test_what_cannot_be_is_told(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(AdmissionError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, BcgError)


def test_batches_of_equal_values_are_equal_however_they_are_built() -> None:
    """Scheduler and forward build the same batch from lists, tuples and numbers of NumPy."""
    one = Batch(rows=4, requests=2, prefix_lengths=(0, 3), adapters=("a",))
    other = Batch(rows=numpy.int64(4), requests=numpy.int32(2), prefix_lengths=numpy.array([0, 3]), adapters=["a"])
    assert one == other and hash(one) == hash(other)
    assert type(other.rows) is int and other.prefix_lengths == (0, 3)
    assert pickle.loads(pickle.dumps(one)) == one
    assert Limits(adapters=["a"]) == Limits(adapters=frozenset({"a"}))


def test_a_batch_stays_as_it_is_when_what_it_was_made_from_changes() -> None:
    extra, lengths = {"loading": True}, [0, 3]
    batch = Batch(rows=4, prefix_lengths=lengths, extra=extra)
    extra["loading"] = False
    lengths.append(5)
    assert (batch.extra, batch.prefix_lengths) == ({"loading": True}, (0, 3))


# -- what holds for all

#: Values of each limit, each restricting what the one before it does, or more.
LOOSE_TO_STRICT: Mapping[str, tuple[Any, ...]] = {
    "max_padding_factor": (math.inf, 2.0, 1.5, 1.1, 1.0),
    "least": (0, 1, 3, 9),
    "captured_rows": (None, dict.fromkeys(range(1, 61), 12), {b: b // 4 for b in range(1, 61)}, {}),
    "max_requests": (None, 4, 2, 1),
    "max_prefix_chunks": (None, 2, 1, 0),
    "prefixes": (True, False),
    "embeddings": (("none", "given", "replaced"), ("none", "given"), ("none",)),
    "adapters": (None, ("a", "b"), ("a",), ()),
    "target_verify": (True, False),
    "hidden_states": ("all", "last", "none"),
    "logprobs": (True, False),
    "vetoes": ((), (two_of_three,), (two_of_three, even)),
}

#: The field of a batch that each restricting limit asks for, and the reason it gives.
ASKS = {
    "captured_rows": ("local_rows", "cp_capacity"),
    "max_requests": ("requests", "requests"),
    "max_prefix_chunks": ("prefix_chunks", "prefix_chunks"),
    "prefixes": ("prefix_lengths", "prefix"),
    "embeddings": ("embeddings", "embeddings"),
    "adapters": ("adapters", "adapter"),
    "target_verify": ("target_verify", "target_verify"),
    "hidden_states": ("hidden_states", "hidden_states"),
    "logprobs": ("logprobs", "logprobs"),
}

#: Where in their row the defaults stand.
DEFAULTS = {name: 1 if name in ("max_padding_factor", "least") else 0 for name in LOOSE_TO_STRICT}

# A few at a time: with all of them nearly every batch is refused, and nothing is shown.
some_limits = st.lists(
    st.sampled_from([(name, step) for name, values in LOOSE_TO_STRICT.items() for step in range(len(values))]),
    max_size=3,
).map(dict)
bucket_lists = st.sets(st.integers(1, 60), max_size=6).map(sorted)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    requests = draw(st.integers(1, 5))

    def some(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | values | values)

    return Batch(
        rows=draw(st.integers(0, 70)),
        local_rows=some(st.integers(0, 15)),
        requests=some(st.just(requests)),
        prefix_lengths=some(st.tuples(*[st.sampled_from((0, 0, 0, 5))] * requests)),
        prefix_chunks=some(st.integers(0, 3)),
        embeddings=some(st.sampled_from(("none", "none", "given", "replaced"))),
        adapters=some(st.sampled_from(((), (), ("a",), ("b", "a"), ("c",)))),
        target_verify=some(st.booleans()),
        hidden_states=some(st.sampled_from(("none", "last", "all"))),
        logprobs=some(st.booleans()),
    )


def limits_of(at: Mapping[str, int]) -> Limits:
    return Limits(**{name: LOOSE_TO_STRICT[name][step] for name, step in at.items()})


@thorough
@given(batches(), bucket_lists, some_limits)
def test_an_admitted_batch_is_in_the_smallest_bucket_that_has_room_within_the_factor(
    batch: Batch, buckets: list[int], at: dict[str, int]
) -> None:
    limits = limits_of(at)
    found = admit(batch, buckets, limits)
    assert found == admit(batch, buckets, limits)
    assert found.rows == batch.rows
    assert (found.bucket is None) == (found.reason in get_args(Refusal)) and found.text
    if found.bucket is None:
        return
    assert found.reason == ""
    captured = limits.captured_rows

    def has_room(bucket: int) -> bool:
        room = bucket if captured is None else captured.get(bucket, -1)
        return bucket >= batch.rows and (
            captured is None or (batch.local_rows is not None and room >= batch.local_rows)
        )

    assert found.bucket == min(filter(has_room, buckets))
    factor = limits.max_padding_factor
    assert found.bucket == buckets[0] or factor == math.inf or found.bucket <= Fraction(str(factor)) * batch.rows


@thorough
@given(batches(), bucket_lists, some_limits)
def test_a_stricter_limit_never_turns_a_refusal_into_an_admission(
    batch: Batch, buckets: list[int], at: dict[str, int]
) -> None:
    loose = admit(batch, buckets, limits_of(at))
    for name, values in LOOSE_TO_STRICT.items():
        for step in range(at.get(name, DEFAULTS[name]) + 1, len(values)):
            strict = admit(batch, buckets, limits_of({**at, name: step})).bucket
            if name == "captured_rows" and None not in (strict, loose.bucket):
                assert strict >= loose.bucket, "a larger bucket may have the room"
            else:
                assert strict in (None, loose.bucket)


@thorough
@given(batches(), bucket_lists, some_limits)
def test_to_leave_a_field_out_never_turns_a_refusal_into_an_admission(
    batch: Batch, buckets: list[int], at: dict[str, int]
) -> None:
    limits = limits_of(at)
    known = admit(batch, buckets, limits)
    for name, _ in ASKS.values():
        assert admit(replace(batch, **{name: None}), buckets, limits).bucket in (None, known.bucket)


@pytest.mark.parametrize(
    ("limit", "step"), [(name, step) for name in ASKS for step in range(len(LOOSE_TO_STRICT[name]))]
)
def test_what_is_not_known_never_means_yes(limit: str, step: int) -> None:
    field, reason = ASKS[limit]
    found = admit(Batch(rows=16), LADDER, limits_of({limit: step}))
    if step == 0:
        assert found.replays
    else:
        assert (found.reason, found.replays) == (reason, False)
        assert field in found.text and "is not known" in found.text


def test_each_limit_and_each_field_of_a_batch_is_looked_at() -> None:
    """A new field that these tests do not know would go without them."""
    assert {f.name for f in fields(Limits) if f.init} == set(LOOSE_TO_STRICT)
    assert {f.name for f in fields(Batch)} == {"rows", "extra", *(field for field, _ in ASKS.values())}
    assert {reason for _, reason in ASKS.values()} | {"no_bucket", "few_rows", "too_long", "padding", "veto"} == set(
        get_args(Refusal)
    )
