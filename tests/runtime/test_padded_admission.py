"""What ``bcg.admission`` answers is what the call then does; and options of a ladder that cannot be."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.errors import AdmissionError
from bcg_compiler.runtime.program import Program


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


def last_bucket(pair: Any) -> int:
    """The bucket of the last replay, by the rows of what its tapes compute."""
    (place,) = pair.program._places._places.values()
    return max(key[1] for key, capture in place.captures.items() if capture.run is _run[-1])


_run: list[Any] = []


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes the ``run`` of each capture that is replayed."""
    real = Program._replay
    _run.clear()

    def note(self: Program, capture: Any, args: tuple[Any, ...]) -> Any:
        _run.append(capture.run)
        return real(self, capture, args)

    monkeypatch.setattr(Program, "_replay", note)
    return _run


limits = st.builds(
    bcg.Limits,
    max_requests=st.sampled_from([None, None, 1, 4]),
    prefixes=st.sampled_from([True, True, False]),
    target_verify=st.sampled_from([True, True, False]),
    logprobs=st.sampled_from([True, True, False]),
    hidden_states=st.sampled_from(["all", "all", "last", "none"]),
    adapters=st.sampled_from([None, None, frozenset({"a"})]),
    vetoes=st.sampled_from([(), (), (lambda batch: "odd" if batch.rows % 2 else None,)]),
)


def fields_of(draw: Any) -> dict[str, Any]:
    return draw(
        st.fixed_dictionaries(
            {},
            optional={
                "requests": st.integers(1, 6),
                "target_verify": st.booleans(),
                "logprobs": st.booleans(),
                "hidden_states": st.sampled_from(["none", "last", "all"]),
                "adapters": st.sampled_from([(), ("a",), ("b",)]),
            },
        )
    )


@pytest.mark.filterwarnings("ignore:The ladder")
@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_call_does_what_admission_answers(padded: Any, replayed: list[Any], data: st.DataObject) -> None:
    torch.compiler.reset()
    draw = data.draw
    first = draw(st.sampled_from([0, 4]))
    pair = padded(
        (lambda x: x * 2 + 1) if not first else (lambda x: (x * 2 + 1)[:4]),
        ladder=sorted(draw(st.sets(st.integers(2, 40), min_size=1, max_size=5))),
        max_padding_factor=draw(st.sampled_from([1, 1.15, 1.5, 2, 4, float("inf")])),
        bucket_multiple=draw(st.sampled_from([1, 1, 4])),
        limits=draw(limits),
    )
    pair(rows(6))
    if draw(st.booleans()) and pair.program.planned:
        bcg.capture(pair.compiled, progress=False)
    for n in draw(st.lists(st.integers(2, 45), min_size=4, max_size=8)):
        if first and n < 4:
            continue  # Dynamo compiles another graph for them
        fields = fields_of(draw) if draw(st.booleans()) else None
        answer = bcg.admission(pair.compiled, rows=n, **(fields or {}))
        before = dict(pair.stats.eager_runs)
        count = len(replayed)
        if fields is None:
            pair(rows(n))
        else:
            with bcg.forward_context(batch=bcg.Batch(rows=n, **fields)):
                pair(rows(n))
        ran = {code: number - before.get(code, 0) for code, number in pair.stats.eager_runs.items()}
        ran = {code: number for code, number in ran.items() if number}
        if answer.bucket is None:
            assert (ran, len(replayed)) == ({answer.reason: 1}, count)
        elif ran:
            assert ran == {"warm_up": 1}
        else:
            assert len(replayed) == count + 1 and last_bucket(pair) == answer.bucket
    assert pair.stats.captures <= len(pair.program.plan.padding.buckets)


def test_a_batch_of_other_rows_than_the_inputs_is_an_error(padded: Any) -> None:
    pair = padded(lambda x: x * 2 + 1)
    with bcg.forward_context(batch=bcg.Batch(rows=6)), pytest.raises(AdmissionError, match=r"6 rows.* have 5"):
        pair(rows(5))
    with bcg.forward_context(batch=bcg.Batch(rows=5)):
        pair(rows(5))


@pytest.mark.parametrize(("least", "marks"), [(2, {}), (4, {"min": 4, "max": 64})])
def test_lengths_that_dynamo_compiles_anew_are_not_admitted(padded: Any, least: int, marks: dict[str, int]) -> None:
    """A batch of one row was to replay in the first bucket, and the call went to a graph for one row."""
    pair = padded(lambda x: x * 2 + 1)
    pair.mark = lambda args: torch._dynamo.mark_dynamic(args[0], 0, **marks)
    pair(rows(5))
    answers = [bcg.admission(pair.compiled, rows=n) for n in range(5)]
    assert [answer.reason for answer in answers[:least]] == ["few_rows"] * least
    assert all(answer.bucket == 8 for answer in answers[least:])


def test_a_veto_is_asked_at_each_call_that_publishes_a_batch(padded: Any) -> None:
    asked: list[int] = []

    def veto(batch: bcg.Batch) -> str | None:
        asked.append(batch.extra.get("step", -1))
        return "not now" if batch.extra.get("step") == 2 else None

    pair = padded(lambda x: x * 2 + 1, limits=bcg.Limits(vetoes=(veto,)))
    pair(rows(5))
    for step in range(4):
        with bcg.forward_context(batch=bcg.Batch(rows=5, extra={"step": step})):
            pair(rows(5))
    assert asked == [-1, 0, 1, 2, 3] and pair.stats.eager_runs["veto"] == 1


# -- options ----------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unsorted": ({"ladder": [16, 8]}, ("'ladder'", "[16, 8]")),
    "twice": ({"ladder": [8, 8]}, ("'ladder'", "[8, 8]")),
    "empty": ({"ladder": []}, ("'ladder'", "[]")),
    "negative": ({"ladder": [-8, 8]}, ("'ladder'", "-8")),
    "nothing": ({"ladder": [0, 8]}, ("'ladder'", "0")),
    "too_large": ({"ladder": [8, 2**31]}, ("'ladder'", str(2**31), "int32")),
    "true": ({"ladder": [True, 8]}, ("'ladder'", "True")),
    "float": ({"ladder": [8.0]}, ("'ladder'", "8.0")),
    "number": ({"ladder": 8}, ("'ladder'", "8")),
    "word": ({"ladder": "8"}, ("'ladder'", "'8'")),
    "no_such_option": ({"laddder": [8]}, ("'laddder'", "'ladder'")),
    "dimension_without_number": ({"token_dim": "x"}, ("'token_dim'", "'x'", "a colon")),
    "dimension_true": ({"token_dim": True}, ("'token_dim'", "True")),
    "factor_below_one": ({"max_padding_factor": 0.5}, ("'max_padding_factor'", "0.5", "at least 1")),
    "factor_nan": ({"max_padding_factor": float("nan")}, ("'max_padding_factor'", "nan")),
    "multiple": ({"bucket_multiple": 0}, ("'bucket_multiple'", "0")),
    "limits": ({"limits": {"max_requests": 3}}, ("'limits'", "Limits")),
    "late": ({"on_late_capture": "never"}, ("'on_late_capture'", "'never'", "'eager'")),
    "outputs": ({"outputs": "view"}, ("'outputs'", "'view'", "'alias'")),
}


@pytest.mark.parametrize("name", BAD)
def test_an_option_that_cannot_be_is_told_with_what_was_seen(padded: Any, name: str) -> None:
    options, words = BAD[name]
    pair = padded(lambda x: x * 2 + 1, **options)
    with pytest.raises(Exception, match="OptionError") as seen:
        pair(rows(5))
    for word in words:
        assert word in str(seen.value), str(seen.value)


def test_several_open_sizes_are_named(padded: Any) -> None:
    pair = padded(lambda x, y: (x * 2, y * 2), open=[0, 0])
    """It was an error, which came in the middle of serving when Dynamo opened a second size."""
    for n in (5, 7, 5, 7):
        pair(rows(n), rows(n + 1))
    assert pair.plan.unpadded.code == "ambiguous_tokens"
    for word in ("dimension 0 of", "(x)", "(y)", "'token_dim': 'x:DIMENSION'"):
        assert word in pair.plan.unpadded.text


@pytest.mark.parametrize("token_dim", ["x:0", "y:0", "y:-2", 0])
def test_a_token_dimension_that_is_named_is_taken(padded: Any, token_dim: Any) -> None:
    pair = padded(lambda x, y: (x * 2, y * 2), open=[0, (0, 1)], token_dim=token_dim)
    made = (rows(5), torch.randn(6, 7))
    pair(*made)
    if token_dim == 0:  # of which there are two
        assert pair.plan.unpadded.code == "ambiguous_tokens"
        return
    ordinal, dim = pair.plan.padding.place
    assert (pair.plan.value(ordinal).argument, dim) == (token_dim[0], 0)


def test_a_token_dimension_that_is_not_there_leaves_calls_exact(padded: Any) -> None:
    """One beyond the last was counted from the first again: ``x:2`` was ``x:0``."""
    for token_dim in ("z:0", "x:1", 1, "x:2", "x:-4", 2):
        pair = padded(lambda x: x * 2 + 1, token_dim=token_dim)
        for n in (5, 7, 5):
            pair(rows(n))
        assert pair.plan.unpadded.code == "no_token_dim" and repr(token_dim) in pair.plan.unpadded.text
        assert "leaves open: dimension 0 of" in pair.plan.unpadded.text


def test_buckets_are_rounded_up_to_a_multiple(padded: Any) -> None:
    pair = padded(lambda x: x * 2 + 1, ladder=[5, 9, 30], bucket_multiple=8)
    with pytest.warns(match="multiple"):
        pair(rows(5))
    assert pair.plan.padding.buckets == (8, 16, 32)
    for n in (31, 9):
        pair(rows(n))


def test_a_tensor_of_the_module_with_as_many_rows_is_not_padded(padded: Any) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.ones(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + self.held[: x.shape[0]]

    module = Held()
    torch._dynamo.mark_dynamic(module.held, 0)
    pair = padded(module, token_dim="x:0")
    for n in (5, 7, 5):
        pair(rows(n))
