"""FlashInfer's adapters against plain torch, over a fake of the library: eager, and captured with the plan hoisted."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg
from bcg_compiler.distributed import Zigzag
from bcg_compiler.models import serving
from bcg_compiler.models.layers import attention, flashinfer, kernels, planned
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.flashinfer import LatentShape, PagedShape
from bcg_compiler.models.layers.pages import PagePool

PAGES, PAGE = 24, 4
HEADS, GROUPS, WIDTH = 4, 2, 8
#: The MLA shape has so many heads that few tokens fill a block.
LATENT_HEADS, RANK, ROTARY = 64, 8, 4
LAYERS = 3
CPU = torch.device("cpu")
#: Chunks of several requests, with prefixes from the third on.
CHUNKS: tuple[dict[int, int], ...] = ({0: 7}, {1: 5, 2: 3}, {0: 1, 1: 6, 2: 1}, {0: 3}, {2: 9, 3: 5}, {0: 2})


@pytest.fixture(autouse=True)
def _clean(clean: None, fake_flashinfer: Any) -> Iterator[None]:
    torch.compiler.reset()
    yield


class Paged(nn.Module):
    """Layers of grouped-query attention, with FlashInfer's plan or in plain torch."""

    def __init__(self, window: int = 0, *, plan: bool = True) -> None:
        super().__init__()
        shape = PagedShape(HEADS, GROUPS, WIDTH, 0.3, window, PAGE, PAGES, torch.float32, CPU)
        self.planned = planned.PlannedAttention(shape) if plan else None
        self.window = window
        for i in range(2 * LAYERS):
            self.register_buffer(f"cache{i}", torch.zeros(PAGES, PAGE, GROUPS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            out = torch.empty(x.shape[0], HEADS, WIDTH)
            q, k, v = x, x[:, :GROUPS].sin(), x[:, GROUPS:].cos()
            caches = getattr(self, f"cache{2 * layer}"), getattr(self, f"cache{2 * layer + 1}")
            if self.planned is not None:
                self.planned.attend(q, k, v, *caches, out)
            else:
                attention.paged_attention(q, k, v, *caches, out, 0.3, self.window)
            x = x + out
        return x


class Latent(nn.Module):
    """Layers of absorbed MLA, with FlashInfer's plan or in plain torch."""

    def __init__(self, *, plan: bool = True) -> None:
        super().__init__()
        shape = LatentShape(LATENT_HEADS, RANK, ROTARY, 0.3, PAGE, PAGES, torch.float32, CPU)
        self.planned = planned.PlannedLatentAttention(shape) if plan else None
        for i in range(LAYERS):
            self.register_buffer(f"latent_cache{i}", torch.zeros(PAGES, PAGE, RANK))
            self.register_buffer(f"rotary_cache{i}", torch.zeros(PAGES, PAGE, ROTARY))

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(LAYERS):
            out = torch.empty(x.shape[0], LATENT_HEADS, RANK)
            caches = getattr(self, f"latent_cache{layer}"), getattr(self, f"rotary_cache{layer}")
            args = x, x[..., :ROTARY].sin(), x[:, 0].cos(), x[:, 1, :ROTARY], *caches, out
            if self.planned is not None:
                self.planned.attend(*args)
            else:
                attention.mla_attention(*args, 0.3)
            x = x + out
        return x


SHAPES = {"paged": (HEADS, WIDTH), "latent": (LATENT_HEADS, RANK)}
MODELS: dict[str, Any] = {"paged": Paged, "latent": Latent}


def batches(chunks: tuple[dict[int, int], ...] = CHUNKS) -> Iterator[PrefillBatch]:
    pool = PagePool(PAGES, PAGE)
    for chunk in chunks:
        yield pool.prefill(chunk)  # type: ignore[arg-type]


def call(model: Any, batch: PrefillBatch, kind: str) -> Tensor:
    x = torch.randn(batch.tokens, *SHAPES[kind], generator=torch.Generator().manual_seed(batch.tokens))
    torch._dynamo.mark_dynamic(x, 0)
    with batch.published():
        return model(x)


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="bcg", options={"capture": "emulated", **options})


def assert_same(ours: nn.Module, reference: nn.Module) -> None:
    """All caches, in whole: nothing but the tokens of the batches was written."""
    for name, cache in reference.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), cache)


@pytest.mark.parametrize("kind", MODELS)
def test_eager_runs_equal_plain_torch(kind: str) -> None:
    ours, reference = MODELS[kind](), MODELS[kind](plan=False)
    for batch in batches():
        torch.testing.assert_close(call(ours, batch, kind), call(reference, batch, kind))
    assert_same(ours, reference)


def test_a_batch_of_a_context_parallel_rank_is_refused() -> None:
    """Its plan would write the rows of this rank alone, and a later batch would read what nobody wrote."""
    (batch,) = batches(CHUNKS[:1])
    local = batch.context_parallel(Zigzag(1), SimpleNamespace(rank=0, size=1, all_gather=None))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="build the model with context_parallel=True"):
        call(Paged(), local, "paged")


def test_a_model_for_context_parallel_ranks_does_not_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "unavailable", lambda device: "")
    fields: Any = dict(
        model_type="deepseek_v3",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=LATENT_HEADS,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=8,
        qk_rope_head_dim=64,
        v_head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        first_k_dense_replace=1,
        intermediate_size=32,
        moe_intermediate_size=8,
        n_shared_experts=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
    )
    for context_parallel in (False, True):
        model: Any = serving.empty(
            fields, pages=PAGES, page_size=PAGE, dtype=torch.bfloat16, context_parallel=context_parallel
        )
        assert (model.model.layers[0].self_attn.planned is None) == context_parallel


def test_a_window_counts_the_token_itself() -> None:
    ours, reference = Paged(3), Paged(3, plan=False)
    for batch in batches():
        torch.testing.assert_close(call(ours, batch, "paged"), call(reference, batch, "paged"))


@pytest.mark.parametrize("kind", MODELS)
def test_replays_of_one_segment_equal_plain_torch(kind: str) -> None:
    """Every batch has other lengths, prefixes and pages; some fill a small part of the bucket."""
    ours, reference = MODELS[kind](), MODELS[kind](plan=False)
    program = compiled(ours, ladder=[8, 16], limits=bcg.Limits(max_requests=4), max_padding_factor=8.0)
    for batch in batches():
        torch.testing.assert_close(call(program, batch, kind), call(reference, batch, kind))
    stats = bcg.stats(program)
    assert (stats.segments, stats.breaks, stats.eager_runs) == (1, 0, {"warm_up": 1})
    assert stats.replays == len(CHUNKS) - 1
    assert_same(ours, reference)


@pytest.mark.parametrize("kind", MODELS)
def test_as_breaks_in_padded_programs_they_equal_plain_torch(kind: str) -> None:
    """Not hoisted, each body plans for the live rows of what it is given."""
    ours, reference = MODELS[kind](), MODELS[kind](plan=False)
    program = compiled(ours, ladder=[16], max_padding_factor=8.0, disable_passes=["hoist_plans"])
    for batch in batches(CHUNKS[:3]):
        torch.testing.assert_close(call(program, batch, kind), call(reference, batch, kind))
    assert (bcg.stats(program).breaks, bcg.stats(program).replays) == (LAYERS, 2)
    assert_same(ours, reference)


@pytest.mark.parametrize("captured", [False, True])
def test_padded_rows_become_zero(captured: bool) -> None:
    model, (batch,) = Paged(), batches(({0: 5},))
    assert model.planned is not None
    if captured:
        with bcg.forward_context(capturing=True, bucket_rows=8, limits=bcg.Limits()):
            model.planned.planner.prepare()
    q, out = torch.randn(8, HEADS, WIDTH), torch.full((8, HEADS, WIDTH), 7.0)
    kv = torch.randn(2, 8, GROUPS, WIDTH)
    with batch.published(), bcg.forward_context(live_rows=5, bucket_rows=8):
        model.planned.attend(q, *kv, model.get_buffer("cache0"), model.get_buffer("cache1"), out)
    assert (out[5:] == 0).all() and (out[:5] != 7).all()


def test_each_call_plans_once_for_all_layers() -> None:
    model = Paged()
    program = compiled(model, ladder=[16], limits=bcg.Limits(max_requests=4), max_padding_factor=20.0)
    every = list(batches())
    for batch in every:
        call(program, batch, "paged")
    assert model.planned is not None
    (captured,) = model.planned.planner._captured.values()
    # One for the capture, and one for each call but the first one, which ran eagerly.
    assert captured.wrapper.library.plans == 1 + len(every) - 1


def test_exact_shapes_are_captured_with_room_for_other_requests() -> None:
    ours, reference = Paged(), Paged(plan=False)
    program = compiled(ours)
    for batch in batches(({0: 4, 1: 4}, {0: 2, 1: 6}, {2: 8}, {0: 2, 1: 2, 2: 2, 3: 2})):
        torch.testing.assert_close(call(program, batch, "paged"), call(reference, batch, "paged"))
    assert (bcg.stats(program).breaks, bcg.stats(program).replays) == (0, 3)


def test_what_is_planned_under_inference_mode_is_planned_again_outside_of_it() -> None:
    program, reference = compiled(Paged()), Paged(plan=False)
    every = list(batches(({0: 8}, {1: 8}, {2: 8}, {3: 8})))
    for batch in every[:2]:
        with torch.inference_mode():
            call(program, batch, "paged")
    for batch in every[2:]:
        torch.testing.assert_close(call(program, batch, "paged"), call(reference, batch, "paged"))


def test_more_requests_than_there_is_room_for_run_eagerly_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: tuple[dict[int, int], ...] = ({0: 8}, {1: 8}, {2: 3, 3: 3, 4: 2})
    limited = compiled(Paged(), ladder=[8], limits=bcg.Limits(max_requests=2))
    reference = Paged(plan=False)
    for batch in batches(chunks):
        torch.testing.assert_close(call(limited, batch, "paged"), call(reference, batch, "paged"))
    assert bcg.stats(limited).eager_runs == {"warm_up": 1, "requests": 1}
    monkeypatch.setattr(planned, "_REQUESTS", 2)
    open_to_all = compiled(Paged(), ladder=[8])
    *first, last = batches(chunks)
    for batch in first:
        call(open_to_all, batch, "paged")
    with pytest.raises(ModelError, match=r"has 3 requests, and what is captured for 8 tokens has room for 2.*Limits"):
        call(open_to_all, last, "paged")


def test_a_plan_of_other_numbers_than_the_captured_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few live rows: the library would take clusters of one block, and the captured grid is one of two."""
    monkeypatch.setattr(LatentShape, "least_rows", lambda *args: 0)
    program = compiled(Latent(), ladder=[16], limits=bcg.Limits(max_requests=4), max_padding_factor=20.0)
    first, second, *_ = batches(({0: 7}, {1: 2}))
    call(program, first, "latent")
    with pytest.raises(ModelError, match=r"plans a batch of 2 tokens in another way than the 16 .*\[1, 132\]"):
        call(program, second, "latent")


def test_a_batch_of_another_call_or_cache_is_refused() -> None:
    model = Paged()
    batch = PagePool(PAGES, PAGE).prefill({0: 5})
    with batch.published(), pytest.raises(ModelError, match="has 5 tokens and the model is called with 6"):
        model(torch.randn(6, HEADS, WIDTH))
    other = PagePool(PAGES, 2 * PAGE).prefill({0: 5})
    with other.published(), pytest.raises(ModelError, match="for a cache of 24 pages of 8 tokens"):
        model(torch.randn(5, HEADS, WIDTH))
    with batch.published(), pytest.raises(ModelError, match=r"planned for torch.float32.*called with torch.float64"):
        model(torch.randn(5, HEADS, WIDTH).double())


def test_a_copy_of_a_model_plans_for_itself() -> None:
    model = nn.ModuleList([Paged()])
    again: Any = copy.deepcopy(model)
    assert again[0].planned.planner is not model[0].planned.planner  # type: ignore[union-attr]


def test_more_tokens_than_the_lists_of_the_mla_wrapper_hold_are_refused() -> None:
    shape = LatentShape(128, 512, 64, 0.1, 64, 1000, torch.bfloat16, CPU)
    lengths = flashinfer.Lengths.most(9000, 1, 64, CPU)
    with pytest.raises(ModelError, match=r"9000 tokens of 128 heads are more than .* at most 8063 tokens"):
        shape.plan(None, lengths)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer counts as available."""

    def swapped(found: kernels.Kernel) -> kernels.Kernel:
        return kernels.Kernel(found.name, found.run, kernels._nothing, found.refuses)

    monkeypatch.setattr(
        kernels, "KERNELS", {name: tuple(map(swapped, found)) for name, found in kernels.KERNELS.items()}
    )


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.bfloat16), (3, torch.float16)])
def test_without_a_shared_plan_each_call_plans(on_cpu: None, window: int, dtype: torch.dtype) -> None:
    def caches() -> list[Tensor]:
        return [torch.zeros(PAGES, PAGE, GROUPS, 64, dtype=dtype) for _ in range(2)]

    ours, reference = caches(), caches()
    for batch in batches():
        q = torch.randn(batch.tokens, HEADS, 64, dtype=dtype)
        k, v = torch.randn(2, batch.tokens, GROUPS, 64, dtype=dtype)
        found, wanted = torch.empty_like(q), torch.empty_like(q)
        with batch.published():
            attention.paged_attention(q, k, v, *ours, found, 0.125, window)
            args = batch, q, *reference, wanted, 0.125, window, None
            for cache, rows in zip(reference, (k, v), strict=True):
                cache.flatten(0, 1)[batch.slots] = rows
            kernels.reference.grouped_query_attention(*args)
        assert kernels.kernel("grouped_query_attention", CPU, *args).name == "flashinfer"
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_absorbed_mla_without_a_shared_plan(on_cpu: None) -> None:
    caches = torch.randn(PAGES, PAGE, 512).bfloat16(), torch.randn(PAGES, PAGE, 64).bfloat16()
    for batch in batches():
        q = torch.randn(batch.tokens, HEADS, 512).bfloat16(), torch.randn(batch.tokens, HEADS, 64).bfloat16()
        found, wanted = torch.empty_like(q[0]), torch.empty_like(q[0])
        assert kernels.kernel("mla_attention", CPU, batch, *q, *caches, found, 0.04, None).name == "flashinfer"
        kernels.run("mla_attention", CPU, batch, *q, *caches, found, 0.04, None)
        kernels.reference.mla_attention(batch, *q, *caches, wanted, 0.04, None)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_calls_that_the_library_cannot_do_are_left_to_torch(on_cpu: None) -> None:
    (batch,) = batches(({0: 3},))
    cache = torch.zeros(PAGES, PAGE, GROUPS, 64, dtype=torch.bfloat16)
    q = torch.zeros(3, HEADS, 64, dtype=torch.bfloat16)
    rest = torch.zeros(3, HEADS, 512), torch.zeros(3, HEADS, 64)

    def why(operation: str, *args: Any) -> str:
        first, *others = kernels.KERNELS[operation]
        assert (kernels.kernel(operation, CPU, *args) in others) == bool(first.refuses(*args))
        return first.refuses(*args)

    gqa = "grouped_query_attention"
    assert why(gqa, batch, q, cache, cache, q, 0.1, 0, None) == ""
    assert "sinks" in why(gqa, batch, q, cache, cache, q, 0.1, 0, torch.zeros(HEADS))
    assert "not in torch.float32" in why(gqa, batch, q.float(), cache, cache, q, 0.1, 0, None)
    assert "different dtypes" in why(gqa, batch, q, cache.half(), cache, q, 0.1, 0, None)
    assert "not 32" in why(gqa, batch, q[..., :32], cache[..., :32], cache[..., :32], q, 0.1, 0, None)
    assert "cannot share" in why(gqa, batch, q[:, :3], cache, cache, q, 0.1, 0, None)
    latent = torch.zeros(PAGES, PAGE, 512), torch.zeros(PAGES, PAGE, 64)
    assert "not in torch.float32" in why("mla_attention", batch, *rest, *latent, rest[0], 0.1, None)
    assert "not 256" in flashinfer.LatentShape(4, 256, 64, 0.1, 4, 4, torch.float16, CPU).refuses()


def test_a_release_that_is_too_old_is_not_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert flashinfer.unavailable(cuda) == ""
    assert kernels.in_use("cuda")["mla_attention"] == "flashinfer"
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", "0.5.12")
    flashinfer._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"FlashInfer is not used: release 0\.5\.12 is too old: install 0\.6\.4"):
        assert "0.6.4 or newer" in flashinfer.unavailable(cuda)
    assert kernels.in_use("cuda")["mla_attention"] == "torch"
    assert "too old" in kernels.choices("cuda")["mla_attention"]["flashinfer"]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "pip install" in flashinfer.unavailable(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0" in flashinfer.unavailable(cuda)
    assert planned.planned_attention(PagedShape(4, 4, 64, 0.1, 0, 4, 4, torch.float16, CPU)) is None


def test_the_dense_models_attention_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3: no attention break is left, and logits are those without."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import serving, zoo

    dense = zoo.build("deepseek_v3", layers=2, config=dict(first_k_dense_replace=2))
    fields = dense.model.config.to_dict()
    reference: Any = serving.build(fields, pages=PAGES, page_size=8)
    monkeypatch.setattr(flashinfer, "unavailable", lambda device: "")
    monkeypatch.setattr(LatentShape, "refuses", lambda shape: "")
    ours: Any = serving.build(fields, pages=PAGES, page_size=8)
    program = compiled(ours, ladder=[16, 32], limits=bcg.Limits(max_requests=4), max_padding_factor=8.0)
    pool = serving.page_pool(ours)
    for chunk in ({0: 12}, {1: 20, 2: 3}, {0: 3, 2: 9}):
        batch = pool.prefill(chunk)  # type: ignore[arg-type]
        ids = torch.randint(3, 256, (batch.tokens,))
        torch._dynamo.mark_dynamic(ids, 0)
        torch._dynamo.mark_dynamic(batch.positions, 0)
        with batch.published():
            found, wanted = program(ids, batch.positions), reference(ids, batch.positions)
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert (bcg.stats(program).breaks, bcg.stats(program).replays) == (0, 2)


@pytest.mark.parametrize(("name", "plans"), [("gemma3", 2), ("gpt_oss", 0)])
def test_transformers_models_share_a_plan_for_each_kind_of_layer(
    name: str, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma3 has layers with a window and without; gpt_oss has sinks, which the library has not."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import hf, serving, zoo

    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6} if plans else {}
    model: Any = zoo.build(name, layers=2, config=config).model
    prompts = [torch.randint(3, 256, (length,)) for length in (11, 5)]
    wanted = torch.cat([model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts])
    monkeypatch.setattr(flashinfer, "unavailable", lambda device: "")
    monkeypatch.setattr(PagedShape, "refuses", lambda shape: "")
    ours: Any = hf.paged(model, pages=8, page_size=8)
    made = {id(module.paged_plan) for module in model.modules() if getattr(module, "paged_plan", None) is not None}
    assert len(made) == plans
    program = compiled(ours)
    for _ in range(3):
        batch = serving.page_pool(ours).prefill(dict(enumerate(map(len, prompts))))
        with batch.published():
            found = program(torch.cat(prompts), batch.positions)
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert (bcg.stats(program).reasons.get("attention", 0) == 0) == (plans > 0)
