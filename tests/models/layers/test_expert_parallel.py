"""What all-to-all backends declare, how a break uses them, and DeepEP's adapter against its documented signatures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bcg_compiler as bcg
from bcg_compiler.models import serving
from bcg_compiler.models.layers.all_to_all import Received, Shard, SingleRank
from bcg_compiler.models.layers.all_to_all_deepep import DeepEPAllToAll
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.expert_parallel import open_all_to_all
from bcg_compiler.models.layers.moe import ExpertParallel, MoE, Routing
from bcg_compiler.models.layers.pages import PagePool

HIDDEN, WIDTH, EXPERTS = 16, 8, 8
ROUTING = Routing(
    experts=EXPERTS, chosen=3, groups=1, best_groups=1, bias_corrected=False, normalised=True, factor=1.0
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def anew(clean: None) -> None:
    torch.compiler.reset()


class Spy(SingleRank):
    """A backend of the user's own, of one rank, that writes down what is done with it."""

    bucket_multiple = 8
    reserve_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__(EXPERTS)
        self.events: list[str] = []
        self.fails = False

    def stub(self, *args: Tensor) -> None:
        self.events.append("stub")
        args[-1].zero_()

    def barrier(self) -> None:
        self.events.append("barrier")

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Received:
        self.events.append(f"dispatch {len(hidden)} {bcg.current_context().all_to_all_mode}")
        if self.fails:
            raise RuntimeError("a link is down")
        return super().dispatch(hidden, ids, weights)

    def combine(self, rows: Tensor, received: Received, out: Tensor) -> None:
        self.events.append(f"combine {len(out)}")
        super().combine(rows, received, out)


class Layers(torch.nn.Module):
    def __init__(self, backend: Any, count: int = 2) -> None:
        super().__init__()
        parallel = ExpertParallel.over(backend)
        self.layers = torch.nn.ModuleList(MoE(HIDDEN, WIDTH, 1, ROUTING, parallel) for _ in range(count))
        for parameter in self.parameters():
            parameter.normal_(0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x * 2)
        return x


def called(model: Any, x: Tensor) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(x, 0)
    with PagePool(8, 8).prefill({0: len(x)}).published():
        return model(x)


# -- the break ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("anew")
def test_a_capture_has_barrier_and_stub_of_the_backend_and_replays_have_the_rest() -> None:
    spy = Spy()
    model = Layers(spy)
    options = dict(capture="emulated", ladder=bcg.Ladder([8, 16]), max_padding_factor=16)
    compiled = torch.compile(model, backend="bcg", fullgraph=True, options=options)
    called(compiled, torch.randn(5, HIDDEN))
    spy.events.clear()
    bcg.capture(compiled, progress=False)
    assert spy.events == ["barrier", "stub"] * 2 * 2
    for n in (3, 9):
        x = torch.randn(n, HIDDEN)
        spy.events.clear()
        found = called(compiled, x)
        assert spy.events == [f"dispatch {n} normal", f"combine {n}"] * 2
        torch.testing.assert_close(found, called(model, x))
    (program,) = bcg.programs_of(compiled)
    assert program.replays == 2 and program.plan is not None
    assert program.plan.reasons()["a2a_moe"] == 2


@pytest.mark.usefixtures("anew")
def test_the_ladder_and_the_forecast_follow_the_backend() -> None:
    options = dict(capture="emulated", ladder=bcg.Ladder([4, 12], given=False))
    compiled = torch.compile(Layers(Spy()), backend="bcg", fullgraph=True, options=options)
    called(compiled, torch.randn(5, HIDDEN))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None and program.plan.padding is not None
    assert program.plan.padding.buckets == (8, 16)
    assert [(r.name.rpartition(".")[2], r.bytes) for r in program.plan.reserves] == [("routed_experts", 1 << 20)]


@pytest.mark.usefixtures("anew")
def test_the_output_stands_in_the_segment_before_and_only_plain_routing_crosses() -> None:
    compiled = torch.compile(Layers(Spy(), 1), backend="bcg", fullgraph=True)
    called(compiled, torch.randn(5, HIDDEN))
    plan = bcg.programs_of(compiled)[0].plan
    assert plan is not None and [step.kind for step in plan.steps] == ["segment", "break", "segment"]
    assert "empty_like" in {node.op for node in plan.steps[0].nodes} and plan.bridges == ()
    crossing = [plan.value(o) for o in plan.steps[1].inputs]
    assert {spec.dtype for value in crossing for spec in value.specs} == {"float32", "int64"}
    assert len([value for value in crossing if value.kind == "result"]) == 4  # rows, ids, weights, output


def test_the_mode_is_set_for_the_body_only_exceptions_included() -> None:
    spy = Spy()
    model = Layers(spy, 1)
    with bcg.forward_context(all_to_all_mode="low_latency"):
        called(model, torch.randn(5, HIDDEN))
        assert bcg.current_context().all_to_all_mode == "low_latency"
        spy.fails = True
        with pytest.raises(RuntimeError, match="a link is down"):
            called(model, torch.randn(5, HIDDEN))
        assert bcg.current_context().all_to_all_mode == "low_latency"
    assert spy.events == ["dispatch 5 normal", "combine 5", "dispatch 5 normal"]


# -- which backend -----------------------------------------------------------------------------------------------------


def undeclared(*names: str) -> Any:
    spy = Spy()
    for name in names:
        setattr(spy, name, None)
    return spy


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("deep_ep", "no all-to-all backend 'deep_ep'; did you mean 'deepep'"),
        ("mooncake", "there are none, torch, deepep"),
        ("torch", "needs a process group"),
        (SimpleNamespace(dispatch=None), "SimpleNamespace is refused: it does not declare shard, mode, stub, barrier"),
        (undeclared("reserve_bytes", "barrier"), "Spy is refused: it does not declare barrier, reserve_bytes"),
        (SimpleNamespace(**{**vars(Spy), "mode": "low_latency", "shard": Shard(8)}), "'low_latency' is for decoding"),
        (SingleRank(16), "for 16 experts, and the model has 8"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused_with_the_reason(asked: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        open_all_to_all(asked, experts=EXPERTS, hidden=HIDDEN)


def test_a_backend_that_declares_itself_is_taken() -> None:
    spy = Spy()
    assert open_all_to_all(spy, experts=EXPERTS, hidden=HIDDEN) is spy
    assert isinstance(open_all_to_all("none", experts=EXPERTS, hidden=HIDDEN), SingleRank)


def test_none_is_for_one_rank() -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ModelError, match="is for one rank, and the group has 2"):
        open_all_to_all("none", experts=EXPERTS, hidden=HIDDEN, group=group)


def test_a_family_without_expert_parallelism_says_so() -> None:
    with pytest.raises(
        ModelError, match="experts of a gpt_oss are not shared out over ranks yet: leave out all_to_all"
    ):
        serving.empty({"model_type": "gpt_oss"}, pages=1, all_to_all="torch")


def test_experts_are_shared_out_evenly_or_not_at_all() -> None:
    assert [(s.first, s.count) for s in (Shard(8, 4, rank) for rank in range(4))] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    with pytest.raises(ModelError, match=r"shared out evenly over 3 ranks\. .* divides them: 1, 2, 4, 8"):
        Shard(8, 3)


# -- DeepEP ------------------------------------------------------------------------------------------------------------


class Wire:
    """What the ranks of the fake hand each other: each is a thread."""

    def __init__(self, ranks: int) -> None:
        self.there: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=30)

    def all_gather(self, rank: int, given: Any) -> list[Any]:
        self.there[rank] = given
        self._barrier.wait()
        gathered = list(self.there)
        self._barrier.wait()
        return gathered


class Config:
    def __init__(self, nvl: int, rdma: int) -> None:
        self.nvl, self.rdma = nvl, rdma

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.nvl * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.rdma * hidden_bytes


class Buffer:
    """``deep_ep.Buffer`` of release 1.2.1 in plain torch: the signatures, types and shapes that its docstrings give."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **kwargs: Any) -> None:
        self.group, self.bytes = group, (num_nvl_bytes, num_rdma_bytes)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(3, 5)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(7, 2)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        self.experts, ranks = num_experts, self.group.size()
        owners = topk_idx // (num_experts // ranks)
        in_rank = torch.zeros(len(topk_idx), ranks, dtype=torch.bool).scatter_(1, owners, True)
        per_expert = topk_idx.flatten().bincount(minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        assert topk_weights is not None and topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert topk_idx is not None and is_token_in_rank is not None
        assert num_tokens_per_rank is not None and num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        assert num_tokens_per_expert is not None and num_tokens_per_rdma_rank is None
        rank, ranks = self.group.rank(), self.group.size()
        sent = self.group.wire.all_gather(rank, (x, topk_idx, topk_weights, is_token_in_rank))
        rows = [(x[mine[:, rank]], ids[mine[:, rank]], w[mine[:, rank]]) for x, ids, w, mine in sent]
        received, ids, weights = (torch.cat(parts) for parts in zip(*rows, strict=True))
        held = self.experts // ranks
        here = ids // held == rank
        counts = ids[here].sub(rank * held).bincount(minlength=held).tolist()
        handle = (is_token_in_rank, [len(part[0]) for part in rows])
        return received, torch.where(here, ids - rank * held, -1), weights * here, counts, handle, None

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        in_rank, got = handle
        rank = self.group.rank()
        back = self.group.wire.all_gather(rank, x.split(got))
        combined = torch.zeros(len(in_rank), x.shape[1])
        for at, parts in enumerate(back):
            combined[in_rank[:, at]] += parts[rank].float()
        return combined.to(x.dtype), None, None


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("deep_ep")
    module.Buffer, module.topk_idx_t = Buffer, torch.int64
    monkeypatch.setitem(sys.modules, "deep_ep", module)


def groups(ranks: int) -> list[Any]:
    wire = Wire(ranks)
    return [SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank, wire=wire) for rank in range(ranks)]


def on_threads(calls: list[Callable[[], Tensor]]) -> list[Tensor]:
    found: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        with torch.no_grad():
            found[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepep_s_dispatch_and_combine_give_the_sums_of_one_rank(ranks: int) -> None:
    alone = Layers(SingleRank(EXPERTS), 1).bfloat16()
    alone.layers[0].gate.float()
    calls, wanted = [], []
    for rank, group in enumerate(groups(ranks)):
        backend: Any = open_all_to_all("deepep", experts=EXPERTS, hidden=HIDDEN, group=group)
        model = Layers(backend, 1).bfloat16()
        model.layers[0].gate.float()
        for (name, mine), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
            mine.copy_(whole.tensor_split(ranks)[rank] if "experts." in name and "shared" not in name else whole)
        x = torch.randn(3 + 4 * rank, HIDDEN).bfloat16()
        calls.append(lambda model=model, x=x: called(model, x))
        wanted.append(called(alone, x))
    for found, expected in zip(on_threads(calls), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("deep_ep")
def test_deepep_s_buffers_are_as_large_as_its_settings_ask_for() -> None:
    (group,) = groups(1)
    backend: Any = DeepEPAllToAll(EXPERTS, HIDDEN, group)
    assert backend._buffer.bytes == (7 * HIDDEN * 2, 5 * HIDDEN * 2)
    assert (backend.bucket_multiple, backend.mode, backend.reserve_bytes) == (8, "normal", 1 << 30)


@pytest.mark.usefixtures("deep_ep")
def test_deepep_refuses_rows_of_another_type_and_experts_that_do_not_divide() -> None:
    (group,) = groups(1)
    with pytest.raises(ModelError, match=r"rows of bfloat16, and the model's are torch.float32"):
        called(Layers(DeepEPAllToAll(EXPERTS, HIDDEN, group), 1), torch.randn(3, HIDDEN))
    with pytest.raises(ModelError, match="8 experts cannot be shared out evenly over 3 ranks"):
        DeepEPAllToAll(EXPERTS, HIDDEN, groups(3)[0])


def test_deepep_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ModelError, match="needs the package deep_ep"):
        DeepEPAllToAll(EXPERTS, HIDDEN, groups(1)[0])


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_torch_backend_of_one_rank_gives_the_bits_of_none() -> None:
    backend = open_all_to_all("torch", experts=EXPERTS, hidden=HIDDEN)
    model, alone = Layers(backend), Layers(SingleRank(EXPERTS))
    alone.load_state_dict(model.state_dict())
    x = torch.randn(7, HIDDEN)
    assert torch.equal(called(model, x), called(alone, x))
