"""Collecting facts shows nowhere: not in the process, the graph, the arguments, nor in what Dynamo guards on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.fx import GraphModule

import bcg_compiler as bcg
from bcg_compiler.breaks import as_bound_break
from bcg_compiler.facts import collect_facts

bodies: list[str] = []


@bcg.eager_break(fake=torch.empty_like, mutates_args=("x",))
def counted(x: Tensor) -> Tensor:
    bodies.append("break")
    return x.add_(1).cos()


@torch.library.custom_op("bcg_tests_collecting::counted", mutates_args=("x",))
def counted_op(x: Tensor) -> None:
    bodies.append("op")
    x.add_(1)


class Around:
    """A backend that notes something before and after facts are collected, and runs the graph as it is."""

    def __init__(self, note: Callable[[GraphModule, list[Any]], Any]) -> None:
        self.note = note
        self.before: Any = None
        self.after: Any = None
        self.compiles = 0

    def __call__(self, module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            bound = as_bound_break(node.target, node.args) if node.op == "call_function" else None
            if bound is not None:
                node.target, node.args = bound
        module.recompile()
        self.compiles += 1
        self.before = self.note(module, example_inputs)
        self.graph = collect_facts(module, example_inputs)
        self.after = self.note(module, example_inputs)
        return module.forward


def around(note: Callable[[GraphModule, list[Any]], Any], fn: Callable[..., Any], *args: Any, **given: Any) -> Around:
    backend = Around(note)
    torch.compile(fn, backend=backend, fullgraph=True, **given)(*args)
    return backend


def x(*shape: int) -> Tensor:
    shape = shape or (4, 4)
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) / 7


# -- the process -------------------------------------------------------------------------------------------------------


def state(_: GraphModule, __: list[Any]) -> dict[str, Any]:
    """The state of the thread that a graph may set."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "functorch": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "random": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "math attention": torch.backends.cuda.math_sdp_enabled(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
    }


def draws(a: Tensor) -> Tensor:
    return F.dropout(a, 0.5, True) + torch.rand(4, 4)


def turns_grad_on(a: Tensor) -> Tensor:
    torch.set_grad_enabled(True)
    return a + 1


def nests_modes(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.inference_mode(), torch.enable_grad():
        return a @ a


def maps(a: Tensor) -> Tensor:
    return torch.vmap(lambda rows: torch.vmap(torch.sin)(rows) + 1)(a[None])


def differentiates(a: Tensor) -> Tensor:
    return torch.func.grad(lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1].sum())(a)


def chooses_attention(a: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(a[None], a[None], a[None])


def is_deterministic(a: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    b = a + 1
    torch.use_deterministic_algorithms(False)
    return b


FUNCTIONS = [draws, turns_grad_on, nests_modes, maps, differentiates, chooses_attention, is_deterministic]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_state_of_the_thread_is_as_before(fn: Callable[[Tensor], Tensor]) -> None:
    backend = around(state, fn, x())
    assert backend.after == backend.before


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_state_of_the_thread_is_as_before_in_other_modes(fn: Callable[[Tensor], Tensor]) -> None:
    """The caller's own modes are neither lost nor reset."""
    with torch.autocast("cpu", dtype=torch.float16), torch.enable_grad():
        backend = around(state, fn, x())
    assert backend.before["autocast"][0] == (True, torch.float16)
    assert backend.after == backend.before


def test_a_region_that_cannot_be_run_on_fakes_leaves_no_transform_open() -> None:
    def fails(y: Tensor) -> Tensor:
        raise NotImplementedError("on fakes")

    backend = Around(state)

    def with_a_fault(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in module.graph.find_nodes(op="call_function", target=torch.sin):
            node.target = fails
        backend(module, example_inputs)
        for node in module.graph.find_nodes(op="call_function", target=fails):
            node.target = torch.sin
        module.recompile()
        return module.forward

    torch.compile(maps, backend=with_a_fault, fullgraph=True)(x())
    assert backend.after == backend.before
    assert {r.code for f in backend.graph.facts.values() for r in f.uncapturable} == {"unknown_op"}


def leaves_autocast_on(graph: torch.fx.Graph, a: torch.fx.Node) -> torch.fx.Node:
    graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, False))
    return graph.call_function(torch.mm, (a, a))


def leaves_a_transform_open(graph: torch.fx.Graph, a: torch.fx.Node) -> torch.fx.Node:
    graph.call_function(torch._C._functorch._vmap_increment_nesting, (4, "error"))
    row = graph.call_function(torch._C._functorch._add_batch_dim, (a, 0, 1))
    return graph.call_function(torch.sin, (row,))


def leaves_every_transform_open(graph: torch.fx.Graph, a: torch.fx.Node) -> torch.fx.Node:
    leaves_a_transform_open(graph, a)
    for enter in ("_grad_increment_nesting", "_jvp_increment_nesting"):
        graph.call_function(getattr(torch._C._functorch, enter))
    graph.call_function(torch._C._functorch._func_increment_nesting, (True,))
    return graph.call_function(torch.mul, (2, 3))


def leaves_grad_switched(graph: torch.fx.Graph, a: torch.fx.Node) -> torch.fx.Node:
    graph.call_function(torch._C._set_grad_enabled, (not torch.is_grad_enabled(),))
    return graph.call_function(torch.sin, (a,))


@pytest.mark.parametrize(
    "build", [leaves_autocast_on, leaves_a_transform_open, leaves_every_transform_open, leaves_grad_switched]
)
def test_what_a_graph_leaves_open_is_closed(build: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]) -> None:
    """A part of a region may end a graph. A functionalisation left open left the thread in inference mode."""
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    a.meta["example_value"] = x()
    graph.output(build(graph, a))
    module = GraphModule(nn.Module(), graph)
    before = state(module, [])
    collect_facts(module, [x()])
    assert state(module, []) == before


# -- the graph and its arguments ---------------------------------------------------------------------------------------


def test_no_body_runs_and_no_argument_changes() -> None:
    """Neither bodies of breaks and custom ops, nor the writes of the graph."""

    def contents(_: GraphModule, example_inputs: list[Any]) -> list[Any]:
        return [len(bodies), *((t.tolist(), t._version, t.data_ptr(), t.shape) for t in example_inputs)]

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a.add_(b)
            counted_op(b)
            self.seen.copy_(a[0])
            return counted(a) + self.up(b)

    bodies.clear()
    backend = around(contents, Module(), x(), x())
    assert backend.after == backend.before
    assert bodies == ["op", "break"]  # the one call itself


def test_the_graph_is_as_before() -> None:
    def description(module: GraphModule, _: list[Any]) -> Any:
        values = [(n.name, sorted(n.meta), str(n.meta.get("example_value"))) for n in module.graph.nodes]
        return module.code, values

    backend = around(description, lambda a, b: counted(a) + torch.vmap(torch.sin)(b).unsqueeze_(0), x(), x())
    assert backend.after == backend.before


def test_facts_are_the_same_when_collected_again() -> None:
    first: list[Any] = []

    def collect(module: GraphModule, example_inputs: list[Any]) -> None:
        first.append(list(collect_facts(module, example_inputs).facts.values()))

    def fn(a: Tensor) -> Tensor:
        return F.dropout(torch.relu(a).split(2)[0].add_(1), 0.5, True) @ a

    around(collect, fn, x())
    assert first[0] == first[1]


def test_the_mode_of_the_caller_does_not_change_the_facts() -> None:
    """Nor does it matter whether arguments require grad."""

    def fn(a: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.layer_norm(a, (4,)), w).view(16)[2:] * 2

    def facts(requires_grad: bool) -> list[Any]:
        torch.compiler.reset()
        backend = around(state, fn, x(), x().requires_grad_(requires_grad))
        return list(backend.graph.facts.values())

    with torch.no_grad():
        expected = facts(False)
    with torch.inference_mode():
        assert facts(False) == expected
    with torch.enable_grad():
        assert facts(True) == expected


# -- guards ------------------------------------------------------------------------------------------------------------


def guards(_: GraphModule, __: list[Any]) -> Any:
    """What Dynamo has assumed of sizes so far."""
    context = TracingContext.get()
    assert context.fake_mode is not None
    shapes = context.fake_mode.shape_env
    assert shapes is not None
    ranges = {symbol: known for symbol, known in shapes.var_to_range.items() if not str(symbol).startswith("u")}
    return len(shapes.guards), dict(shapes.replacements), ranges


def q(a: Tensor) -> Tensor:
    return a.view(1, 2, a.shape[0] // 2, a.shape[1])


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda a: a @ a.t(),
    "batched matmul": lambda a: a[None] @ a.t(),
    "linear": lambda a: F.linear(a, a),
    "attention": lambda a: F.scaled_dot_product_attention(q(a), q(a), q(a), is_causal=True),
    "norms": lambda a: F.layer_norm(a, (a.shape[1],)) + F.rms_norm(a, (a.shape[1],)),
    "softmax": lambda a: a.softmax(-1),
    "split": lambda a: a.split(a.shape[0] // 2),
    "chunk": lambda a: a.chunk(3),
    "reshape": lambda a: a.t().reshape(-1),
    "view": lambda a: a.view(a.shape[0] * 2, -1),
    "flatten": lambda a: a[None].flatten(1),
    "broadcast": lambda a: a + a[0],
    "concatenation": lambda a: torch.cat([a, a[1:]]),
    "repeat": lambda a: a.repeat_interleave(2, 0),
    "index": lambda a: a[torch.arange(a.shape[0] - 1)],
    "assignment": lambda a: a.clone().index_fill_(0, torch.arange(2), 1.0),
    "convolution": lambda a: F.conv1d(a[None], a[None]),
    "pooling": lambda a: F.max_pool1d(a[None], 2),
    "einsum": lambda a: torch.einsum("ij,kj->ik", a, a),
    "cross entropy": lambda a: F.cross_entropy(a, torch.zeros(a.shape[0], dtype=torch.long)),
    "vmap": lambda a: torch.vmap(lambda row: row.softmax(0))(a),
    "checkpoint": lambda a: torch.utils.checkpoint.checkpoint(torch.sin, a, use_reentrant=False),
    "in place": lambda a: torch.relu(a).unsqueeze_(0).add_(a),
    "break": lambda a: counted(torch.relu(a)),
}


@pytest.mark.parametrize("fn", SHAPES.values(), ids=SHAPES)
def test_no_guard_is_added(fn: Callable[[Tensor], Any]) -> None:
    backend = around(guards, fn, x(6, 8), dynamic=True)
    assert backend.after == backend.before


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_no_guard_is_added_for_a_size_of_the_data() -> None:
    backend = around(guards, lambda a: torch.nonzero(a).sum(0) + a[a > 1].sum(), x(6, 8), dynamic=True)
    assert backend.after == backend.before


@pytest.mark.parametrize("name", ["matmul", "attention", "norms", "split", "reshape", "concatenation", "vmap"])
def test_other_sizes_compile_as_often_as_without_facts(name: str) -> None:
    """Counted against a backend that does nothing."""
    sizes = [(4, 4), (6, 4), (8, 4), (8, 16), (10, 12), (6, 6), (4, 8), (32, 2)]
    counts = []
    for backend in (Around(guards), torch._dynamo.testing.CompileCounter()):
        torch.compiler.reset()
        compiled = torch.compile(SHAPES[name], backend=backend, fullgraph=True)
        for size in sizes:
            compiled(x(*size))
        counts.append(backend.compiles if isinstance(backend, Around) else backend.frame_count)
    assert counts[0] == counts[1] < len(sizes)
