"""Any causal language model of transformers over a paged cache: logits are its own, request by request."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bcg_compiler as bcg

pytest.importorskip("transformers")

from bcg_compiler.distributed.pipeline import Stage
from bcg_compiler.models import hf, serving, zoo
from bcg_compiler.models.layers.errors import ModelError

#: MLA that is not absorbed, windows, sinks, norms of queries and keys, experts of several kinds.
MODELS = [
    "deepseek_v3",
    "gemma3",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "longcat_flash",
    "minimax_m2",
    "mixtral",
    "qwen3",
    "qwen3_moe",
]

#: Those that every run of the tests looks at.
SHORT = ("deepseek_v3", "gemma3", "gpt_oss", "llama", "mixtral", "qwen3")

#: What cannot be served, and what is said of it.
REFUSED = {
    "bert": r"encoder.layer.0.attention.self: its attention is not causal",
    "deepseek_v32": r"does not go through with attention and masks of ours",
    "llama4": r"model.layers.0.self_attn: a token sees others than those before it",
    "mamba2": r"has 2 layers, of which 0 attend",
    "qwen3_next": r"has 2 layers, of which 1 attend",
    "t5": r"T5Model is no causal language model",
    "vit": r"ViTModel does not go through",
    "whisper": r"WhisperModel is no causal language model",
}


def _nightly(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def _clean(clean: None) -> Iterator[None]:
    torch.compiler.reset()
    yield


def model_of(name: str, **config: Any) -> Any:
    return zoo.build(name, layers=2, config=config or None).model


@pytest.mark.parametrize("name", [name if name in SHORT else _nightly(name) for name in MODELS])
def test_logits_of_several_requests_and_of_chunks_are_those_of_the_model_itself(serve: Any, name: str) -> None:
    model, prompts = model_of(name), serve.tokens((40, 30, 1))
    wanted = serve.expected(model, prompts)
    served = hf.paged(model, pages=24, page_size=8)
    pool = serving.page_pool(served)
    batch = pool.prefill({f"whole {i}": len(prompt) for i, prompt in enumerate(prompts)})
    with batch.published():
        serve.assert_close(served(torch.cat(prompts), batch.positions), wanted)
    # Chunks begin and end within pages and windows; other requests come later; the last one is a decoding step.
    chunks = ({0: 13}, {0: 20, 1: 10}, {1: 20, 2: 1}, {0: 6}, {0: 1})
    serve.assert_close(serve.in_chunks(served, pool, prompts, chunks), wanted)


BATCHES = ({0: 9, 1: 5}, {0: 20, 2: 12}, {1: 3, 2: 1, 3: 24}, {3: 20, 4: 9}, {0: 9, 1: 5}, {0: 7, 1: 7})


@pytest.mark.parametrize("name", ["llama", *map(_nightly, ("gpt_oss", "mixtral", "qwen3"))])
def test_compiled_equals_uncompiled_bit_for_bit(serve: Any, name: str) -> None:
    plain = hf.paged(model_of(name), pages=24, page_size=8)
    other = hf.paged(model_of(name), pages=24, page_size=8)
    compiled = torch.compile(other, backend="bcg", fullgraph=True, options={"capture": "emulated"})
    pools = serving.page_pool(plain), serving.page_pool(other)
    for seed, requests in enumerate(BATCHES):
        assert torch.equal(serve.call(compiled, pools[1], requests, seed), serve.call(plain, pools[0], requests, seed))
    for (key, buffer), wanted in zip(other.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, wanted), key
    stats = bcg.stats(compiled)
    assert (stats.graphs, stats.replays > 0, stats.recaptures, stats.reasons["attention"]) == (1, True, 0, 2)


@pytest.mark.nightly  # docs/paged-transformers.md shows the same of qwen3, at each run of the tests
def test_a_model_of_dense_layers_has_one_break_a_layer_and_is_padded(serve: Any) -> None:
    model = model_of("llama")
    prompts = {requests: serve.tokens((requests,), requests)[0] for requests in (11, 30, 16, 25)}
    wanted = {rows: serve.expected(model, [ids]) for rows, ids in prompts.items()}
    served = hf.paged(model, pages=24, page_size=8)
    compiled = torch.compile(served, backend="bcg", fullgraph=True, options={"capture": "emulated", "ladder": [16, 32]})
    pool = serving.page_pool(served)
    for rows, ids in prompts.items():
        batch = pool.prefill({rows: rows})
        torch._dynamo.mark_dynamic(ids, 0)
        torch._dynamo.mark_dynamic(batch.positions, 0)
        with batch.published():
            serve.assert_close(compiled(ids, batch.positions), wanted[rows])
    stats = bcg.stats(compiled)
    assert (stats.segments, stats.breaks, stats.reasons) == (3, 2, {"attention": 2})
    assert (stats.eager_runs, stats.captures) == ({"warm_up": 1}, 2)


@pytest.mark.parametrize("name", [n if n in ("bert", "deepseek_v32", "llama4") else _nightly(n) for n in REFUSED])
def test_a_model_that_mixes_tokens_otherwise_is_refused_and_left_as_it_was(name: str) -> None:
    model = model_of(name)
    before = model.config._attn_implementation, [key for key, _ in model.named_buffers()]
    with pytest.raises(ModelError, match=REFUSED[name]):
        hf.paged(model, pages=4, page_size=8)
    assert (model.config._attn_implementation, [key for key, _ in model.named_buffers()]) == before


def test_what_attention_is_given_and_not_known_is_refused() -> None:
    """A score that is capped, say, as Gemma 2 has it: the result would be another one."""
    model = model_of("llama")
    attention = model.model.layers[1].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: inner(*args, softcap=30.0, **kwargs)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn: its attention is given softcap"):
        hf.paged(model, pages=4, page_size=8)


def test_a_window_that_is_not_the_one_of_the_mask_is_refused() -> None:
    for given, window in ((5, 6), (6, 5), (0, 5), (16, 0), (4096, 4095)):

        def sees(_: int, __: int, query: torch.Tensor, key: torch.Tensor, window: int = window) -> torch.Tensor:
            return (key <= query) & ((key > query - window) if window else torch.tensor(True))

        assert hf._sees_as_expected(sees, window)
        assert not hf._sees_as_expected(sees, given)


def test_a_folder_is_loaded(serve: Any, tmp_path: Path) -> None:
    model, prompts = model_of("qwen3"), serve.tokens((9, 4))
    model.save_pretrained(tmp_path)
    served = hf.load(tmp_path, pages=4, page_size=8)
    batch = serving.page_pool(served).prefill({0: 9, 1: 4})
    with batch.published():
        serve.assert_close(served(torch.cat(prompts), batch.positions), serve.expected(copy.deepcopy(model), prompts))
    with pytest.raises(ModelError, match="pages=0"):
        hf.load(tmp_path, pages=0)


def test_a_stage_of_several_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Stage 1 of 2 .* differs from model to model"):
        hf.load(tmp_path, pages=4, stage=Stage.even(2, 2, 1))
