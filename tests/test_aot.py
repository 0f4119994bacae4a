"""``bcg.aot_compile``: what eager gives, at each call, without guards; what was not compiled for is refused."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._pytree import register_pytree_node, tree_leaves

import bcg_compiler as bcg
import bcg_compiler.aot
import bcg_compiler.backend
from bcg_compiler.errors import AotError, OptionError
from bcg_compiler.runtime import programs_of

OPTIONS = {"capture": "emulated", "min_segment_kernels": 1}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    bcg.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    bcg.reset()


def aot(fn: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return bcg.aot_compile(fn, args, kwargs, options={**OPTIONS, **(options or {})})


def rows(*shape: int) -> Tensor:
    made = torch.randn(shape)
    torch._dynamo.mark_dynamic(made, 0)
    return made


def same(got: Any, want: Any) -> bool:
    pairs = zip(tree_leaves(got), tree_leaves(want), strict=True)
    return all(torch.equal(g, w) if isinstance(w, Tensor) else g == w for g, w in pairs)


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_have_the_structure_of_eager() -> None:
    def fn(x: Tensor, *, more: dict[str, Tensor]) -> Any:
        y = x * 2
        return {"y": y, "pair": (y + more["b"], None), "again": [y, x], "number": 3, "text": "t", "rows": x.shape[0]}

    program = aot(fn, torch.ones(3), more={"b": torch.ones(3)})
    for _ in range(3):
        x, b = torch.randn(3), torch.randn(3)
        found = program(x, more={"b": b})
        assert same(found, fn(x, more={"b": b}))
        assert list(found) == ["y", "pair", "again", "number", "text", "rows"]
        assert found["again"][1] is x and found["again"][0] is found["y"]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_models_of_transformers_give_their_own_output_class(name: str) -> None:
    """These set a global flag and set it back: that is no lasting effect."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import zoo

    built = zoo.build(name)
    inputs = built.make_inputs(9, torch.Generator().manual_seed(0))
    program = aot(built.model, **inputs)
    for _ in range(3):
        wanted, found = built.model(**inputs), program(**inputs)
        assert type(found) is type(wanted)
        assert same(found.to_tuple(), wanted.to_tuple())


def test_open_sizes_may_differ_and_are_results() -> None:
    def fn(x: Tensor) -> Any:
        return torch.relu(x) * x.shape[0], x.shape[0] * 2

    program = aot(fn, rows(4, 3))
    for count in (4, 5, 5, 4, 9):
        x = torch.randn(count, 3)
        assert same(program(x), fn(x))


def test_parameters_written_in_place_are_seen_and_buffers_advance_once_a_call() -> None:
    class Counts(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.linear(x) + self.seen

    module = Counts()
    state = torch.get_rng_state()
    program = aot(module, torch.ones(2, 3))
    assert torch.equal(module.seen, torch.zeros(3)) and torch.equal(torch.get_rng_state(), state)
    for call in range(1, 5):
        module.linear.weight.mul_(0.5)
        x = torch.randn(2, 3)
        wanted = module.linear(x) + call
        assert torch.equal(program(x), wanted)
        assert torch.equal(module.seen, torch.full((3,), float(call)))


@bcg.eager_break(fake=torch.empty_like)
def scaled(x: Tensor) -> Tensor:
    ran.append(1)
    return x * bcg.current_context().scale


ran: list[int] = []


def test_breaks_run_at_each_call_in_the_context_of_the_call_and_not_when_compiling() -> None:
    ran.clear()
    program = aot(lambda x: scaled(x + 1) * 2, torch.ones(3))
    assert not ran
    for scale in (2.0, 3.0, 4.0):
        with bcg.forward_context(scale=scale):
            assert torch.equal(program(torch.ones(3)), torch.full((3,), 4 * scale))
    assert len(ran) == 3


def test_functions_that_take_a_compiled_callable_take_it() -> None:
    program = aot(lambda x: torch.relu(x) + 1, rows(4, 3), options={"ladder": [4, 8]})
    assert programs_of(program) == [program.program]
    program(torch.ones(3, 3))
    bcg.capture(program)
    assert bcg.admission(program, bcg.Batch(rows=5)).bucket == 8
    x = torch.randn(5, 3)
    assert torch.equal(program(x), torch.relu(x) + 1)
    assert bcg.stats(program).graphs == 1 and bcg.stats(program).replays >= 1


def test_twenty_programs_of_one_class_are_twenty() -> None:
    made = [nn.Linear(3, 3) for _ in range(20)]
    programs = [aot(module, torch.ones(2, 3)) for module in made]
    x = torch.randn(2, 3)
    for _ in range(3):
        assert all(torch.equal(program(x), module(x)) for program, module in zip(programs, made, strict=True))
    assert bcg.stats(programs[7]).recompile_limit_hits == 0


def test_a_dropped_program_frees_the_model_and_the_example_at_once() -> None:
    """The example's arguments lived as long as the program, and the model as long as Dynamo."""
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    program = aot(module, x)
    alive = [weakref.ref(o) for o in (x, module.weight, program.program)]
    del x
    for _ in range(3):
        program(torch.ones(2, 3))
    gc.collect()
    assert [ref() is None for ref in alive] == [True, False, False]
    del module, program
    gc.collect()
    assert [ref() is None for ref in alive] == [True, True, True]


# -- arguments ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "dtype": (torch.ones(3, 4, dtype=torch.float64), "float64"),
    "shape": (torch.ones(3, 5), r"\[3, 5\]"),
    "strides": (torch.ones(4, 3).t(), r"strides \(1, 3\)"),
    "device": (torch.ones(3, 4, device="meta"), "meta"),
    "type": (3, "is 3"),
    "structure": ((torch.ones(3, 4),), "compiled for"),
}


@pytest.mark.parametrize("wrong, text", REFUSED.values(), ids=REFUSED)
def test_an_argument_of_another_form_is_refused_by_name(wrong: Any, text: str) -> None:
    program = aot(lambda x, k: x * k, torch.ones(3, 4), 2)
    with pytest.raises(AotError, match=text) as error:
        program(wrong, 2)
    assert "in0 (args.0)" in str(error.value) or isinstance(wrong, tuple)


@pytest.mark.parametrize(
    "compiled, other",
    [(3, 4), (3, [3]), (3, 3.0), (1, True), (0.0, -0.0), ("sum", "mean"), (None, 0), (torch.float32, torch.int)],
)
def test_another_constant_is_refused(compiled: Any, other: Any) -> None:
    """Zero was taken for minus zero."""
    program = aot(lambda x, k: x * (k if isinstance(k, (int, float)) else 2), torch.ones(3), compiled)
    program(torch.ones(3), compiled)
    with pytest.raises(AotError, match=r"args\.1 is .* compiled for"):
        program(torch.ones(3), other)


class Parts:
    """A class that torch takes apart, without names for its parts."""

    def __init__(self, parts: Any) -> None:
        self.parts = tuple(parts)


register_pytree_node(Parts, lambda own: (list(own.parts), None), lambda parts, _: Parts(parts))


def test_arguments_of_another_structure_are_shown_as_calls() -> None:
    """Two specs of torch's stood there, over several lines, and the constant that differed had no name."""
    x = torch.ones(3)
    program = aot(lambda x, ys, scale: (x + sum(ys)) * scale, x, [x, x], scale=2.0)
    with pytest.raises(AotError) as error:
        program(x, [x], scale=2.0)
    assert str(error.value).startswith(
        "The program is called with (·, [·], scale=·), and was compiled for (·, [·, ·], scale=·)."
    )
    with pytest.raises(AotError, match=r"^scale is 3\.0, and the program was compiled for 2\.0"):
        program(x, [x, x], scale=3.0)


def test_classes_that_torch_takes_apart_may_lack_names() -> None:
    x = torch.ones(3)
    program = aot(lambda own, scale: own.parts[0] * scale, Parts([x]), 2)
    assert torch.equal(program(Parts([x]), 2), x * 2)
    with pytest.raises(AotError, match=r"^An argument is 3, and"):
        program(Parts([x]), 3)
    with pytest.raises(AotError, match="compiled for") as error:
        program(Parts([x, x]), 2)
    assert " object at 0x" not in str(error.value)  # which shows what differs to nobody


def test_a_call_holds_none_of_its_arguments() -> None:
    program, x = aot(lambda x: x * 2, torch.ones(3)), torch.ones(3)
    program(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None


def test_not_a_number_is_itself() -> None:
    assert aot(lambda x, k: x * k, torch.ones(3), float("nan"))(torch.ones(3), float("nan")).isnan().all()


def test_named_arguments_come_in_any_order() -> None:
    a, b = torch.randn(3), torch.randn(3)
    assert torch.equal(aot(lambda a, b: a - b, a=a, b=b)(b=b, a=a), a - b)


def test_one_tensor_twice_is_not_two_tensors() -> None:
    """Compiled for ``f(x, x)``, ``f(a, b)`` was ``f(b, b)``."""
    x, a, b = (torch.randn(3) for _ in range(3))
    program = aot(lambda a, b: a * 2 + b, x, x)
    assert torch.equal(program(a, a), a * 3)
    with pytest.raises(AotError, match="one and the same"):
        program(a, b)


def test_two_tensors_are_not_one_twice() -> None:
    program = aot(lambda a, b: a * 2 if a is b else a + b, torch.ones(3), torch.ones(3))
    with pytest.raises(AotError, match="one and the same"):
        program(*[torch.ones(3)] * 2)


def test_an_argument_that_was_a_parameter_stays_it() -> None:
    """The argument of the call was taken for the parameter, too."""
    module = nn.Linear(3, 3)
    program = aot(lambda x: module(x) + module.weight, module.weight)
    assert torch.equal(program(module.weight), module(module.weight) + module.weight)
    with pytest.raises(AotError, match="model's own"):
        program(torch.ones(3, 3))


def test_a_tensor_replaced_inside_of_an_object_is_refused() -> None:
    """The one of when it was compiled was read."""

    class Holder:
        def __init__(self) -> None:
            self.x = torch.ones(3)

    holder = Holder()
    program = aot(lambda h: h.x * 2, holder)
    holder.x.add_(1)
    assert torch.equal(program(holder), torch.full((3,), 4.0))
    holder.x = torch.zeros(3)
    with pytest.raises(AotError, match=r"args\.0\.x"):
        program(holder)


def test_sizes_that_were_equal_are_named() -> None:
    program = aot(lambda a, b: a + b, rows(4), rows(4))
    with pytest.raises(
        AotError, match=r"dimension 0 of in\d \(args\.0\) is 5, and dimension 0 of in\d \(args\.1\) is 6"
    ):
        program(torch.ones(5), torch.ones(6))


def test_sizes_that_follow_from_each_other_are_checked() -> None:
    """A size that is no symbol of its own was not looked at."""
    program = aot(lambda a, b: torch.cat([a, a]) + b, rows(4), rows(8))
    a, b = torch.randn(5), torch.randn(10)
    assert torch.equal(program(a, b), torch.cat([a, a]) + b)
    with pytest.raises(AotError, match=r"args\.1"):
        program(a, torch.ones(1))


def test_strides_that_follow_from_sizes_are_checked() -> None:
    """A part of a wider tensor was taken for a whole one."""
    x = torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 1)
    program = aot(lambda x: x * 2, x)
    program(torch.ones(4, 9))
    with pytest.raises(AotError, match="strides"):
        program(torch.ones(4, 18)[:, :9])


def test_what_the_model_asked_of_open_sizes_is_checked() -> None:
    program = aot(lambda x: x * 2 if x.shape[0] > 4 else x * 3, rows(8))
    with pytest.raises(AotError, match=r"fulfil .*, where s\d+, dimension 0 of in\d \(args\.0\), is 3\."):
        program(torch.ones(3))


@pytest.mark.parametrize("fixed", [False, True])
def test_what_a_compiler_assumed_of_open_sizes_is_checked(fixed: bool) -> None:
    """It assumes it after the plan is made, and Dynamo's guards, which hold it, are gone."""

    def compiler(module: Any, fakes: Any) -> Any:
        size = next(fake.shape[0] for fake in fakes if isinstance(fake, Tensor))
        assert int(size) == 8 if fixed else size > 6
        return module.forward

    x = torch.ones(8)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    program = aot(lambda x: torch.relu(x) + 1, x, options={"segment_compiler": compiler})
    program(torch.ones(8))
    with pytest.raises(AotError, match="fulfil"):
        program(torch.ones(4))


def test_overlapping_arguments_of_a_compiled_unit_are_eager_s() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    program = aot(fn, torch.ones(4), torch.ones(4), options={"segment_compiler": lambda module, _: module.forward})
    for _ in range(3):
        home = torch.randn(8)
        other = home.clone()
        assert torch.equal(program(home[:4], home[2:6]), fn(other[:4], other[2:6]))
        assert torch.equal(home, other)


# -- modes and what cannot be ------------------------------------------------------------------------------------------


def test_gradients_are_refused() -> None:
    """An input that wants a gradient, where none did when it was compiled, was computed without."""
    program = aot(lambda x: x * 2, torch.ones(3))
    with torch.enable_grad():
        program(torch.ones(3))
        with pytest.raises(AotError, match="gradients"):
            program(torch.ones(3, requires_grad=True))
        with pytest.warns(RuntimeWarning), pytest.raises(AotError, match="gradients"):
            aot(nn.Linear(3, 3), torch.ones(2, 3))


def test_another_autocast_is_refused() -> None:
    program = aot(nn.Linear(3, 3), torch.ones(2, 3))
    refused = pytest.raises(AotError, match=r"compiled with autocast .* or compile another program")
    with torch.autocast("cpu", dtype=torch.bfloat16), refused:
        program(torch.ones(2, 3))


def test_inference_tensors() -> None:
    module = nn.Linear(3, 3)
    with torch.inference_mode():
        program = aot(module, torch.ones(2, 3))
        for _ in range(3):
            x = torch.randn(2, 3)
            assert torch.equal(program(x), module(x)) and program(x).is_inference()


class Remembers(nn.Module):
    calls = 0
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x * 2
        return x + 1


class Rebinds(nn.Module):
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + x
        return self.state * 1


@pytest.mark.parametrize("module, attribute", [(Remembers(), "Remembers.last"), (Rebinds(), "_buffers")])
def test_a_model_that_leaves_something_in_python_is_refused_and_left_as_it_was(module: Any, attribute: str) -> None:
    """Its attribute was an empty tensor after compiling, and no call set it again."""
    before = {**vars(module), **module._buffers}
    with pytest.raises(AotError, match=attribute):
        aot(module, torch.ones(3))
    after = {**vars(module), **module._buffers}
    assert all(after[name] is before[name] for name in before)


def test_a_graph_break_is_dynamo_s_error() -> None:
    def fn(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(torch._dynamo.exc.Unsupported):
        aot(fn, torch.ones(3))


def test_results_that_cannot_be_put_together_are_refused() -> None:
    table = torch.ones(3)
    with pytest.raises(AotError, match="holds a Tensor"):
        aot(lambda x: (x * 2, table), torch.ones(3))
    with pytest.raises(AotError, match="nothing to compile"):
        aot(lambda x: 3, torch.ones(3))
    in_python = pytest.raises(AotError, match=r"in Python .*Return the tensors")
    with torch._dynamo.config.patch(capture_scalar_outputs=True), in_python:
        aot(lambda x: (x.sum().item(), x + 1), torch.ones(3))


# -- compile processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"segment_compiler": "inductor"}, True),
        ({"segment_compiler": "eager"}, False),
        ({"segment_compiler": lambda module, fakes: module.forward}, False),
        ({"segment_compiler": "inductor", "capture": "off"}, False),
    ],
)
def test_compile_processes_start_before_the_trace(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], starts: bool
) -> None:
    events: list[str] = []
    monkeypatch.setattr(bcg_compiler.backend, "start_workers", lambda: events.append("started"))

    def traced(self: Any, module: GraphModule, example_inputs: list[Any]) -> Any:
        events.append("traced")
        raise RuntimeError("seen enough")

    monkeypatch.setattr(bcg_compiler.aot._Trace, "backend", traced)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="seen enough"):
        aot(torch.sin, torch.ones(3), options=options)
    assert events == ["started", "traced"][not starts :]


@pytest.mark.parametrize("option", ["segment_compilr", "capture"])
def test_what_is_wrong_with_options_is_said_without_dynamo_s_words(option: str) -> None:
    """``BackendCompilerFailed`` advised to report a bug, and an ``OptionError`` could not be caught."""
    with pytest.raises(OptionError, match=option) as caught:
        aot(torch.sin, torch.ones(3), options={option: "cuda"})
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_the_cause_of_what_is_wrong_with_options_is_kept() -> None:
    with pytest.raises(OptionError, match="ladder") as caught:
        aot(torch.sin, torch.ones(3), options={"ladder": [8, -1]})
    assert isinstance(caught.value.__cause__, bcg.errors.LadderError)


def test_options_are_a_dictionary() -> None:
    with pytest.raises(OptionError, match="options is a list"):
        bcg.aot_compile(torch.sin, (torch.ones(3),), options=["capture"])  # type: ignore[arg-type]


@pytest.mark.parametrize("args", [torch.ones(1, 8), torch.ones(4, 8), "x"])
def test_arguments_are_not_the_rows_of_the_only_one(args: Any) -> None:
    """A tensor is a sequence: of one row, which was taken for x, a program for vectors came out."""
    with pytest.raises(AotError, match=r"must be a tuple.*Write \(x,\)"):
        bcg.aot_compile(nn.Linear(8, 8), args, options={"capture": "emulated"})


@pytest.mark.parametrize("kwargs", [torch.ones(4, 8), "ab", {1: torch.ones(4, 8)}])
def test_keyword_arguments_have_names(kwargs: Any) -> None:
    with pytest.raises(AotError, match="kwargs must be a mapping of names"):
        bcg.aot_compile(nn.Linear(8, 8), kwargs=kwargs)


def test_a_name_is_no_model() -> None:
    with pytest.raises(AotError, match="model is a str, which cannot be called"):
        bcg.aot_compile("model", (torch.ones(4, 8),))  # type: ignore[arg-type]


# -- guards ------------------------------------------------------------------------------------------------------------


def test_no_guards_are_made_for_an_entry_that_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    match = GuardBuilder.TENSOR_MATCH

    def counted(self: Any, guard: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(guard.name if isinstance(guard.name, str) else guard.name())
        return match(self, guard, *args, **kwargs)

    # Dynamo keeps the name of what makes a guard, and finds it here.
    counted.__name__ = match.__name__
    monkeypatch.setattr(GuardBuilder, "TENSOR_MATCH", counted)
    x = torch.ones(3)
    assert torch.equal(torch.compile(torch.sin, backend="bcg", options=OPTIONS)(x), torch.sin(x))
    assert made
    made.clear()
    assert torch.equal(aot(torch.sin, x)(x), torch.sin(x))
    assert not made


def test_a_marked_size_that_the_model_fixes_is_dynamo_s_error() -> None:
    with pytest.raises(ConstraintViolationError, match="specialized it to be a constant"):
        aot(lambda x, w: x + w, rows(4, 3), torch.ones(4, 3))
