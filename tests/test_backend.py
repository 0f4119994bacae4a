"""The front end: what ``torch.compile(..., backend="bcg")`` promises before anything is captured."""

import copy
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.errors import ReleasedError
from bcg_compiler.plan import plan_text
from bcg_compiler.runtime import Program


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    bcg.reset()


def compile_bcg(fn: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="bcg", **given)


def test_the_backend_works_where_the_package_is_never_imported() -> None:
    code = (
        "import sys, torch\n"
        "assert not any(name.startswith('bcg_compiler') for name in sys.modules)\n"
        "with torch.no_grad():\n"
        "    print(torch.compile(lambda x: x.sin() + 1, backend='bcg')(torch.zeros(2)).tolist())\n"
        "assert 'bcg_compiler' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0]"


# -- shapes and arguments


@torch.no_grad()
def test_one_graph_serves_all_lengths_once_they_vary() -> None:
    compiled = compile_bcg(lambda x: (x.sin() + x.shape[0]).reshape(-1))
    for length in (3, 5, 9, 30, 2):
        x = torch.randn(length, 2)
        assert torch.equal(compiled(x), (x.sin() + length).reshape(-1))
    assert bcg.stats(compiled).graphs == 2  # the first length, then any


@torch.no_grad()
@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.arange(3) * 2 + 1,
        lambda: (torch.zeros(2, 0), torch.ones(())),
    ],
    ids=["no input", "empty results"],
)
def test_a_graph_may_have_no_tensor_input(fn: Callable[[], Any]) -> None:
    for got, want in zip(compile_bcg(fn)(), fn(), strict=True):
        assert torch.equal(got, want)


@torch.no_grad()
def test_a_graph_of_numbers_only_launches_nothing() -> None:
    def fn(x: Tensor, k: int) -> tuple[int, tuple[int, ...]]:
        return x.shape[0] * 2 + k, tuple(x.shape)

    compiled = compile_bcg(fn, dynamic=True)
    for n, k in ((3, 4), (5, 7), (0, 0)):
        assert compiled(torch.zeros(n, 2), k) == (2 * n + k, (n, 2))


@torch.no_grad()
def test_zero_sizes_scalars_keywords_and_nested_results() -> None:
    def fn(x: Tensor, *, scale: Tensor | None = None, more: dict[str, Any]) -> dict[str, Any]:
        y = x * 2 if scale is None else x * scale
        return {"sum": y.sum(), "parts": [y, (None, more["k"] + 1, "text", 3)]}

    compiled = compile_bcg(fn)
    for x in (torch.randn(0, 4), torch.randn(3, 0), torch.randn(()), torch.randn(3, 4)):
        for given in ({}, {"scale": torch.tensor(3.0)}):
            got, want = (f(x, more={"k": torch.ones(2)}, **given) for f in (compiled, fn))
            assert got["parts"][1][2:] == ("text", 3) and got["parts"][1][0] is None
            assert torch.equal(got["sum"], want["sum"]) and torch.equal(got["parts"][0], want["parts"][0])
            assert torch.equal(got["parts"][1][1], want["parts"][1][1])


@torch.no_grad()
def test_numbers_that_change_are_never_frozen() -> None:
    def fn(x: Tensor, k: int, s: float, on: bool, name: str) -> Tensor:
        x = x * k + s
        return -x if on else x + len(name)

    compiled = compile_bcg(fn)
    x = torch.randn(3)
    for given in ((1, 0.5, True, "a"), (2, 0.5, False, "bb"), (3, 1.5, False, "c"), (-4, float("inf"), True, "")):
        assert torch.equal(compiled(x, *given), fn(x, *given))
    assert set(bcg.stats(compiled).reasons) <= {"host_number", "small_segment"}  # nothing waits for the device


@torch.no_grad()
def test_where_dynamo_breaks_each_graph_is_a_program() -> None:
    def fn(x: Tensor) -> Tensor:
        x = x.sin() + 1
        torch._dynamo.graph_break()
        return x.cos() * 2

    compiled = compile_bcg(fn)
    x = torch.randn(3)
    assert torch.equal(compiled(x), (x.sin() + 1).cos() * 2)
    stats = bcg.stats(compiled)
    assert stats.graphs == 2 and stats.eager_runs == {"warm_up": 2}
    assert any("graph_break" in reason for reason in stats.dynamo_graph_breaks)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.cond(x.sum() > 0, lambda a: a.sin() + 1, lambda a: a.cos() - 1, (x,)),
        lambda x: torch.utils.checkpoint.checkpoint(lambda a: a.sin() * 2, x, use_reentrant=False) + 1,
        lambda x: torch.vmap(lambda row: row.sum() * row)(x) + 1,
        lambda x: torch.func.grad(lambda a: (a * a).sum())(x) + 1,
    ],
    ids=["cond", "checkpoint", "vmap", "grad"],
)
@torch.no_grad()
def test_a_node_that_is_a_higher_order_op(fn: Callable[[Tensor], Tensor]) -> None:
    compiled = compile_bcg(lambda x: fn(x.exp()) * 2)
    for x in (torch.randn(3, 3), torch.randn(3, 3) - 9):
        assert torch.equal(compiled(x), fn(x.exp()) * 2)


@torch.no_grad()
def test_only_ops_that_ask_the_host_are_control_flow() -> None:
    def cond(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)) * 2 + 1

    def wrapped(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda a: a.sin() * 2, x, use_reentrant=False) + 1

    assert _reasons(cond).get("control_flow") == 1
    assert _reasons(wrapped) == {}


def _reasons(fn: Callable[[Tensor], Any], **options: Any) -> dict[str, int]:
    compiled = compile_bcg(fn, options=options or None)
    compiled(torch.randn(3))
    return bcg.stats(compiled).reasons


# -- gradients


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).relu().sum()


def test_under_grad_mode_gradients_are_those_of_eager() -> None:
    model = Trained()
    eager = copy.deepcopy(model)
    compiled = compile_bcg(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.randn(5, 4)
            compiled(x).backward()
            eager(x).backward()
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None and torch.equal(got.grad, want.grad)
    assert torch.equal(model.norm.running_mean, eager.norm.running_mean)  # type: ignore[arg-type]
    assert len([w for w in said if "bcg: the model was called under grad mode" in str(w.message)]) == 1
    stats = bcg.stats(compiled)
    assert (stats.graphs, stats.segments, stats.eager_runs) == (1, 0, {"grad": 3})


def test_grad_mode_without_anything_that_requires_grad_splits_as_ever() -> None:
    compiled = compile_bcg(lambda x: x.sin() + 1)
    compiled(torch.randn(3))
    assert bcg.stats(compiled).segments == 1


def test_a_region_that_switches_grad_on_gives_gradients() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            return (x * w).sum()

    w = torch.randn(3, requires_grad=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = compile_bcg(fn)(torch.ones(3), w)
    loss.backward()
    assert w.grad is not None and torch.equal(w.grad, torch.ones(3))


# -- programs


@torch.no_grad()
def test_two_instances_of_one_class_share_programs_as_dynamo_does() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sin()

    first, second = Model(), Model()
    compiled = [compile_bcg(first), compile_bcg(second)]
    x = torch.randn(2, 3)
    for _ in range(2):
        for model, run in zip((first, second), compiled, strict=True):
            assert torch.equal(run(x), model(x))
    assert bcg.stats(compiled[0]) == bcg.stats(compiled[1])
    stats = bcg.stats(compiled[0])
    # One capture for each set of weights: the first call of a shape is the first instance's.
    assert (stats.eager_runs, stats.captures, stats.recaptures, stats.replays) == ({"warm_up": 1}, 2, 1, 3)


@torch.no_grad()
def test_stats_of_one_model_know_nothing_of_another() -> None:
    one, two = compile_bcg(lambda x: x.sin() + 1), compile_bcg(lambda x: (x.cos() + 1, x.nonzero()))
    one(torch.randn(3))
    two(torch.randn(3))
    assert bcg.stats(one).graphs == 1
    assert bcg.stats(one).reasons == {}
    assert bcg.stats().graphs == bcg.stats(one).graphs + bcg.stats(two).graphs


@torch.no_grad()
def test_a_graph_that_dynamo_asks_for_and_drops_leaves_no_trace() -> None:
    """With dynamic shapes Dynamo may trace again after the backend has answered; only what ran is counted."""
    calls = []

    def counting(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        calls.append(gm)
        return torch._dynamo.lookup_backend("bcg")(gm, inputs, **kwargs)

    compiled = torch.compile(lambda x, k: (x * k).sin() + k, backend=counting, dynamic=True)
    with bcg.counters.expect(graphs=1):
        compiled(torch.randn(3), 2.5)
    assert len(bcg.programs_of()) == 1
    assert len(calls) >= 1


@torch.no_grad()
def test_reset_frees_programs() -> None:
    compiled = compile_bcg(lambda x: x.sin() + 1)
    compiled(torch.randn(3))
    gone = weakref.ref(bcg.programs_of(compiled)[0])
    bcg.reset()
    assert gone() is None and bcg.stats().graphs == 0
    compiled(torch.randn(3))  # and it works afterwards
    assert bcg.stats(compiled).graphs == 1


@torch.no_grad()
def test_a_program_does_not_keep_a_model_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = compile_bcg(model)
    compiled(torch.randn(2, 3))
    assert bcg.stats(compiled).graphs == 1
    weight = weakref.ref(model[0].weight)
    del model, compiled
    assert weight() is None


@torch.no_grad()
def test_a_freed_program_says_so() -> None:
    compiled = compile_bcg(lambda x: x.sin() + 1)
    compiled(torch.randn(3))
    (program,) = bcg.programs_of(compiled)
    bcg.reset()
    with pytest.raises(ReleasedError, match=r"freed by bcg.reset\(\)"):
        program(torch.randn(3))


@torch.no_grad()
def test_an_exception_says_where_it_came_from() -> None:
    @bcg.eager_break(fake=lambda x: torch.empty_like(x))
    def strict(x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise ValueError("negative")
        return x * 2

    compiled = compile_bcg(lambda x: strict(x.exp() - 1).sin() + 1)
    good = torch.ones(3)
    want = compiled(good)
    for _ in range(2):
        with pytest.raises(ValueError, match="negative") as raised:
            compiled(-good)
        (note,) = raised.value.__notes__
        assert "break" in note and "strict" in note and "test_backend.py:" in note
        assert torch.equal(compiled(good), want)


@torch.no_grad()
def test_a_traceback_shows_the_generated_line() -> None:
    import traceback

    compiled = compile_bcg(lambda x, i: x.index_select(0, i) * 2, options={"capture": "off"})
    compiled(torch.ones(3), torch.tensor([0]))
    with pytest.raises(IndexError) as raised:
        compiled(torch.ones(3), torch.tensor([7]))
    shown = "".join(traceback.format_exception(raised.value))
    assert ".index_select(0, v" in shown


@pytest.mark.parametrize(
    ("compiler", "called"),
    [("eager", "v0.sin()"), (lambda module, fakes: module.forward, "unit_{key}(v0)")],
    ids=["operations", "compiled units"],
)
@torch.no_grad()
def test_the_source_of_a_program_is_what_runs(compiler: Any, called: str) -> None:
    compiled = compile_bcg(
        lambda x: (x.sin() + 1, x.nonzero(), x.cos() * 2 - 1), options={"segment_compiler": compiler}
    )
    compiled(torch.randn(3))
    (program,) = (
        p
        for p in bcg.programs_of(compiled)
        if isinstance(p, Program) and ".sin" in (node.op for node in p.plan.segments[0].nodes)
    )
    (unit,) = program.plan.segments[0].units
    assert "def program(" in program.source and "def segment_0(" in program.source
    assert called.format(key=unit.key) in program.source


@torch.no_grad()
def test_counters_expect_exactly() -> None:
    compiled = compile_bcg(lambda x: x.sin() + 1)
    with bcg.counters.expect(graphs=1, segments=1, breaks=0, captures=1, replays=1, eager_runs={"warm_up": 1}):
        compiled(torch.randn(3))
        compiled(torch.randn(3))
    said = r"graphs: expected 1, saw 0; replays: expected 2, saw 1"
    with pytest.raises(AssertionError, match=said), bcg.counters.expect(graphs=1, replays=2):
        compiled(torch.randn(3))
    with pytest.raises(TypeError, match="No such counter: graph"), bcg.counters.expect(graph=1):
        pass


@torch.no_grad()
def test_a_recompile_limit_is_told() -> None:
    """Past its limit Dynamo runs the function eagerly without telling a backend."""
    compiled = compile_bcg(lambda x, k: x.sin() + len(k), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        before = bcg.stats().recompile_limit_hits
        for n in range(4):
            compiled(torch.randn(3), "k" * n)
        assert bcg.stats(compiled).recompile_limit_hits > before


@torch.no_grad()
def test_a_plan_reads_like_the_program() -> None:
    def fn(x: Tensor) -> Tensor:
        x = (x.sin() + 1) * 2
        x = x[x.argsort()].nonzero().sum() + x
        return x.cos().exp().sin() * 2 + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = compile_bcg(fn)
        compiled(torch.randn(3))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None
    text = plan_text(program.plan)
    assert [line.split(":")[0].split(" unit")[0] for line in text.splitlines() if line.startswith("step")] == [
        "step 0 segment",
        "step 1 break",
        "step 2 segment",
    ]
    assert "dynamic_output" in text and "test_backend" not in text


# -- options that only the graph can judge


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capturable": ["aten::zz_no_such_op"]}, "names 'aten::zz_no_such_op', which is no operator"),
        ({"capture": "cuda"}, "'capture' is \"cuda\", but the graph computes on cpu"),
    ],
    ids=["unknown_op", "other_device"],
)
def test_an_option_that_does_not_fit_the_graph_is_an_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match="OptionError") as error, torch.no_grad():
        compile_bcg(lambda x: x.sin() + 1, options=options)(torch.ones(2))
    assert text in str(error.value)
