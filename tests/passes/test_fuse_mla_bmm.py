"""The matmul of absorbed MLA leaves its place between the breaks of indexer and attention, with eager's bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.plan import Plan

HEADS, NOPE, ROPE, LATENT, TOPK = 4, 8, 4, 16, 3


@bcg.eager_break(mutates_args=("topk",), reason="dsa_indexer")
def index(q: Tensor, weights: Tensor, topk: Tensor) -> None:
    scores = (q.sum(-1) * weights) @ weights.T
    topk.copy_(scores.topk(TOPK, dim=-1).indices)


@bcg.eager_break(mutates_args=("q", "topk"), reason="dsa_indexer")
def rotate_and_index(q: Tensor, weights: Tensor, topk: Tensor) -> None:
    """Its rotary embedding is in place."""
    q.mul_(1.5)
    index(q, weights, topk)


@bcg.eager_break(fake=torch.empty_like, reason="dsa_indexer")
def rotated(q: Tensor) -> Tensor:
    return q * 1.5


@bcg.eager_break(mutates_args=("out",), reason="attention")
def attend(absorbed: Tensor, rope: Tensor, topk: Tensor, out: Tensor) -> None:
    scores = torch.cat([absorbed, rope], -1).flatten(1)
    out.copy_((scores @ scores.T).gather(1, topk).sum(-1, keepdim=True) * absorbed.sum(1))


@torch.library.custom_op("bcg_tests_mla::scaled_bmm", mutates_args=())
def scaled_bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


scaled_bmm.register_fake(torch.bmm)

#: q_nope [T, H, nope] and w_kc [H, nope, latent] to [T, H, latent], in the spellings of the field.
SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda q, w: torch.bmm(q.transpose(0, 1), w).transpose(0, 1),
    "method": lambda q, w: q.transpose(0, 1).bmm(w).transpose(0, 1),
    "matmul": lambda q, w: torch.matmul(q.transpose(0, 1), w).transpose(0, 1),
    "@": lambda q, w: (q.transpose(0, 1) @ w).transpose(0, 1),
    "einsum": lambda q, w: torch.einsum("thd,hdr->thr", q, w),
}


class Mla(nn.Module):
    """One layer: ``held`` says what w_kc is, ``variant`` what is odd about the forward."""

    def __init__(self, spelling: str = "bmm", held: str = "plain", variant: str = "") -> None:
        super().__init__()
        self.q, self.gate = nn.Linear(12, HEADS * (NOPE + ROPE)), nn.Linear(12, HEADS)
        self.o = nn.Linear(LATENT, 12)
        weight = torch.randn(HEADS, NOPE, LATENT) / 4
        if held == "parameter":
            self.w_kc = nn.Parameter(weight)
        elif held == "buffer":
            self.register_buffer("w_kc", weight)
        else:
            self.w_kc = weight
        self.absorb, self.variant = SPELLINGS.get(spelling, scaled), variant

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.sin()
        q = self.q(x).view(-1, HEADS, NOPE + ROPE)
        nope, rope = q.split([NOPE, ROPE], dim=-1)
        topk = torch.empty(x.shape[0], TOPK, dtype=torch.int64)
        out = torch.empty(x.shape[0], LATENT)
        in_place = self.variant in ("in place", "several users", "not alone")
        (rotate_and_index if in_place else index)(q, self.gate(x), topk)
        weight = self.w_kc + self.w_kc.sin() * 0.1 if self.variant == "adapter" else self.w_kc
        absorbed = self.absorb(nope, weight)
        if self.variant == "not alone":
            rope = rope.cos() * topk.sum()
        attend(absorbed, rope, topk, out)
        extra = absorbed.sum(1) if self.variant in ("several users", "moved with users") else 0
        return self.o((out + extra).sin()) + x


def scaled(q: Tensor, w: Tensor) -> Tensor:
    return scaled_bmm(q.transpose(0, 1), w).transpose(0, 1)


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def check(model: nn.Module, **options: Any) -> tuple[Plan, dict[str, Any]]:
    """Four calls equal eager bit for bit; the plan and what the pass says."""
    bcg.reset()
    compiled = torch.compile(model, backend="bcg", options={"capture": "emulated", **options})
    for _ in range(4):
        x = torch.randn(6, 12)
        assert torch.equal(compiled(x), model(x))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and bcg.stats(compiled).replays == 3
    (summary,) = (p for p in program.plan.passes if p.name == "fuse_mla_bmm")
    return program.plan, {"changes": summary.changes, "notes": summary.notes}


def kinds(plan: Plan) -> list[str]:
    return [step.kind for step in plan.steps]


def test_it_goes_before_the_indexer_in_any_spelling_and_the_breaks_join() -> None:
    """The weight is a plain tensor of the module and the indexer is given the query: either may be written unseen."""
    model = Stack([Mla(spelling) for spelling in SPELLINGS])
    plan, said = check(model)
    assert said == {"changes": 5, "notes": ()}
    assert kinds(plan) == ["segment", "break"] * 5 + ["segment"]
    assert dict(plan.reasons()) == {"dsa_indexer": 5, "attention": 5}
    without, _ = check(model, disable_passes=["fuse_mla_bmm"], min_segment_kernels=1)
    assert len(without.segments) == 11 and len(without.breaks) == 10


def test_whatever_holds_the_weight() -> None:
    plan, said = check(Stack([Mla(held=held) for held in ("parameter", "buffer", "plain")]))
    assert said["changes"] == 3 and len(plan.breaks) == 3 and "mla_bmm" not in plan.reasons()


def test_where_the_indexer_writes_the_query_it_runs_inside_of_the_break_in_any_spelling() -> None:
    plan, said = check(Stack([Mla(spelling, variant="in place") for spelling in SPELLINGS]))
    assert said == {"changes": 5, "notes": ()}
    assert kinds(plan) == ["segment", "break"] * 5 + ["segment"]
    assert dict(plan.reasons()) == {"dsa_indexer": 5, "mla_bmm": 5, "attention": 5}


def test_inside_all_but_the_matmul_is_done_once_at_capture() -> None:
    """The view of the query, the buffer and its view are fixed: a replay runs indexer, matmul and attention."""
    plan, _ = check(Mla(variant="in place"))
    (step,) = plan.breaks
    replayed = [node.op.rpartition(".")[2] for node in step.nodes if node.ordinal not in step.fixed]
    assert replayed == ["rotate_and_index", "bmm", "attend"]
    assert {"empty", ".transpose"} <= {node.op for node in step.nodes if node.ordinal in step.fixed}


class RotaryIndexer(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return q.cos() * 1.5


@pytest.mark.parametrize("give", [rotated, RotaryIndexer()], ids=["declared", "marked"])
def test_a_query_that_the_indexer_gives_is_multiplied_behind_it(give: Callable[[Tensor], Tensor]) -> None:
    class Returning(Mla):
        def __init__(self) -> None:
            super().__init__()
            self.give = give

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x + x.sin()).view(-1, HEADS, NOPE + ROPE)
            out, topk = torch.empty(x.shape[0], LATENT), torch.zeros(x.shape[0], TOPK, dtype=torch.int64)
            attend(self.absorb(self.give(q)[..., :NOPE], self.w_kc), q[..., NOPE:], topk, out)
            return self.o(out.sin()) + x

    plan, said = check(Returning(), mark=["dsa_indexer"])
    assert said == {"changes": 1, "notes": ()} and plan.reasons()["mla_bmm"] == 1
    assert len(plan.breaks) == 1


def test_a_result_with_several_users_goes_before_all_the_same() -> None:
    plan, said = check(Mla(variant="moved with users"))
    assert said == {"changes": 1, "notes": ()} and kinds(plan) == ["segment", "break", "segment"]


@pytest.mark.parametrize(
    ("code", "model", "options"),
    [
        ("several_users", Mla(variant="several users"), {}),
        ("not_alone", Mla(variant="not alone"), {}),
        ("computed_weight", Mla(variant="adapter"), {}),
        ("special_kernel", Mla("scaled"), {"capturable": ["bcg_tests_mla::scaled_bmm"]}),
    ],
)
def test_what_is_refused_is_left_as_it_is_and_said_with_its_reason(
    code: str, model: nn.Module, options: dict[str, Any]
) -> None:
    plan, said = check(model, min_segment_kernels=1, **options)
    assert said["changes"] == 0 and [note.partition(":")[0] for note in said["notes"]] == [code]
    without, _ = check(model, min_segment_kernels=1, disable_passes=["fuse_mla_bmm"], **options)
    assert plan.steps == without.steps


def test_an_unusual_product_inside_is_refused_by_its_spelling() -> None:
    SPELLINGS["swapped"] = lambda q, w: torch.einsum("hdr,thd->thr", w, q)
    try:
        model = Mla("swapped", variant="in place")
    finally:
        del SPELLINGS["swapped"]
    _, said = check(model)
    assert said["changes"] == 0 and said["notes"][0].startswith("odd_spelling")


def test_a_break_of_no_declared_kind_is_not_crossed() -> None:
    """Nobody says of it that it does not write the weight."""

    class Other(Mla):
        def forward(self, x: Tensor) -> Tensor:
            x = x + x.sin()
            q = self.q(x).view(-1, HEADS, NOPE + ROPE)
            out, topk = torch.empty(x.shape[0], LATENT), torch.zeros(x.shape[0], TOPK, dtype=torch.int64)
            change(x, self.w_kc)
            attend(SPELLINGS["bmm"](q[..., :NOPE], self.w_kc), q[..., NOPE:], topk, out)
            return self.o(out.sin()) + x

    model = Other()
    start = model.w_kc.clone()
    with torch.no_grad():
        compiled = torch.compile(model, backend="bcg")
        for _ in range(3):
            x = torch.randn(6, 12)
            model.w_kc.copy_(start)
            expected = model(x)
            model.w_kc.copy_(start)
            assert torch.equal(compiled(x), expected)
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None
    assert [(p.changes, p.notes) for p in program.plan.passes if p.name == "fuse_mla_bmm"] == [(0, ())]


@bcg.eager_break(mutates_args=("weight",))
def change(x: Tensor, weight: Tensor) -> None:
    weight.mul_(2)


def test_a_graph_without_such_a_matmul_is_untouched() -> None:
    """Also one that has a batched matmul in front of attention, and no indexer."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(HEADS, NOPE, LATENT))

        def forward(self, x: Tensor) -> Tensor:
            out, topk = torch.empty(x.shape[0], LATENT), torch.zeros(x.shape[0], TOPK, dtype=torch.int64)
            q = x.sin().repeat(1, 4)[:, : HEADS * (NOPE + ROPE)].view(-1, HEADS, NOPE + ROPE)
            attend(SPELLINGS["bmm"](q[..., :NOPE], self.w), q[..., NOPE:], topk, out)
            return out.sin() + 1

    plan, said = check(Plain())
    without, _ = check(Plain(), disable_passes=["fuse_mla_bmm"])
    assert said == {"changes": 0, "notes": ()} and plan.steps == without.steps


@torch.no_grad()
@pytest.mark.parametrize("variant", ["", "in place"])
def test_the_size_of_the_buffer_follows_an_open_number_of_tokens(variant: str) -> None:
    bcg.reset()
    model = Mla("einsum", variant=variant)
    compiled = torch.compile(model, backend="bcg", dynamic=True)
    for tokens in (5, 5, 8, 8, 11, 5):
        x = torch.randn(tokens, 12)
        assert torch.equal(compiled(x), model(x))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and bcg.stats(compiled).replays == 3
    assert [p.changes for p in program.plan.passes if p.name == "fuse_mla_bmm"] == [1]
