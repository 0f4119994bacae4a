"""Pipeline stages on ranks of their own give the logits of one process, compiled or not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import bcg_compiler as bcg
from bcg_compiler.distributed.pipeline import PipelineProxy, ProxyForm, Stage, exchange_stages, receive, send
from bcg_compiler.errors import PipelineError
from bcg_compiler.models import serving

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]

SIZES = dict(pages=32, page_size=8)
FEW, MANY = 5, 50
BUCKETS = (8, 16, 40)

#: zoo name → fields that differ. With five layers, all borders of two and of three stages are in front of a layer that
#: shares the tokens of a layer before it: those of one stage go through another.
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(num_hidden_layers=5),
    "glm_moe_dsa": dict(
        num_hidden_layers=5, index_topk=8, indexer_types=["full", "full", "shared", "shared", "shared"]
    ),
    "gpt_oss": dict(num_hidden_layers=5, layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"]),
}


class Chunk(NamedTuple):
    """One batch: new tokens of each request, the ids of all of them, and the requests that are over before it."""

    over: tuple[int, ...]
    requests: dict[int, int]
    ids: torch.Tensor


def batches(count: int) -> Iterator[Chunk]:
    """Random batches, the same on all ranks: of one to three of three requests, which grow chunk by chunk."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    length = dict.fromkeys(range(3), 0)
    for _ in range(count):
        chosen = torch.randperm(3, generator=generator)[: draw(1, 4)].tolist()
        new = {i: draw(1, 13) for i in chosen}
        if sum(new.values()) == 1:  # a batch of one token is another graph
            new[chosen[0]] = 2
        over = tuple(i for i, n in new.items() if length[i] and length[i] + n > 40)
        length |= {i: n + (0 if i in over else length[i]) for i, n in new.items()}
        yield Chunk(over, new, torch.randint(3, 256, (sum(new.values()),), generator=generator))


def published(pool: Any, chunk: Chunk) -> Any:
    for request in chunk.over:
        pool.free(request)
    return pool.prefill(chunk.requests)


def checkpoint(name: str, count: int, folder: Path) -> None:
    """A model of transformers in ``folder``, the logits of one process, and how many batches to run."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import zoo

    theirs: Any = zoo.build(name, config=MODELS[name]).model
    theirs.save_pretrained(folder)
    whole: Any = serving.load(folder, **SIZES)
    pool = serving.page_pool(whole)
    wanted = []
    with torch.no_grad():
        for chunk in batches(count):
            batch = published(pool, chunk)
            with batch.published():
                wanted.append(whole(chunk.ids, batch.positions))
    torch.save(wanted, folder / "wanted.pt")


class Rank:
    """One stage: takes part in every batch, and looks at the logits where they come out."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.wanted = torch.load(folder / "wanted.pt")
        self.stage = Stage.even(5, ranks, rank)
        self.model: Any = serving.load(folder, stage=self.stage, **SIZES)

    def run(self, called: Any) -> None:
        pool = serving.page_pool(self.model)
        seen = []
        for chunk, wanted in zip(batches(len(self.wanted)), self.wanted, strict=True):
            batch = published(pool, chunk)
            given: Any = chunk.ids
            if not self.stage.is_first:
                given = receive(self.model.takes, batch.tokens, self.stage.index - 1)
            tensors = [given] if self.stage.is_first else [tensor for _, tensor in given.tensors()]
            for tensor in (*tensors, batch.positions):
                torch._dynamo.mark_dynamic(tensor, 0)
            with batch.published():
                out = called(given, batch.positions)
            if self.stage.is_last:
                assert (out - wanted).abs().max() <= 1e-4 * wanted.abs().max()
                seen.append(out)
            else:
                assert isinstance(out, PipelineProxy) and out.rows == batch.tokens
                send(out, self.model.gives, self.stage.index + 1)
        assert len(seen) == len(self.wanted) * self.stage.is_last


def stages_agree(rank: int, ranks: int, folder: Path) -> None:
    """Uncompiled, then compiled and replayed in buckets."""
    me = Rank(rank, ranks, folder)
    held = {name.split(".")[2] for name, _ in me.model.named_parameters() if name.startswith("model.layers.")}
    assert held == {str(i) for i in range(me.stage.start, me.stage.end)}
    me.run(me.model)
    options = dict(capture="emulated", ladder=bcg.Ladder(BUCKETS), max_padding_factor=64)
    compiled = torch.compile(me.model, backend="bcg", fullgraph=True, options=options)
    me.run(compiled)
    (program,) = bcg.programs_of(compiled)
    assert program.eager_runs == {"warm_up": 1} and program.replays == len(me.wanted) - 1
    bound = {p.name: p.changes for p in program.plan.passes}["bind_pp_proxies"]
    assert bound == (0 if me.stage.is_first else len(me.model.takes.wanted()))


CASES = [(name, ranks, MANY) for name in MODELS for ranks in (2, 3)]


@pytest.mark.parametrize(
    ("name", "ranks", "count"),
    [("glm_moe_dsa", 2, FEW), ("gpt_oss", 2, FEW), *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES)],
)
def test_stages_give_the_logits_of_one_process_compiled_or_not(
    name: str, ranks: int, count: int, tmp_path: Path, on_ranks: OnRanks
) -> None:
    checkpoint(name, count, tmp_path)
    on_ranks(ranks, stages_agree)


def proxies_travel(rank: int, ranks: int, folder: Path) -> None:
    """All that a proxy may hold, of a result that is padded and not contiguous; nothing else is sent."""
    form = ProxyForm("stages 0 and 1 of 2", 6, torch.bfloat16, residual=(3, 6), topk=4)
    rows = 5
    padded = PipelineProxy(
        torch.arange(60.0).reshape(6, 10).T.bfloat16(),
        torch.arange(180.0).reshape(10, 3, 6).bfloat16(),
        torch.arange(40, dtype=torch.int32).reshape(10, 4),
    )
    if rank == 0:
        with pytest.raises(PipelineError, match="residual"):  # before anything is sent
            send(PipelineProxy(padded.hidden_states), form, 1)
        send(padded, form, 1, rows=rows)
        return
    found = dict(receive(form, rows, 0).tensors())
    for name, tensor in padded.tensors():
        assert torch.equal(found[name], tensor[:rows]) and found[name].dtype == tensor.dtype


def test_a_proxy_arrives_as_it_was_but_for_padded_rows(on_ranks: OnRanks) -> None:
    on_ranks(2, proxies_travel)


def stages_are_compared(rank: int, ranks: int, folder: Path) -> None:
    even = exchange_stages(Stage.even(5, ranks, rank))
    assert [(stage.start, stage.end) for stage in even] == [(0, 3), (3, 5)]
    mine = Stage(start=2, end=5, layers=5, index=1, stages=2) if rank else even[0]
    with pytest.raises(PipelineError, match=r"Stage 1 of 2 \(start 2, end 5\) begins within Stage 0"):
        exchange_stages(mine)
    other = dist.new_group([0])
    if rank == 0:
        with pytest.raises(PipelineError, match="there are 1 stages"):
            exchange_stages(even[0], other)


def test_ranks_whose_stages_do_not_fit_are_told_on_all_of_them(on_ranks: OnRanks) -> None:
    on_ranks(2, stages_are_compared)
