"""``PrefillRunner`` in one process: what is wanted of a batch is that of the uncompiled model, replayed or not."""

import dataclasses
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler import Limits, PrefillRunner, Wanted
from bcg_compiler.distributed.pipeline import PipelineProxy, ProxyForm
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.errors import LadderError, OptionError, PipelineError, RankError
from bcg_compiler.models import serving
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.runtime.capture import EmulatedCapture
from bcg_compiler.runtime.program import Program

SIZES = dict(pages=64, page_size=8)
LADDER = (8, 16, 64)
OPTIONS = {"capture": "emulated", "segment_compiler": "eager", "min_segment_kernels": 1}
FIELDS = {
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
}


class Pair:
    """A runner, and an uncompiled model with the same weights and a cache of its own."""

    def __init__(self, *, ladder: Any = LADDER, layers: int = 1, auxiliary: tuple[int, ...] = (), **how: Any) -> None:
        fields = {**FIELDS, "num_hidden_layers": layers}
        self.model: Any = serving.build(fields, **SIZES)
        self.alone: Any = serving.build(fields, **SIZES)
        self.model.model.auxiliary = auxiliary
        self.runner = serving.runner(self.model, ladder=ladder, **{"options": OPTIONS, **how})
        self.pool, self.unnamed = PagePool(**SIZES), dict[str, int]()
        self.report = self.runner.capture(self.pool.idle())

    def batch(self, *lengths: int, **requests: int) -> tuple[PrefillBatch, Tensor]:
        """New requests of these lengths, or named ones that go on; and ids."""
        if not requests:
            for request in self.unnamed:
                self.pool.free(request)
            self.unnamed = {str(i): length for i, length in enumerate(lengths)}
        named = requests or self.unnamed
        batch = self.pool.prefill(named) if named else self.pool.idle()
        return batch, torch.randint(0, 96, (batch.tokens,))

    @torch.inference_mode()
    def expected(self, batch: PrefillBatch, ids: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits, normed rows and the rows behind each layer."""
        rows: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda *a: rows.append(a[2])) for layer in self.alone.model.layers]
        with batch.published():
            hidden = self.alone.model(PipelineProxy(self.alone.model.embed_tokens(ids)), batch.positions).hidden_states
        for hook in hooks:
            hook.remove()
        return self.alone.lm_head(hidden), hidden, rows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    """For tests that leave it as it is, but for its cache."""
    return Pair(layers=3, auxiliary=(0, 2))


def close(found: Tensor | None, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def ends(batch: PrefillBatch) -> Tensor:
    return torch.tensor(batch.lengths, dtype=torch.int64).cumsum(0) - 1


@pytest.mark.parametrize("lengths", [(5,), (1,), (2,), (1, 1, 1), (7, 1, 30), (64,), (70, 3), (17,), ()])
@pytest.mark.parametrize("given", ["ids", "embeddings"])
def test_everything_wanted_is_that_of_the_uncompiled_model(pair: Pair, lengths: tuple[int, ...], given: str) -> None:
    batch, ids = pair.batch(*lengths)
    logits, hidden, layers = pair.expected(batch, ids)
    embeddings = pair.alone.model.embed_tokens(ids) if given == "embeddings" else None
    made = pair.runner(
        batch, ids, embeddings=embeddings, wanted=Wanted(logits="all", logprobs=True, hidden_states="all")
    )
    tokens = sum(lengths)
    assert made.admission.reason == (
        "few_rows" if not tokens else "too_long" if tokens > 64 else "padding" if tokens == 17 else ""
    )
    close(made.logits, logits)
    close(made.hidden_states, hidden)
    for found, wanted in zip(made.auxiliary, (layers[0], layers[2]), strict=True):
        close(found, wanted)
    assert made.logprobs is not None and len(made.logprobs) == len(lengths)
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0] if tokens else logits[:, 0]
    inner = torch.ones(max(tokens - 1, 0), dtype=torch.bool)
    inner[ends(batch)[:-1]] = False
    close(torch.cat([*made.logprobs, logits.new_empty(0)]), expected[inner])
    assert [len(one) for one in made.logprobs] == [length - 1 for length in lengths]
    few = pair.runner(batch, ids, wanted=Wanted(hidden_states="last"))
    close(few.logits, logits[ends(batch)])
    close(few.hidden_states, hidden[ends(batch)])
    nothing = pair.runner(batch, ids, wanted=Wanted(logits="none"))
    assert (nothing.logits, nothing.logprobs, nothing.hidden_states) == (None, None, None)


def test_requests_go_on_behind_their_prefix_replayed_and_eagerly(pair: Pair) -> None:
    for step in [dict(a=1), dict(a=30, b=2), dict(b=1), dict(a=1, b=14), dict(a=66, b=1), dict(b=9)]:
        batch, ids = pair.batch(**step)
        close(pair.runner(batch, ids, wanted=Wanted(logits="all")).logits, pair.expected(batch, ids)[0])
    pair.pool.free("a")


def test_results_stay_as_they_are_in_later_calls(pair: Pair) -> None:
    wanted = Wanted(logits="all", hidden_states="all")
    first = pair.runner(*pair.batch(8), wanted=wanted)
    held = [first.hidden_states, *first.auxiliary]
    copies = [rows.clone() for rows in held]
    pair.runner(*pair.batch(8), wanted=wanted)
    assert all(map(torch.equal, held, copies))


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True)
def running_sum(x: Tensor, out: Tensor) -> None:
    live = bcg.current_context().live_rows
    out[:live] = x[:live].cumsum(0)


class Toy(nn.Module):
    """A body that is quickly compiled, and the parts around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.embed, self.tail = nn.Embedding(96, 8), nn.Linear(8, 96)
        self.requires_grad_(False)

    def forward(self, proxy: PipelineProxy, positions: Tensor) -> PipelineProxy:
        x = self.layers[0](proxy.hidden_states) + positions[:, None]
        out = torch.empty_like(x)
        running_sum(x, out)
        return PipelineProxy(self.layers[1](out))

    def wanted(self, batch: PrefillBatch, ids: Tensor) -> Tensor:
        with bcg.forward_context(live_rows=batch.tokens):
            return self.tail(self(PipelineProxy(self.embed(ids)), batch.positions).hidden_states)


class ToyRunner:
    def __init__(self, toy: Toy | None = None, **how: Any) -> None:
        self.toy, self.pool = Toy() if toy is None else toy, PagePool(**SIZES)
        parts = dict(embed=self.toy.embed, tail=self.toy.tail, ladder=LADDER, options=OPTIONS)
        self.runner = PrefillRunner(self.toy, **{**parts, **how})
        self.report = self.runner.capture(self.pool.idle())

    def check(
        self,
        bucket: int | None,
        reason: str = "",
        asked: Wanted | None = None,
        embeddings: bool = False,
        **requests: int,
    ) -> None:
        """A batch of these requests is admitted so, and has the right logits."""
        batch = self.pool.prefill(requests)
        ids = torch.randint(0, 96, (batch.tokens,))
        rows = self.toy.embed(ids) if embeddings else None
        foreseen = self.runner.admit(self.runner.record(batch, asked, rows))
        made = self.runner(batch, ids, embeddings=rows, wanted=asked)
        assert (made.admission.bucket, made.admission.reason) == (bucket, reason)
        assert foreseen == made.admission or reason == "capture_failed"
        close(made.logits, self.toy.wanted(batch, ids)[ends(batch)])
        for request in requests:
            self.pool.free(request)


@pytest.mark.parametrize(
    ("limits", "asked", "reason"),
    [
        (Limits(max_requests=1), Wanted(), "requests"),
        (Limits(prefixes=False), Wanted(), "prefix"),
        (Limits(hidden_states="last"), Wanted(hidden_states="all"), "hidden_states"),
        (Limits(embeddings=frozenset({"none"})), Wanted(), "embeddings"),
        (Limits(logprobs=False), Wanted(logprobs=True), "logprobs"),
        (Limits(vetoes=(lambda batch: "no" if batch.rows == 6 else None,)), Wanted(), "veto"),
    ],
)
def test_limits_refuse_and_the_batch_runs_eagerly(limits: Limits, asked: Wanted, reason: str) -> None:
    one = ToyRunner(limits=limits)
    one.check(8, a=4)
    if reason == "prefix":
        one.pool.prefill({"a": 4})
    one.check(None, reason, asked, embeddings=reason == "embeddings", a=3, b=3)


def test_without_a_tail_logits_are_refused_before_anything_runs_and_hidden_states_are_not() -> None:
    one = ToyRunner(tail=None)
    batch, ids = one.pool.prefill({"a": 5}), torch.arange(5)
    ran = mock.Mock()
    one.runner._program, program = ran, one.runner._program
    for asked in (Wanted(), Wanted(logits="none", logprobs=True)):
        with pytest.raises(RankError, match="without tail="):
            one.runner(batch, ids, wanted=asked)
    assert not ran.called
    one.runner._program = program
    assert one.runner.admit(one.runner.record(batch, Wanted(logprobs=True))).reason == "logprobs"
    made = one.runner(batch, ids, wanted=Wanted(logits="none", hidden_states="all"))
    assert made.admission.replays and made.hidden_states is not None
    close(one.toy.tail(made.hidden_states), one.toy.wanted(batch, ids))


def test_a_ladder_with_a_bucket_of_one_token() -> None:
    one = ToyRunner(ladder=(1, 4))
    assert one.runner.buckets == (4,)
    one.check(4, a=1)
    with pytest.raises(LadderError, match="no bucket of 2 tokens or more"):
        ToyRunner(ladder=(1,))


def test_an_idle_batch_replays_where_no_row_is_enough() -> None:
    pair = Pair(limits=Limits(least=0))
    made = pair.runner(*pair.batch(), wanted=Wanted(logits="all", hidden_states="all"))
    assert made.admission.bucket == 8 and made.logits is not None and made.logits.shape == (0, 96)
    assert not any(buffer.any() for name, buffer in pair.model.named_buffers() if name.endswith("_cache"))


class Alone:
    """Gathers rows of one rank: the others hold none."""

    rank, size = 0, 2

    def all_gather(self, rows: Tensor, longest: int) -> Tensor:
        raise AssertionError("nothing is gathered when a ladder is checked")


def cp_ranks(**rules: Any) -> Ranks:
    from bcg_compiler.distributed import Zigzag

    return Ranks(Parallel(cp=2, **rules), layout=Zigzag(2), gather=Alone())


def test_a_ladder_below_two_tokens_a_part_is_refused() -> None:
    with pytest.raises(LadderError, match="raise its ceiling to at least 4"):
        serving.runner(serving.build(FIELDS, **SIZES), ladder=(2, 3), ranks=cp_ranks(attention_does_cp=True))
    runner = serving.runner(serving.build(FIELDS, **SIZES), ladder=(2, 4, 16), ranks=cp_ranks(attention_does_cp=True))
    assert runner.rows == {4: 4, 16: 8}


@bcg.eager_break(mutates_args=("out",), reads_live_rows=True, bucket_multiple=8)
def in_eights(x: Tensor, out: Tensor) -> None:
    out.copy_(2 * x)


class Eights(nn.Module):
    """A body with a break that takes multiples of eight rows."""

    def forward(self, proxy: PipelineProxy, positions: Tensor) -> PipelineProxy:
        out = torch.empty_like(proxy.hidden_states)
        in_eights(proxy.hidden_states + 1, out)
        return PipelineProxy(out * positions[:, None])


def test_a_ladder_that_breaks_do_not_take_is_refused_and_a_multiple_is_taken() -> None:
    pool, embed = PagePool(**SIZES), nn.Embedding(10, 4).requires_grad_(False)
    with warnings.catch_warnings(), pytest.raises(LadderError, match=r"no bucket of 12 rows, but \[8, 16\]"):
        warnings.simplefilter("ignore")
        PrefillRunner(Eights(), ladder=(8, 12), embed=embed, options=OPTIONS).capture(pool.idle())
    runner = PrefillRunner(Eights(), ladder=(8, 16), embed=embed, options=OPTIONS)
    runner.capture(pool.idle())
    ids = torch.arange(9)
    made = runner(pool.prefill({"a": 9}), ids, wanted=Wanted(logits="none", hidden_states="all"))
    assert made.admission.bucket == 16
    close(made.hidden_states, 2 * (embed(ids) + 1) * ids[:, None])


class Mixing(nn.Module):
    """Each row depends on all."""

    def forward(self, proxy: PipelineProxy, positions: Tensor) -> PipelineProxy:
        return PipelineProxy(proxy.hidden_states.flip(0))


def test_a_body_that_mixes_rows_is_refused_with_the_reason() -> None:
    runner = PrefillRunner(Mixing(), ladder=(8,), embed=nn.Embedding(10, 4), options=OPTIONS)
    with pytest.raises(LadderError, match=r"cannot be padded: .*flip"):
        runner.capture(PagePool(**SIZES).idle())
    with pytest.raises(RankError, match="call capture"):
        runner(PagePool(**SIZES).prefill({"a": 1}), torch.zeros(1, dtype=torch.int64))


def test_a_broken_rule_makes_everything_eager_and_says_which() -> None:
    one = ToyRunner(ranks=Ranks(Parallel(two_batch_overlap=True)))
    assert one.report.rungs == ()
    one.check(None, "two_batch_overlap", a=5, b=3)
    assert "a graph would freeze it" in one.runner.admit(bcg.Batch(rows=8)).text


def test_with_capture_off_everything_is_eager_for_that_reason() -> None:
    ToyRunner(options={**OPTIONS, "capture": "off"}).check(None, "capture_off", a=5, b=3)


def failing(rows: int, error: Exception, when: int = 1) -> Any:
    """Captures of a bucket fail from the one with that number on."""
    real, seen = Program._record, []

    def record(self: Any, device: Any, args: Any, forms: Any, bucket: Any) -> Any:
        if bucket.rows == rows:
            seen.append(bucket)
            if len(seen) >= when:
                raise error
        return real(self, device, args, forms, bucket)

    return mock.patch.object(Program, "_record", record)


@pytest.mark.parametrize("lost", [8, 16, 64])
def test_a_bucket_that_cannot_be_captured_is_dropped_and_others_do_its_work(lost: int) -> None:
    with failing(lost, torch.OutOfMemoryError("no room for it")):
        one = ToyRunner()
    assert [(rung.rows, rung.error) for rung in one.report.dropped] == [(lost, "no room for it")]
    assert one.runner.failed == {lost}
    one.check({8: 16}.get(lost, 8), a=5)  # the first one that is left is exempt from the padding factor
    one.check(*{8: (16,), 16: (None, "padding"), 64: (16,)}[lost], b=12)
    one.check(*(64,) if lost != 64 else (None, "too_long"), c=40)


@torch.library.custom_op("bcg_tests_prefill::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    if recording:
        raise RuntimeError("not in a capture")
    return x + 1


@odd.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


recording: list[bool] = []


class Odd(Toy):
    """With an operation that turns out not to be capturable when it is captured."""

    def forward(self, proxy: PipelineProxy, positions: Tensor) -> PipelineProxy:
        return super().forward(PipelineProxy(odd(proxy.hidden_states * 2) * 2), positions)


def test_an_operation_that_fails_at_capture_becomes_a_break_and_all_buckets_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = EmulatedCapture.capture

    def capture(self: Any, segment: Any, args: Any) -> Any:
        recording.append(True)
        try:
            return real(self, segment, args)
        finally:
            recording.pop()

    monkeypatch.setattr(EmulatedCapture, "capture", capture)
    one = ToyRunner(
        toy=Odd(), options={**OPTIONS, "capturable": ["bcg_tests_prefill::odd"], "assume_rows_independent": True}
    )
    assert [rung.rows for rung in one.report.rungs] == [64, 16, 8] and not one.report.dropped
    assert bcg.stats(one.runner._program).reasons["capture_failed"] == 1
    one.check(16, a=12)
    one.check(8, a=1)


def move_weights(one: ToyRunner) -> list[Tensor]:
    """Other memory for the weights of the layers. What they lay in holds nonsense, and whoever keeps it keeps it so."""
    old = []
    for parameter in one.toy.layers.parameters():
        old.append(parameter.data)
        parameter.data = parameter.data.clone()
        old[-1].fill_(float("nan"))
    return old


def test_weights_that_moved_are_captured_again() -> None:
    one = ToyRunner()
    one.check(8, a=5)
    _old = move_weights(one)
    one.check(8, a=5)


def test_a_late_capture_that_fails_runs_eagerly_and_its_bucket_is_dropped() -> None:
    one = ToyRunner()
    _old = move_weights(one)
    with failing(8, torch.OutOfMemoryError("no room for it")):
        one.check(None, "capture_failed", a=5)
    one.check(16, a=5)


def test_capture_again_begins_anew() -> None:
    with failing(8, torch.OutOfMemoryError("no room for it")):
        one = ToyRunner()
    assert not one.runner.capture(one.pool.idle()).dropped
    one.check(8, a=5)
    one.runner.close()
    with pytest.raises(RankError, match="call capture"):
        one.check(8, a=5)


def test_bad_input_is_an_error_before_anything_is_written(pair: Pair) -> None:
    batch, ids = pair.batch(6)
    caches = [b.clone() for b in pair.model.buffers()]
    rows = pair.alone.model.embed_tokens(ids)
    run = pair.runner
    for call, says in [
        (lambda: run(batch, ids[:5]), "batch has 6 tokens, and ids has 5 rows"),
        (lambda: run(batch, embeddings=rows[:5]), "batch has 6 tokens, and embeddings has 5 rows"),
        (lambda: run(batch), "needs ids, or embeddings"),
        (lambda: run(batch, embeddings=rows, wanted=Wanted(logprobs=True)), "give ids"),
        (lambda: run(dataclasses.replace(batch, lengths=(4,)), ids[:4]), "add up to 4, .* 6 positions"),
        (lambda: run(dataclasses.replace(batch, prefixes=()), ids), "0 prefixes"),
        (lambda: Wanted(logits="some"), "logits is 'some'"),  # type: ignore[arg-type]
        (lambda: pair.runner.capture(batch), "no request, and this one has 6 tokens"),
    ]:
        with pytest.raises(RankError, match=says):
            call()
    with pytest.raises(RankError, match=r"embeddings are torch\.float64.*takes torch\.float32 rows of \[32\]"):
        run(batch, embeddings=rows.double())
    with pytest.raises(RankError, match=r"embeddings are torch\.float32\[6, 8\]"):
        run(batch, embeddings=rows[:, :8])
    assert all(map(torch.equal, pair.model.buffers(), caches))
    assert run(batch, ids).admission.replays


def test_what_a_stage_must_have_at_its_ends() -> None:
    form = ProxyForm("stages 0 and 1 of 2", 32, torch.float32)
    first, second = Ranks(Parallel(pp=2)), Ranks(Parallel(pp=2), stage=1)
    body, embed = Eights(), nn.Embedding(10, 32)
    for given, says in [
        (dict(ranks=first, gives=form), "Stage 0 of 2 begins with ids: give embed="),
        (dict(ranks=first, embed=embed), "Stage 0 of 2 has stage 1 there, and is not given gives="),
        (dict(ranks=first, embed=embed, gives=form, takes=form), "Stage 0 of 2 has no stage there, .* takes="),
        (dict(ranks=second), "Stage 1 of 2 has stage 0 there, and is not given takes="),
        (dict(ranks=second, takes=form, gives=form), "Stage 1 of 2 has no stage there, and is given gives="),
        (dict(embed=embed, takes=form), "Stage 0 of 1 has no stage there"),
    ]:
        with pytest.raises(PipelineError, match=says):
            PrefillRunner(body, ladder=LADDER, **given)  # type: ignore[arg-type]
    for name, instead in [("ladder", "ladder"), ("limits", "limits"), ("max_padding_factor", "limits")]:
        with pytest.raises(OptionError, match=f"'{name}' is the runner's to decide: give it {instead}="):
            PrefillRunner(body, ladder=LADDER, embed=embed, options={name: 4})


def test_weights_in_place_of_those_that_were_captured_are_an_error_until_the_next_capture() -> None:
    """Embedding and tail took the new ones, and the body the old ones: silently, results of neither model."""
    pair = Pair()
    other: Any = serving.build(FIELDS, **SIZES, seed=7)
    pair.model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    pair.alone.load_state_dict(pair.model.state_dict())
    batch, ids = pair.batch(9)
    with pytest.raises(
        RankError, match=r"embed_tokens\.weight of the body is another object .* call capture\(\) again"
    ):
        pair.runner(batch, ids)
    pair.runner.capture(pair.pool.idle())
    close(pair.runner(batch, ids, wanted=Wanted(logits="all")).logits, pair.expected(batch, ids)[0])


def test_embeddings_of_any_strides_are_taken() -> None:
    pair = Pair()
    batch, ids = pair.batch(9)
    embeddings = pair.model.model.embed_tokens(ids).detach()
    found = pair.runner(batch, None, embeddings=embeddings.t().contiguous().t(), wanted=Wanted(logits="all"))
    close(found.logits, pair.expected(batch, ids)[0])
