"""What speaks against capturing a node: syncs, sizes and numbers that change, operations that nobody knows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

from bcg_compiler.facts import collect_facts
from bcg_compiler.facts.node import RANDOM_STATE, STREAMS, WORLD

Collect = Callable[..., Any]

data_dependent = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


@torch.library.custom_op("bcg_tests_reasons::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    return -x


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bcg_tests_reasons::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: Tensor) -> Tensor:
    return -x


@unsafe.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.compiler.allow_in_graph
def unseen(x: Tensor) -> Tensor:
    return x * 2


def x(*shape: int) -> Tensor:
    shape = shape or (4, 4)
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) / 7


# -- host synchronisation and sizes that depend on data ----------------------------------------------------------------


SYNCS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "item": (lambda x: x.sum().item(), ".item", "host_sync"),
    "tolist": (lambda x: x[0].long().tolist(), ".item", "host_sync"),
    "cpu": (lambda x: x.cpu(), ".cpu", "host_sync"),
    "int": (lambda x: x * int(x.sum()), ".item", "host_sync"),
    "nonzero": (lambda x: torch.nonzero(x), "nonzero", "dynamic_output"),
    "indexing by a mask": (lambda x: x[x > 1], "getitem", "dynamic_output"),
    "masked_select": (lambda x: torch.masked_select(x, x > 1), "masked_select", "dynamic_output"),
    "unique": (lambda x: torch.unique(x), "unique", "dynamic_output"),
    "repeats by a tensor": (
        lambda x: torch.repeat_interleave(x, x[0].long(), 0),
        "repeat_interleave",
        "dynamic_output",
    ),
    "eigenvectors": (lambda x: torch.linalg.eigh(x @ x.t()), "linalg_eigh", "host_sync"),
    "singular values": (lambda x: torch.linalg.svd(x), "linalg_svd", "host_sync"),
    "assignment by a mask": (lambda x: assigned(x, x > 1, x[:1, :1].view(1).expand(16)), "setitem", "host_sync"),
}


def assigned(x: Tensor, mask: Tensor, values: Any) -> Tensor:
    buffer = x.clone()
    buffer[mask] = values
    return buffer


@pytest.mark.parametrize("fn, op, code", SYNCS.values(), ids=SYNCS)
@data_dependent
def test_what_waits_for_the_device_is_uncapturable(
    facts_of: Collect, fn: Callable[[Tensor], Any], op: str, code: str
) -> None:
    found = facts_of(lambda a: fn(torch.relu(a)), x() + 1).all(op)
    assert all(code in [reason.code for reason in facts.uncapturable] for facts in found)
    assert found


NO_SYNCS: dict[str, Callable[[Tensor], Any]] = {
    "assignment of a number by a mask": lambda x: assigned(x, x > 1, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "indexing by integers": lambda x: x[torch.ops.aten.arange(2)],
    "assignment by integers": lambda x: assigned(x, torch.ops.aten.arange(2), x[:2].clone()),
    "repeats by a number": lambda x: torch.repeat_interleave(x, 2, 0),
    "to the same device": lambda x: x.to("cpu") + 1,
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(),
    "cumsum": lambda x: x.cumsum(0),
}


@pytest.mark.parametrize("fn", NO_SYNCS.values(), ids=NO_SYNCS)
@data_dependent
def test_what_does_not_wait_is_capturable(facts_of: Collect, fn: Callable[[Tensor], Any]) -> None:
    facts = facts_of(lambda a: fn(torch.relu(a)), x())
    assert [node.uncapturable for node in facts.graph.facts.values() if node.uncapturable] == []


@data_dependent
def test_what_depends_on_a_size_of_the_data_is_uncapturable_until_it_is_fixed_again(facts_of: Collect) -> None:
    """The sum over the rows has a size that is known."""
    facts = facts_of(lambda a: torch.exp(torch.sin(a[a[:, 0] > 1]).sum(0)), x())
    assert facts.codes("sin") == ["dynamic_output"]
    assert facts.codes(".sum") == ["dynamic_output"]
    assert facts.codes("exp") == []
    assert facts["sin"].specs[0].shape[0].startswith("u")


@data_dependent
def test_a_number_read_from_data_is_a_host_number_wherever_it_goes(facts_of: Collect) -> None:
    def fn(a: Tensor) -> tuple[Tensor, ...]:
        count = a.sum().long().item()
        torch._check(count >= 0)
        torch._check(count <= 4)
        return torch.sin(a) * count, a[:count], torch.exp(a)

    facts = facts_of(fn, x() * 0)
    assert facts.codes("mul") == ["host_number"]
    assert facts.codes("getitem") == ["host_number"]
    assert facts.codes("sin") == facts.codes("exp") == []
    checks = [node for node in facts.graph.facts.values() if node.host_only]
    assert checks
    assert all([reason.code for reason in node.uncapturable] == ["host_number"] for node in checks)


# -- numbers of the caller ---------------------------------------------------------------------------------------------

NUMBERS: dict[str, tuple[Callable[[Tensor, Any], Any], str]] = {
    "operand": (lambda x, n: x * n, "mul"),
    "size": (lambda x, n: torch.full((n,), 1.0), "full"),
    "bound of a slice": (lambda x, n: x[:n], "getitem"),
    "size of a view": (lambda x, n: x.expand(n, 4, 4), ".expand"),
    "end of a range": (lambda x, n: torch.arange(n), "arange"),
    "value to fill with": (lambda x, n: x.masked_fill(x > 1, n), ".masked_fill"),
    "derived operand": (lambda x, n: x + n // 2, "add"),
    "keyword": (lambda x, n: torch.add(x, x, alpha=n), "add"),
}


@pytest.mark.parametrize("fn, op", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_changes_is_a_host_number(facts_of: Collect, fn: Callable[..., Any], op: str) -> None:
    """Once Dynamo has seen it change."""
    facts = facts_of(fn, x(), 2, again=(x(), 3))
    assert "host_number" in facts.codes(op)
    assert facts.given("n").host_only


BOUNDS: dict[str, Callable[[Tensor, Any], Any]] = {
    "start and end": lambda x, n: x.__setitem__(slice(n, n + 1), 2.0),
    "start": lambda x, n: x.__setitem__(slice(n, None), 2.0),
    "end": lambda x, n: x.__setitem__(slice(None, n), 2.0),
    "step": lambda x, n: x.__setitem__(slice(None, None, n), 2.0),
    "of the second dimension": lambda x, n: x.__setitem__((slice(None), slice(n, None)), 2.0),
}


@pytest.mark.parametrize("change", BOUNDS.values(), ids=BOUNDS)
def test_a_number_that_bounds_what_is_written_is_a_host_number(
    facts_of: Collect, change: Callable[[Tensor, Any], Any]
) -> None:
    """``cache[position : position + 1] = key`` stayed in a segment, which would freeze the position."""

    def fn(a: Tensor, n: int) -> Tensor:
        buffer = torch.relu(a)
        change(buffer, n)
        return buffer

    assert facts_of(fn, x(), 2, again=(x(), 3)).codes("setitem") == ["host_number"]


@data_dependent
def test_a_number_read_from_data_that_bounds_what_is_written_is_a_host_number(facts_of: Collect) -> None:
    def fn(a: Tensor, n: Tensor) -> Tensor:
        buffer = torch.relu(a)
        buffer[: n.item()] = 2.0
        return buffer

    assert facts_of(fn, x(), torch.tensor(2)).codes("setitem") == ["host_number"]


def test_a_number_that_indexes_what_is_written_is_a_host_number(facts_of: Collect) -> None:
    def fn(a: Tensor, n: int) -> Tensor:
        buffer = torch.relu(a)
        buffer[n] = 2.0
        return buffer

    assert facts_of(fn, x(), 2, again=(x(), 3)).codes("setitem") == ["host_number"]


def test_a_float_that_changes_is_a_host_number(facts_of: Collect) -> None:
    facts = facts_of(lambda x, n: torch.sin(x) * n + 1, x(), 0.5, again=(x(), 0.75))
    assert "host_number" in facts.codes("mul")
    assert facts.codes("sin") == facts.codes("add") == []


def test_a_number_that_never_changed_is_a_constant(facts_of: Collect) -> None:
    assert facts_of(lambda x, n: x * n, x(), 2).codes("mul") == []


def test_arithmetic_on_a_number_is_host_only(facts_of: Collect) -> None:
    facts = facts_of(lambda x, n: x * (n // 2), x(), 4, again=(x(), 6))
    assert facts["floordiv"].host_only
    assert facts.codes("floordiv") == ["host_number"]
    assert not facts["mul"].host_only


def test_a_size_that_changes_is_no_host_number(facts_of: Collect) -> None:
    """A size is fixed for each shape that is captured."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        rows = x.shape[0]
        return torch.sin(x) * rows, x.view(rows * 2, -1), torch.arange(rows), x[: rows // 2]

    facts = facts_of(fn, x(4, 4), again=(x(6, 4),))
    assert all(not node.uncapturable for node in facts.graph.facts.values())
    assert facts["sin"].specs[0].shape == (str(facts.given("x").specs[0].shape[0]), "4")


def test_a_number_equal_to_a_size_is_a_number_still(facts_of: Collect) -> None:
    """It may be equal by chance."""
    facts = facts_of(lambda x, n: torch.sin(x) * n, x(5), 5, again=(x(6), 6))
    assert facts.codes("mul") == ["host_number"]


# -- operations that nobody knows --------------------------------------------------------------------------------------


def test_an_unknown_custom_op_is_uncapturable_and_the_reason_says_how_to_declare_it(facts_of: Collect) -> None:
    facts = facts_of(lambda a: negative(a), x())["bcg_tests_reasons::negative.default"]
    (reason,) = facts.uncapturable
    assert reason.code == "unknown_op"
    assert 'options={"capturable": ["bcg_tests_reasons::negative"]}' in reason.text
    assert facts.writes == {WORLD, RANDOM_STATE}


def test_a_custom_op_declared_capturable_is_so(facts_of: Collect) -> None:
    """Its body is still not seen: it may touch what it likes."""
    facts = facts_of(lambda a: negative(a), x(), capturable=("bcg_tests_reasons::negative",))
    assert facts.codes("bcg_tests_reasons::negative.default") == []
    assert WORLD in facts["bcg_tests_reasons::negative.default"].writes


def test_the_declaration_of_one_op_is_not_that_of_another(facts_of: Collect) -> None:
    facts = facts_of(lambda a: negative(a), x(), capturable=("bcg_tests_reasons::bump",))
    assert facts.codes("bcg_tests_reasons::negative.default") == ["unknown_op"]


def test_a_python_function_kept_whole_is_unknown(facts_of: Collect) -> None:
    name = f"{unseen.__module__}.unseen"
    facts = facts_of(lambda a: unseen(a), x())
    assert facts.codes(name) == ["unknown_op"]
    assert facts[name].opaque
    torch.compiler.reset()
    assert facts_of(lambda a: unseen(a), x(), capturable=(name,)).codes(name) == []


def test_the_tag_of_an_op_is_a_reason_of_its_own(facts_of: Collect) -> None:
    assert facts_of(lambda a: unsafe(a), x()).codes("bcg_tests_reasons::unsafe.default") == ["unsafe_tag", "unknown_op"]


@pytest.fixture
def process_group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_collectives_are_uncapturable(facts_of: Collect, process_group: dist.ProcessGroup) -> None:
    def fn(a: Tensor) -> Tensor:
        total = a * 2
        dist.all_reduce(total)
        return total + 1

    facts = facts_of(fn, x())
    assert facts.codes("_c10d_functional::all_reduce") == ["collective"]
    assert facts.codes("_c10d_functional::wait_tensor") == ["collective"]
    assert facts.codes("mul") == facts.codes("add") == facts.codes(".copy_") == []


def test_waiting_for_a_collective_gives_the_tensor_itself(facts_of: Collect, process_group: dist.ProcessGroup) -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(a)

    real = x()
    assert fn(real).data_ptr() == real.data_ptr()
    assert facts_of(fn, x()).aliases == [True]


# -- streams -----------------------------------------------------------------------------------------------------------


def test_what_orders_work_on_streams_is_a_break_that_nothing_crosses() -> None:
    """A replay of a recorded wait waits for nothing: work of the caller's on that stream could come too late.

    The graph is what Dynamo makes of ``side.wait_stream(current)`` and ``current.wait_event(event)`` on a GPU.
    """
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    a.meta["example_value"] = x()
    first = graph.call_function(torch.sin, (a,))
    current, side = (graph.call_function(get_external_object_by_index, (i,)) for i in (0, 1))
    graph.call_method("wait_stream", (side, current))
    second = graph.call_function(torch.cos, (a,))
    graph.call_function(torch.ops.streams.wait_event.default, (2, 0))
    graph.output((graph.call_function(torch.add, (first, second)),))
    found = collect_facts(torch.fx.GraphModule(torch.nn.Module(), graph), [x()])
    facts = {f.op: f for f in found.facts.values()}
    reasons = {op: [reason.code for reason in f.uncapturable] for op, f in facts.items()}
    assert reasons[".wait_stream"] == reasons["streams::wait_event.default"] == ["side_stream"]
    assert facts[".wait_stream"].uncapturable[0].text == "it orders work on streams 0, 1, which a replay would not"
    assert reasons["sin"] == reasons["cos"] == reasons["add"] == []
    assert all(STREAMS in facts[op].reads for op in ("sin", "cos", "add"))
    assert STREAMS not in facts["get_external_object_by_index"].writes
