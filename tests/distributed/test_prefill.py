"""Batches over ranks by ``PrefillRunner``: logits of one process, and the same admission on all ranks that vote."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bcg_compiler import Wanted
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.distributed.rules import Parallel
from bcg_compiler.models import serving
from bcg_compiler.models.layers.pages import PagePool

OnRanks = Callable[[int, Callable[[int, int, Path], None]], None]

SIZES = dict(pages=96, page_size=8)
LADDER = (16, 32, 64, 128)


@pytest.fixture
def run(on_ranks: OnRanks, tmp_path: Path) -> Callable[..., None]:
    """Run a layout over ranks: the configuration is written for them, so that they need not load transformers."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import zoo

    def run(name: str, rounds: int, **sizes: int) -> None:
        model: Any = zoo.build(name, layers=3, device="meta").model
        layout = {size: sizes.get(size, 1) for size in ("dp", "pp", "cp", "ep")}
        given = {"rounds": rounds, "fields": model.config.to_dict(), "sizes": layout}
        (tmp_path / "given.json").write_text(json.dumps(given, default=str))
        on_ranks(layout["dp"] * layout["pp"] * layout["cp"], prefill)

    return run


def prefill(rank: int, ranks: int, folder: Path) -> None:
    """One rank: batches of its replica, against the whole model in this process."""
    given = json.loads((folder / "given.json").read_text())
    fields, sizes = given["fields"], given["sizes"]
    parallel = Parallel(
        **sizes,
        attention_does_cp=True,
        all_to_all="torch" if sizes["ep"] > 1 else "none",
        all_to_all_declared=True,
    )
    joined = Ranks.join(parallel)
    replica = rank // (sizes["pp"] * sizes["cp"])
    alone: Any = serving.build(fields, **SIZES)
    model: Any = serving.build(
        fields, **SIZES, context_parallel=sizes["cp"] > 1, stage=joined.layers(3), **experts(joined)
    )
    runner = serving.runner(
        model, ladder=LADDER, ranks=joined, options={"capture": "emulated", "segment_compiler": "eager"}, timeout=50
    )
    pool, draw = PagePool(**SIZES), random.Random(replica)
    generator = torch.Generator().manual_seed(replica)
    report = runner.capture(pool.idle())
    assert not any(rung.error for rung in report.rungs)
    reasons: Counter[str] = Counter()
    had: dict[int, int] = {}
    for step in range(given["rounds"]):
        requests = draw_requests(draw, step, had)
        batch = pool.prefill(requests) if requests else pool.idle()
        for request, new in requests.items():
            had[request] = had.get(request, 0) + new
        ids = torch.randint(3, 256, (batch.tokens,), generator=generator)
        made = runner(batch, ids, wanted=Wanted(logits="all"))
        reasons[made.admission.reason] += 1
        agree(joined, made.admission.reason)
        if requests:
            with batch.published():
                wanted = alone(ids, batch.positions)
            if joined.after is None:
                assert made.logits is not None
                assert (made.logits - wanted).abs().max() <= 1e-4 * wanted.abs().max(), (step, made.admission)
        for request in [request for request, tokens in had.items() if tokens > 90 or len(had) > 5]:
            pool.free(request)
            del had[request]
    assert reasons[""] and reasons.total() > reasons[""], reasons  # replays, and eager runs
    runner.close()


def draw_requests(draw: random.Random, step: int, had: dict[int, int]) -> dict[int, int]:
    """New tokens of some requests; none now and then, and more than any bucket has."""
    if step % 7 == 5:
        return {}
    if step % 7 == 3:
        return {step: 70, step + 1000: 70}
    requests = {step: draw.randint(1, 40)}
    return requests | {request: draw.randint(1, 12) for request in had if draw.random() < 0.4}


def agree(ranks: Ranks, reason: str) -> None:
    """All ranks that vote together do the same."""
    if ranks.vote is None:
        return
    said: list[str] = [""] * ranks.vote.size()
    dist.all_gather_object(said, reason, group=ranks.vote)
    assert len(set(said)) == 1, said


def experts(ranks: Ranks) -> dict[str, Any]:
    return {} if ranks.experts is None else {"all_to_all": "torch", "group": ranks.experts}


LAYOUTS = [
    ("deepseek_v32", dict(cp=2)),
    ("glm_moe_dsa", dict(cp=2, pp=2)),
    ("deepseek_v3", dict(dp=2, ep=2)),
    pytest.param("gpt_oss", dict(cp=4), marks=pytest.mark.nightly),
    pytest.param("gpt_oss", dict(dp=4), marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", dict(pp=3), marks=pytest.mark.nightly),
    pytest.param("deepseek_v32", dict(dp=4, ep=4), marks=pytest.mark.nightly),
    pytest.param("gpt_oss", dict(dp=2, pp=2), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS)
def test_logits_are_those_of_one_process(run: Callable[..., None], name: str, sizes: dict[str, int]) -> None:
    run(name, 8, **sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss"])
@pytest.mark.parametrize("sizes", [dict(cp=2), dict(cp=4), dict(pp=2), dict(pp=3), dict(cp=2, pp=2), dict(dp=4)])
def test_fifty_batches(run: Callable[..., None], name: str, sizes: dict[str, int]) -> None:
    run(name, 50, **sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("sizes", [dict(dp=2, ep=2), dict(dp=4, ep=4), dict(dp=2, cp=2, ep=2)])
def test_fifty_batches_over_experts(run: Callable[..., None], name: str, sizes: dict[str, int]) -> None:
    run(name, 50, **sizes)
