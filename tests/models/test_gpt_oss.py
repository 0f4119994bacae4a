"""The serving model of GPT-OSS: logits are those of transformers' own model, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bcg_compiler as bcg

pytest.importorskip("transformers")

from bcg_compiler.models import serving, zoo
from bcg_compiler.models.layers.errors import ModelError

LAYERS = 3  # a window, none, a window

#: Fields that differ from those of the zoo: its rotary embedding is YaRN, in the form that GPT-OSS has it.
MODELS: dict[str, dict[str, Any]] = {
    "windows of 16, YaRN": {},
    "windows of 5, plain rotary": dict(sliding_window=5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "clamps that bite": dict(swiglu_limit=0.25, swiglu_alpha=1.3, tie_word_embeddings=True),
    "layers of another order": dict(layer_types=["full_attention", "full_attention", "sliding_attention"]),
}


@pytest.fixture(autouse=True)
def _clean(clean: None) -> Iterator[None]:
    torch.compiler.reset()
    yield


def saved(name: str, folder: Path, **kwargs: Any) -> Any:
    """A model of transformers' own, saved to a folder. Biases and sinks are drawn too: they would begin near 0."""
    model: Any = zoo.build("gpt_oss", layers=LAYERS, config=MODELS[name]).model
    for key, parameter in model.named_parameters():
        if key.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, 0, 0.5)
    model.save_pretrained(folder, **kwargs)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_several_requests_and_of_chunks_are_those_of_transformers(
    serve: Any, name: str, tmp_path: Path
) -> None:
    theirs = saved(name, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = serving.load(tmp_path, pages=24, page_size=8)
    pool = serving.page_pool(ours)
    prompts = serve.tokens((40, 30, 1))
    wanted = serve.expected(theirs, prompts)
    batch = pool.prefill({f"whole {i}": len(prompt) for i, prompt in enumerate(prompts)})
    with batch.published():
        serve.assert_close(ours(torch.cat(prompts), batch.positions), wanted)
    # Chunks begin and end within pages and windows; other requests come later; the last one is a decoding step.
    chunks = ({0: 13}, {0: 20, 1: 10}, {1: 20, 2: 1}, {0: 6}, {0: 1})
    serve.assert_close(serve.in_chunks(ours, pool, prompts, chunks), wanted)


#: A batch of each, in turn: new requests, longer prefixes, other lengths, within a window and beyond.
BATCHES = ({0: 9, 1: 5}, {0: 20, 2: 12}, {1: 3, 2: 1, 3: 24}, {3: 20, 4: 9}, {0: 1, 1: 1, 2: 1})


def pair(**options: Any) -> tuple[Any, Any, Any]:
    """Two models of one seed, and the second one compiled."""
    plain, other = (serving.build(fields_of_zoo(), pages=24, page_size=8, seed=1) for _ in range(2))
    return plain, other, torch.compile(other, backend="bcg", fullgraph=True, options={"capture": "emulated", **options})


def test_compiled_equals_uncompiled_bit_for_bit(serve: Any) -> None:
    plain, other, compiled = pair()
    pools = serving.page_pool(plain), serving.page_pool(other)
    for seed, requests in enumerate((*BATCHES, BATCHES[0], BATCHES[0])):
        assert torch.equal(serve.call(compiled, pools[1], requests, seed), serve.call(plain, pools[0], requests, seed))
    for (key, buffer), wanted in zip(other.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, wanted), key
    stats = bcg.stats(compiled)
    assert (stats.graphs, stats.replays > 0, stats.recaptures) == (1, True, 0)
    assert stats.reasons == {"attention": LAYERS, "a2a_moe": LAYERS}
    assert (stats.segments, stats.breaks) == (2 * LAYERS + 1, 2 * LAYERS)


def test_padded_rows_are_shown_never_to_reach_live_ones(serve: Any) -> None:
    plain, other, compiled = pair(ladder=[16, 32, 64])
    pools = serving.page_pool(plain), serving.page_pool(other)
    # The first call warms up, with its own rows. Matrix products of other sizes may add up in another order.
    for seed, (requests, bucket) in enumerate(zip(BATCHES, (None, 32, 32, 32, 16), strict=True)):
        found = serve.call(compiled, pools[1], requests, seed)
        assert torch.equal(found, serve.call(plain, pools[0], requests, seed, rows=bucket))
    (program,) = bcg.programs_of(compiled)
    assert program.plan is not None
    (rows,) = program.plan.rows
    assert rows.kind == "row_wise" and not program.plan.unpadded
    assert bcg.stats(compiled).eager_runs == {"warm_up": 1}


def fields_of_zoo(**changed: Any) -> dict[str, Any]:
    config: Any = zoo.build("gpt_oss", layers=LAYERS, device="meta").model.config
    return config.to_dict() | changed


def test_a_configuration_that_is_not_implemented_is_refused() -> None:
    refused: dict[str, dict[str, Any]] = {
        "goes to 9 experts and there are 8": dict(num_experts_per_tok=9),
        "4 query heads cannot share 3 key heads": dict(num_key_value_heads=3),
        "is quantised .* dequantise it": dict(quantization_config={"quant_method": "mxfp4"}),
        "did you mean gpt_oss": dict(model_type="gpt_os"),
        "says of 2 what they are": dict(layer_types=["full_attention"] * 2),
        "layer_types has 'chunked_attention'": dict(layer_types=["chunked_attention"] * LAYERS),
    }
    for says, changed in refused.items():
        with pytest.raises(ModelError, match=says):
            serving.empty(fields_of_zoo(**changed), pages=4, device="meta")
    incomplete = fields_of_zoo()
    del incomplete["num_local_experts"]
    with pytest.raises(ModelError, match="gpt_oss lacks the field 'num_local_experts'"):
        serving.empty(incomplete, pages=4, device="meta")
