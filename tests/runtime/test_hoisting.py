"""Plans of breaks: once a call, before the first segment; what they are for is captured."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.debug.hoisted import about_hoisted
from bcg_compiler.errors import BreakArgumentError
from bcg_compiler.plan import plan_text

LAYERS = 3
WIDTH = 4

#: What each run of a plan was told: rows of the bucket, whether it is for a capture.
_planned: list[tuple[int, bool]] = []


class Wrapper:
    """Attention with a plan, as FlashInfer's wrappers are: the first plan fixes how many rows there can be.

    ``run`` gives each row the mean of its request up to it. It reads a buffer that ``plan`` writes, and nothing else.
    """

    def __init__(self) -> None:
        self.most = 0
        self.starts = torch.empty(0, dtype=torch.long)

    def plan(self, lengths: list[int], rows: int) -> None:
        if not self.most:
            self.most = rows
            self.starts = torch.zeros(rows, dtype=torch.long)
        if rows > self.most:
            raise ValueError(f"the total number of rows, {rows}, cannot exceed {self.most}")
        counts = torch.tensor(lengths)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        self.starts.copy_(torch.arange(self.most))  # a padded row sees itself
        self.starts[: len(starts)] = starts

    def run(self, x: Tensor, out: Tensor) -> None:
        rows = torch.arange(x.shape[0])
        seen = (rows[None] <= rows[:, None]) & (rows[None] >= self.starts[: x.shape[0], None])
        torch.matmul(seen / seen.sum(-1, keepdim=True), x, out=out)


class Wrappers:
    """One for each number of rows that is captured; one that is made anew for each other call."""

    def __init__(self) -> None:
        self.captured: dict[int, Wrapper] = {}
        self.other = Wrapper()

    def plan(self) -> None:
        context = bcg.current_context()
        rows = context.bucket_rows or sum(context.lengths)  # without a ladder: as many as there are
        _planned.append((rows, context.capturing))
        if context.capturing:
            self.captured.setdefault(rows, Wrapper()).plan([rows], rows)
        elif rows in self.captured:
            self.captured[rows].plan(context.lengths, rows)
        else:
            self.other = Wrapper()
            self.other.plan(context.lengths, rows)

    def run(self, x: Tensor, out: Tensor) -> None:
        self.captured.get(x.shape[0], self.other).run(x, out)


wrappers = Wrappers()


@pytest.fixture(autouse=True)
def _nothing_planned() -> None:
    _planned.clear()
    wrappers.__init__()  # type: ignore[misc]


def plan_attention() -> None:
    wrappers.plan()


declared: dict[str, Any] = {"mutates_args": ("out",), "reads_live_rows": True, "writes_every_row": True}


@bcg.eager_break(plan=plan_attention, **declared)
def attend(x: Tensor, out: Tensor) -> None:
    wrappers.run(x, out)


class Model(nn.Module):
    """Linear layers with attention between: ``attend`` by default."""

    def __init__(self, attention: Any = attend) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            out = torch.empty_like(h)
            self.attention(h, out)
            x = x + out.sin()
        return x * 2


class Compiled:
    """A model compiled for the emulated device. A call is compared with uncompiled code; gives the rows of the plans
    that it ran, but for those of captures.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.model = Model() if model is None else model
        given = {"capture": "emulated", "ladder": [8, 16, 32], "min_segment_kernels": 1, **options}
        self.compiled = torch.compile(self.model, backend="bcg", fullgraph=True, options=given)

    def __call__(self, *lengths: int) -> list[int]:
        x, rows = torch.randn(sum(lengths), WIDTH), sum(lengths)
        held = dict(wrappers.__dict__)
        wrappers.__init__()  # type: ignore[misc]
        with bcg.forward_context(lengths=list(lengths), live_rows=rows):
            want = self.model(x)
        wrappers.__dict__.update(held)
        before = len(_planned)
        torch._dynamo.mark_dynamic(x, 0)
        with bcg.forward_context(lengths=list(lengths), batch=bcg.Batch(rows=rows, requests=len(lengths))):
            got = self.compiled(x)
        # Another number of rows may mean another kernel, which sums in another order: on some CPUs too.
        if not torch.equal(got, want):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=f"batch {lengths}")
        return [rows for rows, capturing in _planned[before:] if not capturing]

    @property
    def plan(self) -> bcg.Plan:
        (program,) = bcg.programs_of(self.compiled)
        assert program.plan is not None
        return program.plan

    @property
    def stats(self) -> Any:
        return bcg.stats(self.compiled)


BATCHES = [(5, 2), (3,), (1, 1, 4, 2), (9, 2, 3), (8,), (20, 11), (2, 3), (13,), (30, 2), (5, 2)]


def bucket(rows: int) -> int:
    return next(size for size in (8, 16, 32) if rows <= size)


@pytest.mark.usefixtures("poisoned")
def test_no_break_is_left_and_each_call_plans_once_for_all_layers() -> None:
    model = Compiled()
    assert model(4, 3) == [7]
    for batch in BATCHES:
        assert model(*batch) == [bucket(sum(batch))]
    assert (len(model.plan.segments), len(model.plan.breaks)) == (1, 0)
    assert (model.stats.replays, model.stats.eager_runs) == (len(BATCHES), {"warm_up": 1})


@pytest.mark.usefixtures("poisoned")
def test_without_the_pass_each_layer_is_a_break_and_the_plan_still_runs_once() -> None:
    model = Compiled(disable_passes=["hoist_plans"])
    assert model(4, 3) == [7]
    for batch in BATCHES:
        assert model(*batch) == [bucket(sum(batch))]
    assert (len(model.plan.breaks), model.stats.reasons, model.plan.hoisted) == (LAYERS, {"eager_break": LAYERS}, ())


def test_a_capture_is_planned_for_all_rows_of_its_bucket() -> None:
    """The first plan of a wrapper fixes how many rows it can have."""
    model = Compiled()
    for batch in [(5, 2), (3, 3), (9, 2), (16,)]:
        model(*batch)
    assert [p for p in _planned if p[1]] == [(8, True), (16, True)]
    assert {rows: wrapper.most for rows, wrapper in wrappers.captured.items()} == {8: 8, 16: 16}


def test_buckets_captured_ahead_are_planned_without_a_batch() -> None:
    model = Compiled()
    model(5, 2)
    assert not bcg.capture(model.compiled, progress=False).dropped
    assert _planned[-3:] == [(32, True), (16, True), (8, True)]
    for batch in BATCHES:
        assert model(*batch) == [bucket(sum(batch))]
    assert model.stats.captures == 4  # that of the first call, and three ahead


@pytest.mark.parametrize("capture", ["off", "emulated"])
def test_calls_that_run_eagerly_plan_once(capture: str) -> None:
    model = Compiled(capture=capture)
    for batch in [(5, 2), (40,), (20, 20), (33,)]:
        assert model(*batch) == [sum(batch)]


def test_without_a_ladder_exact_shapes_are_planned_and_captured() -> None:
    model = Compiled(ladder=None)
    for batch in [(3, 3), (2, 4), (6,), (4, 5), (1, 5), (9,), (2, 2, 5)]:
        assert model(*batch) == [sum(batch)]
    assert (len(model.plan.breaks), model.stats.captures) == (0, 2)


def test_more_requests_than_a_plan_has_room_for_run_eagerly() -> None:
    model = Compiled(limits=bcg.Limits(max_requests=2))
    model(5, 2)
    assert model(3, 3) == [8]
    assert model(1, 2, 3) == [6]
    assert model.stats.eager_runs == {"warm_up": 1, "requests": 1}
    assert model.plan.broken_rules == ()


def test_a_plan_without_a_limit_on_requests_is_noted() -> None:
    model = Compiled()
    model(5, 2)
    assert [rule.code for rule in model.plan.broken_rules] == ["plan_requests"]


def test_the_plan_lists_what_is_hoisted_and_where_it_is_used() -> None:
    model = Compiled()
    model(5, 2)
    (hoisted,) = model.plan.hoisted
    assert (hoisted.name, hoisted.constants, hoisted.eager) == (f"{__name__}.plan_attention", "", ())
    assert [node.op for node in hoisted.nodes] == [f"{__name__}.attend"] * LAYERS
    assert all(n.source is not None and n.source.code.strip() == "self.attention(h, out)" for n in hoisted.nodes)
    assert f"first {__name__}.plan_attention() for {LAYERS} ops" in plan_text(model.plan)
    (said,) = about_hoisted(model.plan)
    assert said.startswith(f"first: {__name__}.plan_attention(), for {LAYERS} operations (")
    assert said.endswith(f":{hoisted.nodes[0].source.line})")  # type: ignore[union-attr]
    (program,) = bcg.programs_of(model.compiled)
    assert isinstance(program, bcg.runtime.Program)
    (replay,) = program.replay_sources
    assert replay.count("plan_attention()") == 1
    assert replay.index("plan_attention()") < replay.index("replay_0()")


# -- what is shared

_windows: list[Any] = []


def plan_window(window: int) -> None:
    _windows.append(window)
    wrappers.plan()


@bcg.eager_break(plan=plan_window, **declared)
def attend_window(x: Tensor, out: Tensor, window: int = 7) -> None:
    wrappers.run(x, out)


class Windows(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer, window in zip(self.layers, (7, 3, 7), strict=True):
            h = layer(x)
            out = torch.empty_like(h)
            if window == 7:
                attend_window(h, out)
            else:
                attend_window(h, out, window=window)
            x = x + out
        return x


def test_other_constants_are_another_plan_and_equal_ones_the_same() -> None:
    model = Compiled(Windows())
    model(5, 2)
    for batch in BATCHES[:4]:
        _windows.clear()
        model(*batch)
        assert _windows[-2:] == [7, 3]
    assert [(p.constants, len(p.nodes)) for p in model.plan.hoisted] == [("window=7", 2), ("window=3", 1)]


class Layer(nn.Module):
    """Attention as a method; its plan is one for each instance."""

    def plan(self: Any) -> None:
        _windows.append(self)
        wrappers.plan()

    @bcg.eager_break(plan=plan, **declared)
    def forward(self, x: Tensor, out: Tensor) -> None:
        wrappers.run(x, out)


class Methods(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer, index in zip(self.layers, (0, 1, 0), strict=True):
            h = layer(x)
            out = torch.empty_like(h)
            self.attentions[index](h, out)
            x = x + out
        return x


def test_a_plan_that_takes_the_instance_runs_once_for_each() -> None:
    model = Compiled(Methods())
    model(5, 2)
    for batch in BATCHES[:4]:
        _windows.clear()
        model(*batch)
        assert _windows[-2:] == list(model.model.attentions)
    assert [len(p.nodes) for p in model.plan.hoisted] == [2, 1]
    assert len(model.plan.breaks) == 0


# -- what stays a break


@bcg.eager_break(plan=plan_attention, **declared)
def attend_and_wait(x: Tensor, out: Tensor) -> None:
    if x.sum().item() < 1e9:
        wrappers.run(x, out)


@bcg.eager_break(plan=plan_attention, **declared)
def attend_by_context(x: Tensor, out: Tensor) -> None:
    out.copy_(x * sum(bcg.current_context().lengths))


@bcg.eager_break(plan=plan_attention, **declared)
def attend_if_in_context(x: Tensor, out: Tensor) -> None:
    out.copy_(x * ("lengths" in bcg.current_context()))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("attention", [attend_and_wait, attend_by_context, attend_if_in_context])
def test_a_body_that_cannot_be_captured_stays_a_break_and_its_plan_is_hoisted(attention: Any) -> None:
    model = Compiled(Model(attention))
    assert [model(5, 2), model(5, 2)] == [[7], [7]]  # what was found at the first capture gives a new plan
    for batch in BATCHES:
        assert model(*batch) == [bucket(sum(batch))]
    assert model.stats.reasons == {"capture_failed": LAYERS}
    assert len(model.plan.breaks) == LAYERS
    (hoisted,) = model.plan.hoisted
    assert hoisted.eager == tuple(node.ordinal for node in hoisted.nodes)
    assert [line.endswith("; 3 breaks left") for line in about_hoisted(model.plan)] == [True]


def plan_of_tensor(x: Tensor) -> None:
    wrappers.plan()


@bcg.eager_break(plan=plan_of_tensor, **declared)
def attend_by_tensor(x: Tensor, out: Tensor) -> None:
    wrappers.run(x, out)


def test_a_plan_of_a_tensor_stays_with_its_break() -> None:
    model = Compiled(Model(attend_by_tensor))
    assert model(5, 2) == [7] * LAYERS
    assert model(5, 1) == [8] * LAYERS
    assert (model.stats.reasons, model.plan.hoisted) == ({"plan_argument": LAYERS}, ())
    (told, *_) = [step.reasons[0].text for step in model.plan.breaks]
    assert told == f"its plan {__name__}.plan_of_tensor takes 'x', which is a tensor or a number of the graph"


@bcg.eager_break(plan=plan_attention, mutates_args=("out",), reads_live_rows=True)
def attend_live_rows(x: Tensor, out: Tensor) -> None:
    wrappers.run(x, out)


def test_a_body_that_may_leave_padded_rows_is_captured_only_without_a_ladder() -> None:
    model = Compiled(Model(attend_live_rows))
    assert [model(*batch) for batch in ((5, 2), (3, 2))] == [[7], [8]]
    assert (model.stats.reasons, len(model.plan.hoisted)) == ({"plan_padded_rows": LAYERS}, 1)
    bcg.reset()
    exact = Compiled(Model(attend_live_rows), ladder=None)
    assert [exact(*batch) for batch in ((5, 2), (3, 4))] == [[7], [7]]
    assert exact.stats.reasons == {}


def test_a_rule_of_the_user_keeps_it_a_break() -> None:
    model = Compiled(breaks=[lambda facts: facts.op.endswith("attend")])
    assert [model(*batch) for batch in ((5, 2), (3, 2))] == [[7], [8]]
    assert model.stats.reasons == {"user_rule": LAYERS}


# -- errors


def plan_that_fails() -> None:
    if bcg.current_context().capturing or "broken" in bcg.current_context():
        raise RuntimeError("no plan")
    wrappers.plan()


@bcg.eager_break(plan=plan_that_fails, **declared)
def attend_or_fail(x: Tensor, out: Tensor) -> None:
    wrappers.run(x, out)


def test_an_error_of_a_plan_reaches_the_caller_with_its_name() -> None:
    compiled = torch.compile(Model(attend_or_fail), backend="bcg", options={"capture": "emulated"})
    x = torch.randn(6, WIDTH)
    with bcg.forward_context(lengths=[6]):
        compiled(x)
        with pytest.raises(RuntimeError, match="no plan") as raised:
            compiled(x)
    assert any("plan_that_fails" in note for note in raised.value.__notes__)
    with bcg.forward_context(lengths=[6], broken=True), pytest.raises(RuntimeError, match="no plan"):
        compiled(x)


def test_a_plan_takes_parameters_of_its_break_only() -> None:
    with pytest.raises(BreakArgumentError, match=r"takes 'windw', which is no parameter.*Did you mean 'window'"):

        @bcg.eager_break(plan=lambda windw: None)
        def body(x: Tensor, window: int) -> None: ...

    with pytest.raises(BreakArgumentError, match="must be a function"):
        bcg.eager_break(plan=3)(attend_live_rows.__wrapped__)  # type: ignore[call-overload, attr-defined]


def test_layers_around_captured_bodies_are_compiled_once() -> None:
    """A body is seen by no compiler; what is around it is, and equal parts are one."""
    seen: list[Any] = []

    def compiler(graph: Any, fakes: Any) -> Any:
        seen.append(graph)
        return graph.forward

    model = Compiled(segment_compiler=compiler)
    model(5, 2)
    for batch in BATCHES[:4]:
        model(*batch)
    assert len(model.plan.breaks) == 0
    assert model.stats.eager_units == {"unit_opaque": 1}  # one body, called in each layer
    assert len(seen) <= 4  # at any depth
