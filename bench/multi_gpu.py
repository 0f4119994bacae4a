"""Prefill over ranks: each layout that so many ranks allow, captured, replayed, checked and timed.

    torchrun --nproc-per-node N bench/multi_gpu.py [--device cuda|cpu] [--layers 8] [--tokens 2048] [--json FILE]

Tensors travel over NCCL, votes over gloo; with ``--device cpu`` everything over gloo, and small. On each rank the whole
model runs, too, uncompiled, and logits are compared with its own: in float32, and on a GPU in bfloat16. Then ranks are
made to disagree, and what all of them decide is checked. Wall time is the median of 20 forwards, replayed and
uncompiled, on the slowest rank; all ranks begin each together, on an idle device. Exits with 1 if a check fails.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any
from unittest import mock

# NVLink multicast asks for rights that a container often lacks; and Inductor's processes would go on while we time.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist

import bcg_compiler as bcg
from bcg_compiler.distributed.launch import Launch
from bcg_compiler.distributed.pipeline import PipelineProxy, receive, send
from bcg_compiler.distributed.ranks import Ranks
from bcg_compiler.errors import RankError
from bcg_compiler.models import serving
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.pages import PagePool
from bcg_compiler.runtime.program import Program

TIMEOUT = 120.0
REPEATS = 20

#: How far logits may be from those of one rank: the norm of the difference, over their norm.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def fields(family: str, layers: int, small: bool, chosen: int) -> dict[str, Any]:
    """A configuration of the family's structure. ``chosen``: tokens that an indexer chooses."""
    wide, experts = (64, 8) if small else (2048, 16)
    heads, width = (4, 16) if small else (16, 128)
    common = {
        "model_type": family,
        "vocab_size": 256 if small else 32000,
        "hidden_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
    }
    if family == "gpt_oss":
        return common | {
            "num_key_value_heads": heads // 2,
            "head_dim": width // 2,
            "sliding_window": 8 if small else 128,
            "num_local_experts": experts,
            "intermediate_size": wide // 2,
        }
    return common | {
        "q_lora_rank": wide // 4,
        "kv_lora_rank": 32 if small else 512,
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": width // 2,
        "v_head_dim": width,
        "index_topk": chosen,
        "index_n_heads": heads,
        "index_head_dim": 2 * width if small else width,
        "first_k_dense_replace": 1,
        "intermediate_size": 2 * wide,
        "moe_intermediate_size": wide // 4,
        "n_shared_experts": 1,
        "n_routed_experts": experts,
        "n_group": 1,
        "topk_group": 1,
    }


def layouts(ranks: int, layers: int, small: bool) -> Iterator[tuple[str, dict[str, int]]]:
    """Families and sizes of layouts over so many ranks."""
    experts = fields("deepseek_v32", 1, small, 1)["n_routed_experts"]
    halves = ranks // 2
    for family in ("deepseek_v32", "gpt_oss"):
        if ranks == 1:
            yield family, {}
            continue
        yield family, {"cp": ranks}
        if ranks <= layers:
            yield family, {"pp": ranks}
        yield family, {"dp": ranks}
        if ranks % 2 == 0 and halves > 1:
            yield family, {"cp": halves, "pp": 2}
        if family == "deepseek_v32" and experts % ranks == 0:
            yield family, {"dp": ranks, "ep": ranks}
            if ranks % 2 == 0 and halves > 1:
                yield family, {"dp": halves, "cp": 2, "ep": ranks}


class Checks:
    """What was found, on this rank."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.count = 0

    def __call__(self, holds: bool, what: str) -> None:
        self.count += 1
        if not holds:
            self.failed.append(f"rank {_rank()}: {what}")


class Prefill:
    """The share of this rank of one model, and all of the model beside it."""

    def __init__(self, args: argparse.Namespace, family: str, joined: Ranks, dtype: torch.dtype) -> None:
        self.joined, self.dtype, self.device = joined, dtype, args.device
        self.tokens, self.layers, self.family, self.small = args.tokens, args.layers, family, args.small
        page = 16 if args.small else 64
        self.sizes = dict(pages=4 * -(-2 * self.tokens // page) + 8, page_size=page)
        self.whole = self._build(args.layers)
        self.held = self._build(args.layers, shared=True)
        self.ladder = (self.tokens // 4, self.tokens // 2, self.tokens)
        self.pool = PagePool(**self.sizes, device=self.device)
        self.draw = torch.Generator().manual_seed(_replica(joined))

    def _build(self, layers: int, shared: bool = False) -> Any:
        # In float32 all tokens and all experts are chosen: else rounding would decide, as weights are random.
        decides = self.dtype == torch.bfloat16
        chosen = self.tokens // 4 if decides else 4 * self.tokens
        how: dict[str, Any] = dict(device=self.device, dtype=self.dtype, **self.sizes)
        if shared:
            how |= dict(stage=self.joined.layers(layers), context_parallel=self.joined.layout is not None)
            if self.joined.experts is not None:
                how |= dict(all_to_all="torch", group=self.joined.experts)
        given = fields(self.family, layers, self.small, chosen)
        if not decides:
            given["num_experts_per_tok"] = given.get("n_routed_experts") or given["num_local_experts"]
        return serving.build(given, **how).requires_grad_(False)

    def runner(self, held: Any = None, **how: Any) -> bcg.PrefillRunner:
        """Not captured yet."""
        options = {"capture": "cuda" if self.device.type == "cuda" else "emulated", "segment_compiler": "eager"}
        return serving.runner(
            self.held if held is None else held,
            ladder=self.ladder,
            ranks=self.joined,
            timeout=TIMEOUT,
            **{"options": options, **how},
        )

    def batch(self, *lengths: int, names: str = "abcdefgh") -> tuple[PrefillBatch, torch.Tensor]:
        """New tokens of requests, which go on where they have been before; ids are those of the replica."""
        batch = self.pool.prefill(dict(zip(names, lengths, strict=False))) if lengths else self.pool.idle()
        ids = torch.randint(3, 256, (batch.tokens,), generator=self.draw)
        return batch, ids.to(self.device)

    def restart(self) -> None:
        """Requests begin anew."""
        self.pool = PagePool(**self.sizes, device=self.device)

    @torch.inference_mode()
    def expected(self, batch: PrefillBatch, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the whole model."""
        with batch.published():
            return self.whole(ids, batch.positions)

    @torch.inference_mode()
    def uncompiled(self, batch: PrefillBatch, ids: torch.Tensor) -> torch.Tensor | None:
        """The forward of this rank as it is written, with the same sends and gathers."""
        joined, held = self.joined, self.held
        local = batch if joined.layout is None else batch.context_parallel(joined.layout, joined.gather)
        if joined.before is None:
            rows = held.model.embed_tokens(ids)
            proxy = PipelineProxy(rows if joined.layout is None else local.share.split(rows))
        else:
            proxy = receive(held.takes, local.tokens, joined.before, device=self.device, group=joined.pipeline)
        with local.published():
            made = held.model(proxy, local.positions)
        if joined.after is not None:
            send(made, held.gives, joined.after, group=joined.pipeline)
            return None
        hidden = made.hidden_states if joined.layout is None else local.share.restore(made.hidden_states)
        last = torch.tensor(batch.lengths).cumsum(0) - 1
        return held.lm_head(hidden[last.to(self.device)])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _replica(joined: Ranks) -> int:
    return _rank() // (joined.parallel.pp * joined.parallel.cp)


def everybody(value: Any) -> list[Any]:
    """What each rank has."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def agreed(check: Checks, made: bcg.Prefilled, what: str, reason: str | None = None) -> None:
    """All ranks say the same of a batch."""
    said = everybody(made.admission.reason)
    check(len(set(said)) == 1 and reason in (None, said[0]), f"{what}: {said}, and not {reason!r}")


def close(check: Checks, one: Prefill, found: torch.Tensor | None, wanted: torch.Tensor, what: str) -> float:
    """Whether logits are those of the whole model; the last stage has some."""
    if found is None:
        return 0.0
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    check(error <= TOLERANCE[one.dtype], f"{what}: logits differ by {error:.1e}")
    return error


def check_batches(check: Checks, one: Prefill, runner: bcg.PrefillRunner, what: str) -> float:
    """Batches that fill a bucket, that are padded, behind prefixes, of many requests, too long, and of one token."""
    t, largest, replays = one.tokens, 0.0, 0
    for lengths in [(t,), (t // 4,), (t // 4 - 3, t // 8), (7, t // 8, 1), (t // 2, t // 2, 9), (1,), (t // 8,) * 7]:
        batch, ids = one.batch(*lengths)
        made = runner(batch, ids, wanted=bcg.Wanted(logits="all"))
        agreed(check, made, f"{what}, {lengths}")
        replays += made.admission.replays
        largest = max(largest, close(check, one, made.logits, one.expected(batch, ids), f"{what}, {lengths}"))
    check(0 < replays < 7, f"{what}: {replays} of 7 batches replayed")
    one.restart()
    return max(everybody(largest))


@contextmanager
def no_room(rows: int) -> Iterator[None]:
    """No bucket of so many rows can be captured."""
    real = Program._record

    def record(self: Any, device: Any, args: Any, forms: Any, bucket: Any) -> Any:
        if bucket is not None and bucket.rows == rows:
            raise torch.OutOfMemoryError("no room for it")
        return real(self, device, args, forms, bucket)

    with mock.patch.object(Program, "_record", record):
        yield


def check_disagreements(check: Checks, one: Prefill, what: str) -> None:
    """The last replica is unlike the others: what all of them decide."""
    t, odd = one.tokens, _replica(one.joined) == one.joined.parallel.dp - 1

    def run(runner: bcg.PrefillRunner, say: str, reason: str, *lengths: int, **of: Any) -> int | None:
        batch, ids = one.batch(*lengths, **of)
        made = runner(batch, ids)
        agreed(check, made, f"{what}, {say}", reason)
        if lengths:
            last = torch.tensor(batch.lengths).cumsum(0) - 1
            close(check, one, made.logits, one.expected(batch, ids)[last.to(one.device)], f"{what}, {say}")
        return made.admission.bucket

    middle = one.ladder[1]
    with closing(one.runner(limits=bcg.Limits(prefixes=False))) as runner:
        with no_room(runner.rows[middle]) if odd else nullcontext():
            runner.capture(one.pool.idle())
        check(runner.failed == {middle}, f"{what}, a capture fails: {set(runner.failed)} are dropped")
        run(runner, "nothing odd", "", t)
        run(runner, "over-padded", "padding", *(t // 4 + 3,) if odd else (t,), names="b")
        run(runner, "idle", "few_rows", *() if odd else (t // 4,), names="c")
        run(runner, "prefix", "prefix", t // 4, names="b" if odd else "d")
        bucket = run(runner, "the dropped bucket", "", *(t // 4,) if odd else (middle,), names="e")
        check(bucket == (t // 4 if odd else t), f"{what}, the dropped bucket: {bucket} is used in its place")
    one.restart()
    shorter = one._build(one.layers - 1, shared=True) if odd else None
    with closing(one.runner(shorter)) as runner:
        try:
            runner.capture(one.pool.idle())
            told = "nothing"
        except RankError as error:
            told = str(error)
        check("plan: " in told and told.endswith(str(dist.get_world_size() - 1)), f"{what}, different plans: {told}")


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Median wall time, on the slowest rank."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(REPEATS + 3):
        wait()
        everybody(None)
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return max(everybody(statistics.median(times[3:]) * 1e3))


def times(check: Checks, one: Prefill, runner: bcg.PrefillRunner, what: str) -> dict[str, float]:
    """Of one batch that fills the largest bucket: four requests of equal length."""
    batch, ids = one.batch(*[one.tokens // 4] * 4)
    check(runner(batch, ids).admission.bucket == one.tokens, f"{what}: the timed batch is not replayed")
    found = {
        "replayed_ms": milliseconds(lambda: runner(batch, ids), one.device),
        "eager_ms": milliseconds(lambda: one.uncompiled(batch, ids), one.device),
    }
    one.restart()
    return found


def measure(args: argparse.Namespace, check: Checks) -> list[dict[str, Any]]:
    """All layouts."""
    results: list[dict[str, Any]] = []
    dtypes = [torch.float32, torch.bfloat16] if args.device.type == "cuda" else [torch.float32]
    joined: dict[str, Ranks] = {}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for (family, sizes), dtype in itertools.product(layouts(ranks, args.layers, args.small), dtypes):
        layout = serving.layout(fields(family, args.layers, args.small, 1), **sizes)
        if layout.digest() not in joined:
            joined[layout.digest()] = Ranks.join(layout, timeout=TIMEOUT)
        name = " x ".join(f"{key} {size}" for key, size in sizes.items()) or "one rank"
        what = f"{family}, {name}, {str(dtype).removeprefix('torch.')}"
        one = Prefill(args, family, joined[layout.digest()], dtype)
        with closing(one.runner()) as runner:
            runner.capture(one.pool.idle())
            found: dict[str, Any] = {"model": family, "layout": name, "dtype": str(dtype).removeprefix("torch.")}
            found["error"] = check_batches(check, one, runner, what)
            if dtype == dtypes[-1]:
                found |= times(check, one, runner, what)
        if sizes.get("dp", 1) > 1 and dtype == torch.float32:
            check_disagreements(check, one, what)
        results.append(found)
        if _rank() == 0:
            print(", ".join(f"{key} {_short(value)}" for key, value in found.items()), flush=True)
    return results


def _short(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value


def table(results: list[dict[str, Any]]) -> str:
    """Of what was timed."""
    lines = ["| model | layout | eager ms | replayed ms | of eager |", "|---|---|---|---|---|"]
    for one in results:
        if "eager_ms" in one:
            eager, replayed = one["eager_ms"], one["replayed_ms"]
            share = f"{replayed / eager:.2f}"
            lines.append(f"| {one['model']} | {one['layout']} | {eager:.2f} | {replayed:.2f} | {share} |")
    return "\n".join(lines)


def main() -> None:
    """Check and measure, print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, help="of the largest bucket, a multiple of 16 times the ranks")
    parser.add_argument("--json")
    args = parser.parse_args()
    args.small = args.device == "cpu"
    args.layers = args.layers or (2 if args.small else 8)
    args.tokens = args.tokens or (64 if args.small else 2048)
    launch = Launch.found()
    if args.small:
        args.device = torch.device("cpu")
    else:
        args.device = torch.device("cuda", launch.local_rank if launch else 0)
        torch.cuda.set_device(args.device)
    check = Checks()
    with launch.group(args.device, TIMEOUT) if launch else nullcontext():
        results = measure(args, check)
        failed = list(itertools.chain(*everybody(check.failed)))
        count = sum(everybody(check.count))
        if _rank() == 0:
            report(args, results, count, failed)
        everybody(None)  # a launcher that sees one exit with an error ends the others
    sys.exit(1 if failed else 0)


def report(args: argparse.Namespace, results: list[dict[str, Any]], count: int, failed: list[str]) -> None:
    """What was found, printed and in a file."""
    print(table(results))
    print(f"{count - len(failed)} of {count} checks hold.", *failed, sep="\n", flush=True)
    if args.json:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        told = {"ranks": ranks, "layers": args.layers, "tokens": args.tokens, "checks": count, "failed": failed}
        with open(args.json, "w") as file:
            json.dump({**told, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
