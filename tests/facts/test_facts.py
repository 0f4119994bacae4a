"""What is known of single nodes: names, kernels, higher-order operations, modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

import bcg_compiler as bcg
from bcg_compiler.facts.node import FENCE, ModeState

Collect = Callable[..., Any]

data_dependent = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)  # Dynamo of torch 2.11 does not trace the id() of torch's own functions


@bcg.eager_break(mutates_args=("out",))
def write(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@torch.library.custom_op("bcg_tests_facts::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    return -x


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.compiler.allow_in_graph
def unseen(x: Tensor) -> Tensor:
    return x * 2


def x(*shape: int) -> Tensor:
    shape = shape or (4, 4)
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) / 7


# -- names -------------------------------------------------------------------------------------------------------------

NAMES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a function of torch": (lambda x: torch.relu(x), "relu"),
    "a function of torch.nn.functional": (lambda x: F.linear(x, x), "linear"),
    "an operator": (lambda x: x @ x, "matmul"),
    "a method": (lambda x: x.sum(), ".sum"),
    "an overload of torch.ops": (lambda x: torch.ops.aten.sin.default(x), "aten::sin.default"),
    "a packet of torch.ops": (lambda x: torch.ops.aten.sin(x), "aten::sin"),
    "a custom op": (lambda x: negative(x), "bcg_tests_facts::negative.default"),
    "a break function": (lambda x: cosine(x), f"{cosine.__module__}.cosine"),
    "a function that is kept whole": (lambda x: unseen(x), f"{unseen.__module__}.unseen"),
    "a break in place": (lambda x: bcg.call_with_break(halve, x, fake=like), f"{__name__}.halve"),
}


def halve(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize("fn, name", NAMES.values(), ids=NAMES)
def test_a_node_is_called_what_it_calls(facts_of: Collect, fn: Callable[[Tensor], Any], name: str) -> None:
    assert facts_of(fn, x()).ops[0] == name


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bmm": lambda x: torch.bmm(x, x),
    "matmul": lambda x: torch.matmul(x, x),
    "@": lambda x: x @ x,
    "einsum": lambda x: torch.einsum("bij,bjk->bik", x, x),
    "baddbmm": lambda x: torch.ops.aten.bmm(x, x),
}


@pytest.mark.parametrize("fn", PRODUCTS.values(), ids=PRODUCTS)
def test_ways_to_write_one_operation_dispatch_the_same(facts_of: Collect, fn: Callable[[Tensor], Tensor]) -> None:
    """Passes and rules look at what is dispatched."""
    facts = facts_of(fn, x(2, 4, 4))
    assert sum("aten::bmm.default" in node.aten for node in facts.graph.facts.values()) == 1
    assert facts.kernels == 1


def test_a_composite_operation_stands_before_its_parts(facts_of: Collect) -> None:
    facts = facts_of(lambda x: F.linear(x, x, x[0]), x())
    assert facts["linear"].aten == ("aten::linear.default", "aten::t.default", "aten::addmm.default")


def test_modules_and_lines_of_a_node(facts_of: Collect) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.up(x))

    facts = facts_of(nn.Sequential(Block(), Block()), x())
    first, second = facts.all("linear")
    assert (first.module, second.module) == ("0.up", "1.up")
    assert [cls for _, cls in second.modules] == ["Sequential", "Block", "Linear"]
    assert second.module_class == "Linear"
    source = facts.all("relu")[0].source
    assert source is not None
    assert source.file == __file__
    assert source.code == "return torch.relu(self.up(x))"
    assert str(second) == f"%{second.ordinal} linear in 1.up"


# -- kernels -----------------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "elementwise": (1, lambda x: torch.relu(x)),
    "two operations": (2, lambda x: torch.relu(x) + 1),
    "linear with a bias": (1, lambda x: F.linear(x, x, x[0])),
    "attention": (1, lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
    "rms norm": (1, lambda x: F.rms_norm(x, (4,))),
    "layer norm": (1, lambda x: F.layer_norm(x, (4,))),
    "softmax": (1, lambda x: x.softmax(-1)),
    "embedding, of indices made here": (2, lambda x: F.embedding(torch.ops.aten.zeros((2,), dtype=torch.long), x)),
    "a sum over all": (1, lambda x: x.sum()),
    "concatenation": (1, lambda x: torch.cat([x, x])),
    "a change of the dtype": (1, lambda x: x.double()),
    "no change of the dtype": (0, lambda x: x.float()),
    "a copy to be contiguous": (1, lambda x: x.t().contiguous()),
    "nothing to copy to be contiguous": (0, lambda x: x.contiguous()),
    "views": (0, lambda x: x.view(16).view(2, 8).t()[1:].unsqueeze(0).expand(3, -1, -1)),
    "a reshape that is a view": (0, lambda x: x.reshape(2, 8)),
    "a reshape that copies": (1, lambda x: x.t().reshape(2, 8)),
    "a split": (0, lambda x: x.split(2)[1]),
    "detach": (0, lambda x: x.detach()),
    "allocations": (0, lambda x: (torch.empty(4), torch.empty_like(x), x.new_empty(2))),
    "zeros": (1, lambda x: torch.zeros(4)),
    "a copy and a write": (2, lambda x: x.clone().add_(1)),
    "a copy and an assignment to a row": (2, lambda x: by_setitem(x.clone())),
    "a size": (0, lambda x: x[: x.shape[0] // 2]),
    "a break has none of its own": (0, lambda x: cosine(x)),
    "a custom op": (1, lambda x: negative(x)),
    "random numbers": (1, lambda x: torch.rand(4)),
    "a vmapped function": (1, lambda x: torch.vmap(lambda row: row.view(2, 2).sum())(x)),
    "a checkpointed function": (2, lambda x: torch.utils.checkpoint.checkpoint(two, x, use_reentrant=False)),
}


def by_setitem(buffer: Tensor) -> Tensor:
    buffer[0] = 3.0
    return buffer


def two(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


@pytest.mark.parametrize("count, fn", KERNELS.values(), ids=KERNELS)
def test_kernels_are_counted(facts_of: Collect, count: int, fn: Callable[[Tensor], Any]) -> None:
    assert facts_of(fn, x()).kernels == count


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_an_operation_whose_kernel_is_chosen_at_run_time_counts_as_one(facts_of: Collect, backend: str) -> None:
    """On whatever machine the plan is made."""

    def fn(q: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, q, q)

    assert facts_of(fn, x(1, 2, 4, 8))["scaled_dot_product_attention"].kernels == 1


def test_a_tensor_of_a_constant_needs_no_kernel_but_its_copy(facts_of: Collect) -> None:
    facts = facts_of(lambda x: x + torch.tensor(3.0), x())["tensor"]
    assert (facts.kernels, facts.writes) == (0, frozenset())


# -- higher-order operations -------------------------------------------------------------------------------------------


def test_a_condition_on_the_host_is_control_flow(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.cond(a.sum() > 0, lambda y: y + 1, lambda y: y - 1, (torch.sin(a),))

    facts = facts_of(fn, x())
    assert facts.codes("cond") == ["control_flow"]
    assert facts["getitem"].group == facts["cond"].ordinal


def test_a_loop_on_the_host_is_control_flow(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Any:
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.ops.aten.zeros(()), torch.sin(a)))

    assert facts_of(fn, x()).codes("while_loop") == ["control_flow"]


def test_a_checkpoint_is_what_is_in_it(facts_of: Collect) -> None:
    facts = facts_of(lambda a: torch.utils.checkpoint.checkpoint(two, a, use_reentrant=False), x())
    assert facts.codes("tag_activation_checkpoint") == []
    assert facts["tag_activation_checkpoint"].aten == ("aten::relu.default", "aten::mul.Tensor")
    assert not facts["tag_activation_checkpoint"].writes


@data_dependent
def test_a_reason_within_a_checkpoint_is_one_of_the_checkpoint(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda y: negative(y) + 1, a, use_reentrant=False)

    assert facts_of(fn, x()).codes("tag_activation_checkpoint") == ["unknown_op"]


def test_a_vmapped_region_is_one_group(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.exp(torch.vmap(lambda row: torch.sin(row) * row.sum())(torch.relu(a)))

    facts = facts_of(fn, x())
    inside = [facts[op] for op in ("_vmap_increment_nesting", "sin", ".sum", "mul", "_vmap_decrement_nesting")]
    assert {node.group for node in inside} == {inside[0].ordinal}
    assert facts["relu"].group == facts["relu"].ordinal
    assert facts["exp"].group == facts["exp"].ordinal
    assert facts["exp"].specs[0].shape == ("4", "4")


def test_nested_regions_are_one_group(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.vmap(lambda rows: torch.vmap(lambda row: torch.sin(row))(rows) + 1)(a)

    facts = facts_of(fn, x(2, 4, 4))
    (first, second) = facts.all("_vmap_increment_nesting")
    assert second.group == first.group == facts["sin"].group == facts["add"].group


def test_a_gradient_within_a_graph_is_one_group(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.exp(torch.func.grad(lambda y: torch.sin(y).sum())(a))

    facts = facts_of(fn, x())
    assert facts["sin"].group == facts["_autograd_grad"].group == facts["_grad_increment_nesting"].ordinal
    assert facts["exp"].group == facts["exp"].ordinal


# -- modes and state ---------------------------------------------------------------------------------------------------


def test_each_node_knows_the_mode_that_it_runs_in(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        b = torch.relu(a)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            c = b @ b
            with torch.enable_grad():
                d = torch.sin(c)
            with torch.inference_mode():
                e = torch.exp(d)
        return torch.cos(e)

    facts = facts_of(fn, x())
    assert facts["relu"].mode == ModeState()
    autocast = facts["matmul"].mode.stack
    assert len(autocast) == 1
    assert facts["matmul"].mode.grad is None
    assert facts["sin"].mode == ModeState(autocast, True)
    assert facts["exp"].mode.stack[:1] == autocast
    assert len(facts["exp"].mode.stack) == 2
    assert facts["cos"].mode.stack == ()
    assert facts["matmul"].specs[0].dtype == "bfloat16"
    assert not any("autocast" in op or "grad" in op or "inference" in op for op in facts.ops)


def test_a_call_that_sets_unknown_state_is_passed_by_nothing(facts_of: Collect) -> None:
    def fn(a: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            b = torch.relu(a)
        return torch.sin(b)

    facts = facts_of(fn, x())
    assert FENCE in facts.all("_sdpa_kernel")[0].writes
    assert FENCE in facts["relu"].reads
    assert FENCE in facts["sin"].reads


def test_a_break_that_returns_nothing_sets_no_unknown_state(facts_of: Collect) -> None:
    """It writes its buffers, the world and the random state; what touches none of these may pass it."""

    def fn(a: Tensor) -> Tensor:
        buffer = torch.relu(a)
        write(a, buffer)
        return buffer

    assert FENCE not in facts_of(fn, x())[f"{write.__module__}.write"].writes


def test_a_call_that_only_logs_sets_no_unknown_state(facts_of: Collect) -> None:
    """Torch itself leaves such a call in the graphs of models."""

    def fn(a: Tensor) -> Tensor:
        torch._C._log_api_usage_once("bcg.tests")
        return torch.sin(a)

    assert all(FENCE not in node.writes for node in facts_of(fn, x()).graph.facts.values())
