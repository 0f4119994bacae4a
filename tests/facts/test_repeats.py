"""Nodes that are equal to an earlier one are not run on fakes again, and have the facts that a run would have given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sympy import expand, sympify
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.compat import recorder
from bcg_compiler.facts import NodeFacts
from bcg_compiler.facts.repeats import Again, Repeats
from bcg_compiler.facts.roots import Roots

Facts = Callable[..., Any]


class Block(nn.Module):
    """Attention, norm and a gated linear layer, with a cache that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32)
        self.norm = nn.RMSNorm(16)
        self.register_buffer("cache", torch.zeros(2, 64, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        self.cache[:, : k.shape[2]] = k[:, 0]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(F.dropout(mixed.transpose(1, 2).flatten(2), 0.1, self.training))
        a, b = self.up(x).split(16, -1)
        return x.add_(F.silu(a) * b) * x.float().pow(2).mean(-1, keepdim=True).rsqrt()


def layers(x: Tensor, blocks: nn.ModuleList) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def by_value(facts: NodeFacts) -> NodeFacts:
    """Symbolic sizes of storages are the same number in several ways, after how often torch was asked."""
    return replace(
        facts, allocates=tuple(replace(new, bytes=str(expand(sympify(new.bytes)))) for new in facts.allocates)
    )


@pytest.mark.parametrize("open_sizes", [False, True])
def test_facts_are_those_of_a_run(facts_of: Facts, monkeypatch: pytest.MonkeyPatch, open_sizes: bool) -> None:
    blocks = nn.ModuleList(Block() for _ in range(3))
    x = torch.randn(2, 8, 16)
    if open_sizes:
        torch._dynamo.mark_dynamic(x, 1)
    found = facts_of(layers, x, blocks)
    torch.compiler.reset()
    monkeypatch.setattr(Repeats, "again", lambda self, call, given: None)
    wanted = facts_of(layers, x, blocks)
    assert [*map(by_value, found.graph.facts.values())] == [*map(by_value, wanted.graph.facts.values())]
    assert [*found.graph.input_facts.values()] == [*wanted.graph.input_facts.values()]
    assert found.graph.rows == wanted.graph.rows and found.graph.written == wanted.graph.written
    for one, other in zip(found.graph.fakes.values(), wanted.graph.fakes.values(), strict=True):
        if isinstance(one, Tensor):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_equal_layers_are_run_once(facts_of: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    dispatch = recorder.OpRecorder.__torch_dispatch__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(recorder.OpRecorder, "__torch_dispatch__", counted)
    counts = []
    for depth in (2, 6):
        torch.compiler.reset()
        runs.clear()
        facts_of(layers, torch.randn(2, 8, 16), nn.ModuleList(Block() for _ in range(depth)))
        counts.append(len(runs))
    # The items of a tuple dispatch nothing; setitem of a Python number, of which there is none here, would.
    assert counts[0] == counts[1]


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that were taken from an earlier node."""
    found: list[str] = []
    again = Repeats.again

    def noted(self: Repeats, call: Any, given: Any) -> Again | None:
        one = again(self, call, given)
        if one is not None:
            found.append(one.pattern.facts.op)
        return one

    monkeypatch.setattr(Repeats, "again", noted)
    return found


def constants(x: Tensor, one: Any, other: Any) -> tuple[Tensor, Tensor]:
    return torch.add(x, one), torch.add(x, other)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (1.0, 2.0), (1, 1 + 0j)])
def test_constants_are_told_by_type_and_value(facts_of: Facts, repeats: list[str], one: Any, other: Any) -> None:
    found = facts_of(constants, torch.ones(3, dtype=torch.int32), one, other)
    assert not repeats
    wanted = [str(torch.add(torch.ones(3, dtype=torch.int32), c).dtype).removeprefix("torch.") for c in (one, other)]
    assert [f.specs[0].dtype for f in found.all("add")] == wanted


LOOKS: dict[str, tuple[Tensor, Tensor]] = {
    "size": (torch.ones(2, 4), torch.ones(2, 5)),
    "stride": (torch.ones(4, 4), torch.ones(4, 4).t()),
    "dtype": (torch.ones(4), torch.ones(4, dtype=torch.int32)),
    "complex": (torch.ones(4), torch.ones(4, dtype=torch.complex64)),
}


@pytest.mark.parametrize("what", LOOKS)
def test_what_looks_different_is_run(facts_of: Facts, repeats: list[str], what: str) -> None:
    found = facts_of(lambda a, b: (a.clone(), b.clone(), b.t()), *LOOKS[what])
    assert not repeats
    for facts, given in zip(found.all(".clone"), LOOKS[what], strict=True):
        made = given.clone()
        spec = facts.specs[0]
        assert (spec.shape, spec.strides) == (tuple(map(str, made.shape)), tuple(map(str, made.stride())))


def test_views_at_other_places_of_other_storages_are_run(facts_of: Facts, repeats: list[str]) -> None:
    found = facts_of(lambda x, y: (x.sin(), y[:4].sin(), y[4:].sin(), y[4:].sin()), torch.ones(4), torch.ones(8))
    assert repeats.count(".sin") == 1
    assert len({root for facts in found.all(".sin") for root in facts.results}) == 4


def test_arguments_that_are_one_tensor_or_share_a_storage_are_told_apart(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * y, x * x, x[0] * x[1], x[0] * y[1]

    facts_of(fn, torch.ones(2, 2), torch.ones(2, 2))
    assert "mul" not in repeats


def test_a_repeat_has_storages_of_its_own(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = x.sin(), y.sin()
        return a.view(4), b.view(4), b.add_(1)

    found = facts_of(fn, torch.ones(2, 2), torch.ones(2, 2))
    assert repeats == [".sin", ".view"]
    first, second = found.all(".sin")
    assert not first.results & second.results and second.fresh == second.results
    assert [f.results for f in found.all(".view")] == [first.results, second.results]
    assert found[".add_"].writes == second.results
    assert found.given("x").results == first.reads & found.given("x").results
    assert second.reads == found.given("y").results
    values = {f.ordinal: n for n, f in found.graph.facts.items()}
    one, other = (found.graph.fakes[values[f.ordinal]] for f in (first, second))
    assert one is not other and one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_a_repeated_write_is_into_its_own_argument(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        x.add_(1)
        y.add_(1)

    found = facts_of(fn, torch.ones(2), torch.ones(2))
    assert repeats == [".add_"]
    # All inputs that a graph writes count as one: what is written is told by the results.
    assert [f.results for f in found.all(".add_")] == [found.given("x").results, found.given("y").results]


def test_what_changes_a_shape_is_run_and_seen(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x + 1, x + 1
        a.unsqueeze_(0)
        b.unsqueeze_(0)
        return a.sum(0), b.sum(0), a.sum(0), (x + 1).sum(0)

    found = facts_of(fn, torch.ones(2, 2))
    assert ".unsqueeze_" not in repeats
    assert [f.specs[0].shape for f in found.all(".sum")] == [("2", "2")] * 3 + [("2",)]
    assert [f.reshapes for f in found.all(".unsqueeze_")] == [f.results for f in found.all("add")[:2]]


def test_what_may_change_a_shape_is_known_of_its_own_argument(facts_of: Facts, repeats: list[str]) -> None:
    found = facts_of(lambda x, y: (x.sin().squeeze_(0), y.sin().squeeze_(0)), torch.ones(2, 2), torch.ones(2, 2))
    assert [f.reshapes for f in found.all(".squeeze_")] == [f.results for f in found.all(".sin")]


def test_modes_are_part_of_a_call(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            b = x @ w
        return a, b, x @ w

    found = facts_of(fn, torch.ones(2, 2), torch.ones(2, 2))
    assert [f.specs[0].dtype for f in found.all("matmul")] == ["float32", "bfloat16", "float32"]
    assert len(repeats) == 1


def test_sizes_that_are_different_symbols_are_told_apart(facts_of: Facts, repeats: list[str]) -> None:
    x, y = torch.ones(4), torch.ones(5)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 0)
    found = facts_of(lambda x, y: (x.sin(), y.sin(), x.sin()), x, y)
    one, other, again = (f.specs[0].shape for f in found.all(".sin"))
    assert one == again != other
    assert repeats == [".sin"]


def test_sizes_read_from_data_are_new_each_time(facts_of: Facts, repeats: list[str]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = facts_of(lambda x, y: (x.nonzero(), y.nonzero()), torch.ones(4), torch.ones(4))
    assert not repeats
    one, other = (f.specs[0].shape for f in found.all(".nonzero"))
    assert one != other


def test_a_size_is_read_anew_after_a_write_by_a_repeat(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        first = x.nonzero()
        x.logical_not_()
        second = x.nonzero()
        x.logical_not_()
        return first, second, x.nonzero(), x.nonzero()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = facts_of(fn, torch.ones(4, dtype=torch.bool))
    assert repeats == [".logical_not_"]
    sizes = [f.specs[0].shape[0] for f in found.all(".nonzero")]
    assert len(set(sizes[:3])) == 3 and sizes[2] == sizes[3]


def test_a_size_is_read_anew_after_a_write_through_a_view_by_a_repeat(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        one, other = x.view(-1), y.view(-1)
        first, second = y.nonzero(), other.nonzero()
        one.logical_not_()
        again = y.nonzero(), other.nonzero()
        other.logical_not_()
        return first, second, *again, y.nonzero(), other.nonzero()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = facts_of(fn, torch.ones(4, 1, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool))
    assert repeats == [".view", ".logical_not_"]
    first, second, *kept, last, through_view = (f.specs[0].shape[0] for f in found.all(".nonzero"))
    assert kept == [first, second]
    assert len({first, second, last, through_view}) == 4


def test_attention_kernels_are_part_of_a_call(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        one = F.scaled_dot_product_attention(x, x, x)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return one, F.scaled_dot_product_attention(x, x, x)

    found = facts_of(fn, torch.ones(1, 2, 4, 4))
    assert not repeats
    chosen, plain = found.all("scaled_dot_product_attention")
    assert chosen.aten != plain.aten


def test_random_numbers_are_ordered_in_repeats_too(facts_of: Facts, repeats: list[str]) -> None:
    found = facts_of(lambda x, y: (torch.rand_like(x), torch.rand_like(y)), torch.ones(4), torch.ones(4))
    assert repeats == ["rand_like"]
    one, other = found.all("rand_like")
    assert one.writes == other.writes != frozenset()


def test_dropout_may_give_its_own_argument(facts_of: Facts, repeats: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(x.sin(), 0.5, False), F.dropout(y.sin(), 0.5, False)

    found = facts_of(fn, torch.ones(4), torch.ones(4))
    assert "dropout" in repeats
    for given, facts in zip(found.all(".sin"), found.all("dropout"), strict=True):
        assert given.results <= facts.results
    assert not found.all(".sin")[0].results & found.all("dropout")[1].results


@bcg.eager_break(fake=torch.empty_like)
def stop(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("bcg_tests_repeats::unseen", mutates_args=())
def unseen(x: Tensor) -> Tensor:
    return x.clone()


unseen.register_fake(torch.empty_like)


@torch.compiler.allow_in_graph
def called(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("fn", [stop, unseen, called])
def test_bodies_that_are_not_seen_are_asked_each_time(facts_of: Facts, repeats: list[str], fn: Any) -> None:
    facts_of(lambda x, y: (fn(x), fn(y)), torch.ones(4), torch.ones(4))
    assert set(repeats) <= {"getitem"}  # of what a break gives


def test_memory_put_behind_a_tensor_is_nobody_elses() -> None:
    """The storage that ``set_`` had taken from a tensor was let go of: its address, and so its root, went to others."""
    roots = Roots()
    tensor = torch.ones(4)
    known = roots.of([tensor])
    tensor.set_(torch.ones(4))
    others = [torch.ones(4) for _ in range(100)]
    assert all(not known & roots.of([other]) for other in others)
