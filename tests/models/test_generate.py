"""``model.generate`` with a static cache decodes through the backend and gives eager's tokens."""

import copy

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.models import zoo

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_static_cache_decoding_gives_the_tokens_of_eager(name: str, device: str) -> None:
    bcg.reset()
    model = zoo.build(name, device=device).model
    ids = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(0)).to(device)
    given = dict(max_new_tokens=12, do_sample=False, cache_implementation="static", pad_token_id=0, eos_token_id=None)
    want = copy.deepcopy(model).generate(ids, disable_compile=True, **given)
    config = transformers.CompileConfig(backend="bcg")
    config._compile_all_devices = True  # on the CPU generate compiles nothing unless told to
    with torch.no_grad():
        got = model.generate(ids, compile_config=config, **given)
    assert got.tolist() == want.tolist()
    stats = bcg.stats()
    assert stats.graphs >= 1 and stats.replays >= 5, stats
