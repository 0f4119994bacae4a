"""Index keys of 8 bits: how near they are, and the Triton kernel, in Triton's interpreter, against plain torch."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_compiler.models import layers
from bcg_compiler.models.layers import cache, fp8, gpus, index_logits, indexer, kernels, reference
from bcg_compiler.models.layers.batch import PrefillBatch
from bcg_compiler.models.layers.errors import ModelError
from bcg_compiler.models.layers.pages import PagePool

PAGES, PAGE, HEADS, WIDTH = 12, 8, 3, 32
KERNEL = "bcg_compiler.models.layers.index_kernel"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as Triton's interpreter runs it, with tiles small enough for several of them."""
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter cannot run the kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.find_spec(KERNEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, KERNEL, module)
    monkeypatch.setattr(layers, "index_kernel", module, raising=False)
    monkeypatch.setattr(index_logits, "TILE", (16, 16))


def filled() -> tuple[PrefillBatch, Tensor, Tensor, Tensor]:
    """A batch of two requests, one with a prefix; queries, weights and the packed cache with all keys."""
    generator = torch.Generator().manual_seed(0)
    pool, keys = PagePool(PAGES, PAGE), torch.zeros(PAGES, PAGE, fp8.packed_width(WIDTH), dtype=torch.uint8)
    for chunk in ({0: 21}, {1: 5, 0: 19}):
        batch = pool.prefill(chunk)  # type: ignore[arg-type]
        cache.write(keys, batch, fp8.pack(3 * torch.randn(batch.tokens, WIDTH, generator=generator)))
    query = torch.randn(batch.tokens, HEADS, WIDTH, generator=generator)
    weights = torch.rand(batch.tokens, HEADS, generator=generator)  # below 0 the best scores are ties at 0
    return batch, query, weights, keys


def test_packed_rows_stand_for_what_was_packed() -> None:
    rows = torch.randn(7, 3, WIDTH) * torch.logspace(-6, 4, 7)[:, None, None]
    packed = fp8.pack(rows)
    assert (packed.shape, packed.dtype) == ((7, 3, WIDTH + 4), torch.uint8)
    # Three bits of mantissa: half of the last one is a sixteenth. Small ones are off by a step of their row.
    error = (fp8.unpack(packed) - rows).abs()
    assert (error <= rows.abs() / 16 + rows.abs().amax(-1, keepdim=True) / 448 / 512).all()
    assert (fp8.unpack(fp8.pack(torch.zeros(2, WIDTH))) == 0).all()
    values, scales = fp8.parts(packed)
    assert values.data_ptr() == packed.data_ptr()
    torch.testing.assert_close(scales, rows.abs().amax(-1) / 448)


def test_the_kernel_computes_the_logits_of_plain_torch(interpreted: None) -> None:
    batch, query, weights, keys = filled()
    values, scales = fp8.quantise(query)
    for request in batch.requests:
        rows = slice(request.start, request.stop)
        products = torch.einsum("thd,sd->ths", fp8.unpack(fp8.pack(query[rows])), fp8.unpack(cache.read(keys, request)))
        wanted = (products.relu() * weights[rows, :, None]).sum(1)
        places = torch.arange(request.context)
        wanted = wanted.masked_fill(places > request.prefix + places[: rows.stop - rows.start, None], -torch.inf)
        found = index_logits.index_logits(values, weights * scales, keys, batch, rows)
        torch.testing.assert_close(found[:, : request.context], wanted, rtol=1e-5, atol=1e-4)
        assert (found[:, request.context :] == -torch.inf).all()


@pytest.mark.parametrize("held", [1 << 27, 100])
def test_the_kernel_chooses_the_tokens_of_plain_torch(
    interpreted: None, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_logits, "_LOGITS", held)  # tokens block by block: the same result
    batch, query, weights, keys = filled()
    found, wanted = torch.empty(2, batch.tokens, 6, dtype=torch.int32)
    values, scales = fp8.quantise(query)
    index_logits.index_top_k(batch, values, weights * scales, keys, found)
    reference.index_top_k(batch, values, weights * scales, keys, wanted)
    assert found.sort().values.equal(wanted.sort().values)
    assert (found == -1).any()


def test_most_of_the_tokens_that_float32_chooses_are_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = PagePool(PAGES, PAGE).prefill({0: 90})
    query, key = torch.randn(90, HEADS, 64, generator=generator), torch.randn(90, 64, generator=generator)
    weights = torch.rand(90, HEADS, generator=generator)
    chosen = torch.empty(2, 90, 16, dtype=torch.int32)
    caches = torch.zeros(PAGES, PAGE, 64), torch.zeros(PAGES, PAGE, fp8.packed_width(64), dtype=torch.uint8)
    values, scales = fp8.quantise(query)
    with batch.published():
        indexer.choose_tokens(query, key, weights, caches[0], chosen[0])
        indexer.choose_tokens(values, fp8.pack(key), weights * scales, caches[1], chosen[1])
    both = sum(len(set(a) & set(b)) for a, b in zip(chosen[0].tolist(), chosen[1].tolist(), strict=True))
    assert both >= 0.9 * sum(len(set(a)) for a in chosen[0].tolist())


def test_the_kernel_is_for_packed_caches_and_gpus_that_have_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, query, weights, keys = filled()
    args = batch, query, weights, keys, torch.empty(0)
    assert index_logits.refuses(*args) == ""
    assert "fp8_index=True" in index_logits.refuses(*args[:3], keys.float(), args[4])
    assert "not 24" in index_logits.refuses(batch, query[..., :24], weights, keys, args[4])
    cuda = torch.device("cuda")
    assert "NVIDIA" in index_logits.unavailable(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9" in index_logits.unavailable(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    assert "pip install" in index_logits.unavailable(cuda)
    monkeypatch.setattr(gpus, "find_spec", lambda name: name)
    assert index_logits.unavailable(cuda) == ""


def test_a_model_with_an_index_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all logits are near: where another token is chosen, they are not."""
    pytest.importorskip("transformers")
    from bcg_compiler.models import serving, zoo

    fields = zoo.build("deepseek_v32", layers=2).model.config.to_dict()
    exact, packed = (serving.build(fields, pages=8, page_size=8, fp8_index=option) for option in (False, True))
    batch = serving.page_pool(packed).prefill({0: 40, 1: 9})
    ids = torch.randint(3, 256, (49,), generator=torch.Generator().manual_seed(0))
    used: list[str] = []
    original = kernels.run
    monkeypatch.setattr(kernels, "run", lambda name, device, *args: (used.append(name), original(name, device, *args)))
    with batch.published(), torch.no_grad():
        wanted, found = exact(ids, batch.positions), packed(ids, batch.positions)
    assert used.count("index_top_k") == 4
    near = (found - wanted).abs().amax(-1) <= 0.1 * wanted.abs().amax()
    assert near.float().mean() >= 0.8
    dense: dict[str, Any] = zoo.build("deepseek_v3", layers=2).model.config.to_dict()
    with pytest.raises(ModelError, match="a deepseek_v3 of this configuration has none"):
        serving.empty(dense, pages=8, fp8_index=True)
