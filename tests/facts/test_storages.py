"""Which storages and which state a node touches: views, writes, arguments that overlap, random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.facts.node import RANDOM_STATE, WORLD

Collect = Callable[..., Any]


@bcg.eager_break(mutates_args=("out",))
def write(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@bcg.eager_break(fake=torch.empty_like)
def cosine(x: Tensor) -> Tensor:
    return x.cos()


@torch.library.custom_op("bcg_tests_storages::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("bcg_tests_storages::negative", mutates_args=())
def negative(x: Tensor) -> Tensor:
    return -x


@negative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def x(*shape: int) -> Tensor:
    shape = shape or (4, 4)
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) / 7


# -- storages ----------------------------------------------------------------------------------------------------------


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(16),
    "view of a view": lambda x: x.view(16)[3:].unsqueeze(0),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "slice of all": lambda x: x[:],
    "index": lambda x: x[torch.ops.aten.arange(2)],
    "row": lambda x: x[1],
    "expand": lambda x: x.expand(2, 4, 4),
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(2)[0],
    "unbind": lambda x: x.unbind()[2],
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4)),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "detach": lambda x: x.detach(),
    "reshape that is a view": lambda x: x.reshape(16),
    "reshape that copies": lambda x: x.t().reshape(16),
    "contiguous that is nothing": lambda x: x.contiguous(),
    "contiguous that copies": lambda x: x.t().contiguous(),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "to the same dtype": lambda x: x.to(torch.float32),
    "to another dtype": lambda x: x.to(torch.float64),
    "view of another dtype": lambda x: x.view(torch.int32),
    "to the same device": lambda x: x.to("cpu"),
    "to a copy": lambda x: x.to(torch.float32, copy=True),
    "clone": lambda x: x.clone(),
    "type_as": lambda x: x.type_as(x),
    "expand_as": lambda x: x.expand_as(x),
    "squeeze": lambda x: x.squeeze(),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 4, 4)),
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "movedim": lambda x: x.movedim(0, 1),
    "einsum of one": lambda x: torch.einsum("ij->ji", x),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    "real": lambda x: torch.real(x),
    "addition": lambda x: x + 1,
    "addition in place": lambda x: x.add_(1),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.mul(x, 2, out=x),
    "out elsewhere": lambda x: torch.mul(x, 2, out=torch.empty(4, 4)),
    "dropout in place": lambda x: F.dropout(x, 0.5, True, inplace=True),
    "alpha dropout that drops nothing": lambda x: F.alpha_dropout(x, 0.5, False),
    "custom op": lambda x: negative(x),
    "vmapped view": lambda x: torch.vmap(lambda row: row.view(2, 2))(x),
    "vmapped addition": lambda x: torch.vmap(lambda row: row + 1)(x),
    "checkpointed view": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.t(), x, use_reentrant=False),
    "where": lambda x: torch.where(x > 0, x, x),
    "pad by nothing": lambda x: F.pad(x, (0, 0)),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "dropout that drops nothing": lambda x: F.dropout(x, 0.5, False),
    "dropout of probability 0": lambda x: F.dropout(x, 0.0, True),
}
each_alias = pytest.mark.parametrize("fn", ALIASES.values(), ids=ALIASES)


@each_alias
def test_a_result_shares_the_storage_of_its_argument_if_it_really_does(
    facts_of: Collect, fn: Callable[[Tensor], Any]
) -> None:
    """Against a real call."""
    real = x()
    result = fn(real)
    shares = result.untyped_storage().data_ptr() == real.untyped_storage().data_ptr()
    assert facts_of(fn, x()).aliases == [shares]


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda x, y: x.add_(y),
    "by operator": lambda x, y: x.__iadd__(y),
    "through a slice": lambda x, y: x[1:].mul_(2),
    "through an item of a split": lambda x, y: x.split(2)[0].zero_(),
    "by assignment": lambda x, y: x.__setitem__(0, y[1]),
    "by assignment of a number": lambda x, y: x.__setitem__(0, 3.0),
    "by copy": lambda x, y: x.copy_(y),
    "out": lambda x, y: torch.add(y, 1, out=x),
    "fill": lambda x, y: x.fill_(2.0),
    "scatter": lambda x, y: x.scatter_(0, torch.ops.aten.zeros((1, 4), dtype=torch.long), y),
    "index_put": lambda x, y: x.index_put_((torch.ops.aten.arange(2),), y[:2]),
    "index_add": lambda x, y: x.index_add_(0, torch.ops.aten.arange(2), y[:2]),
    "uniform": lambda x, y: x.uniform_(),
    "running averages": lambda x, y: F.batch_norm(y, x[0], x[1], training=True),
    "renormed embedding": lambda x, y: F.embedding(torch.ops.aten.arange(2), x, max_norm=0.5),
    "in place within vmap": lambda x, y: torch.vmap(lambda row: row.mul_(2))(x),
    "in place within a checkpoint": lambda x, y: torch.utils.checkpoint.checkpoint(
        lambda z: z.mul_(2), x, use_reentrant=False
    ),
    "by a custom op": lambda x, y: bump(x),
    "by a break": lambda x, y: write(y, x),
    "by a break through a view": lambda x, y: write(y.t(), x.t()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_written_is_known(facts_of: Collect, change: Callable[[Tensor, Tensor], Any]) -> None:
    """The buffer is written; the other argument, which is of the graph as well, is only read."""

    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        buffer, other = torch.relu(a), torch.sin(a)
        change(buffer, other)
        return buffer, other

    facts = facts_of(fn, x())
    buffer, other = facts["relu"].results, facts["sin"].results
    writers = [node for node in facts.graph.facts.values() if node.writes & buffer]
    assert writers
    assert not any(node.writes & other for node in facts.graph.facts.values())
    assert all(node.reads & buffer for node in writers)
    assert all(node.ordinal > facts["relu"].ordinal for node in writers)


def test_pure_nodes_write_nothing_and_give_fresh_results(facts_of: Collect) -> None:
    facts = facts_of(lambda a: torch.relu(a) @ a.t() + 1, x())
    for op in ("relu", "matmul", "add"):
        assert not facts[op].writes
        assert facts[op].fresh == facts[op].results
        assert len(facts[op].results) == 1
    assert not facts[".t"].fresh
    assert facts[".t"].results == facts.given("a").results


def test_items_of_a_tuple_belong_to_its_producer(facts_of: Collect) -> None:
    facts = facts_of(lambda a: a.topk(2)[1] + 1, x())
    topk, item, add = facts[".topk"], facts["getitem"], facts["add"]
    assert item.group == topk.group == topk.ordinal
    assert add.group == add.ordinal
    assert len(topk.results) == 2
    assert item.results < topk.results


def test_arguments_over_one_storage_have_one_root(facts_of: Collect) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    memory = x(6, 4)
    apart, together = facts_of(fn, x(), x()), None
    assert not apart.given("a").results & apart.given("b").results
    torch.compiler.reset()
    together = facts_of(fn, memory[:4], memory[2:])
    assert together.given("a").results == together.given("b").results


def test_inputs_that_are_written_count_as_one(facts_of: Collect) -> None:
    """They may overlap at another call; parameters do not."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a.add_(1)
            return torch.sin(b) + torch.exp(self.cache) + torch.relu(self.up(torch.ones(4)))

    facts = facts_of(Module(), x(), x())
    written = facts[".add_"].writes
    assert facts.given("b").results < written
    assert facts["sin"].reads & written
    assert facts["exp"].reads & written
    assert not facts["linear"].reads & written
    assert not facts["relu"].reads & written


def test_inputs_that_nobody_writes_stay_apart(facts_of: Collect) -> None:
    facts = facts_of(lambda a, b: torch.sin(a) + torch.exp(b), x(), x())
    assert facts["sin"].reads == facts.given("a").results
    assert facts["exp"].reads == facts.given("b").results


def test_a_write_to_a_value_of_the_graph_is_no_write_to_the_world(facts_of: Collect) -> None:
    facts = facts_of(lambda a: torch.relu(a).add_(1), x())
    assert facts[".add_"].writes == facts["relu"].results
    assert not facts.graph.outside & facts[".add_"].writes


def test_a_buffer_may_be_touched_by_a_break_unseen(facts_of: Collect) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 4))
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def forward(self, a: Tensor) -> Tensor:
            return cosine(a) + torch.sin(self.cache) + torch.exp(self.weight)

    facts = facts_of(Module(), x())
    assert WORLD in facts[f"{cosine.__module__}.cosine"].writes
    assert WORLD in facts["sin"].reads
    assert WORLD not in facts["exp"].reads


def test_a_break_s_result_may_be_its_argument(facts_of: Collect) -> None:
    """Whatever its fake says."""
    facts = facts_of(lambda a: cosine(torch.relu(a)) + 1, x())
    assert facts["relu"].results < facts["getitem"].results
    assert facts["add"].reads >= facts["relu"].results


# -- random numbers ----------------------------------------------------------------------------------------------------

DRAWS: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "rand": (True, lambda x: torch.rand(4)),
    "rand_like": (True, lambda x: torch.rand_like(x)),
    "randn": (True, lambda x: torch.randn(4)),
    "randint": (True, lambda x: torch.randint(3, (4,))),
    "randperm": (True, lambda x: torch.randperm(4)),
    "normal_": (True, lambda x: x.normal_()),
    "bernoulli": (True, lambda x: torch.bernoulli(x.sigmoid())),
    "multinomial": (True, lambda x: x.multinomial(2)),
    "exponential_": (True, lambda x: x.exponential_()),
    "dropout": (True, lambda x: F.dropout(x, 0.5, True)),
    "dropout2d": (True, lambda x: F.dropout2d(x[None, None], 0.5, True)),
    "rrelu": (True, lambda x: F.rrelu(-x, training=True)),
    "attention with dropout": (
        True,
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    ),
    "random numbers within vmap": (True, lambda x: torch.vmap(lambda r: F.dropout(r, 0.5, True), randomness="same")(x)),
    "random numbers within a checkpoint": (
        True,
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: F.dropout(y, 0.5, True), x, use_reentrant=False),
    ),
    "relu": (False, lambda x: torch.relu(x)),
    "empty": (False, lambda x: torch.empty(4) is None or x + 1),
    "dropout that drops nothing": (False, lambda x: F.dropout(x, 0.5, False)),
    "dropout of probability 0": (False, lambda x: F.dropout(x, 0.0, True)),
    "attention without dropout": (False, lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
}


@pytest.mark.parametrize("draws, fn", DRAWS.values(), ids=DRAWS)
def test_who_draws_random_numbers_is_known(facts_of: Collect, draws: bool, fn: Callable[[Tensor], Any]) -> None:
    """Against a real call."""
    before = torch.get_rng_state()
    fn(x().sigmoid())
    assert draws == (not torch.equal(torch.get_rng_state(), before))
    facts = facts_of(fn, x().sigmoid())
    assert draws == any(RANDOM_STATE in node.writes for node in facts.graph.facts.values())


def test_bernoulli_of_probability_0_draws(facts_of: Collect) -> None:
    """It draws, and ignores what it drew: the next random number is another one."""
    before = torch.get_rng_state()
    torch.ones(4).bernoulli_(0.0)
    assert not torch.equal(torch.get_rng_state(), before)
    assert RANDOM_STATE in facts_of(lambda x: torch.relu(x).bernoulli_(0.0), x())[".bernoulli_"].writes
