"""Rows of transformers' own architectures: which may be padded, which not, and why."""

import pytest
import torch

import bcg_compiler as bcg

transformers = pytest.importorskip("transformers")

from bcg_compiler.facts import RowVerdict  # noqa: E402
from bcg_compiler.models import zoo  # noqa: E402

#: name → a word of the reason; "" for those whose causal mask proves them.
VERDICTS = {
    "llama": "",
    "qwen3": "",
    "gemma3": "",
    "bert": "attention reads all rows",
    "mixtral": "sort compares rows",
}

#: Those that take seconds to compile.
SLOW = {
    "deepseek_v3": "sort compares rows",
    "gpt_oss": "max runs over all rows",
    "glm_moe_dsa": "topk computes with the number of rows",
    "mamba2": "pads by a number of rows",
    "qwen3_next": "pads by a number of rows",
}


def verdict(model: zoo.ZooModel) -> RowVerdict:
    torch.compiler.reset()
    compiled = torch.compile(model.model, backend="bcg", options={"capture": "off"})
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for length in (24, 30):
            compiled(**model.make_inputs(length, generator))
    plans = [program.plan for program in bcg.programs_of(compiled)]
    return next(rows for plan in plans if plan is not None for rows in plan.rows)


@pytest.mark.parametrize("name", [*VERDICTS, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)])
def test_rows_of_an_architecture(name: str) -> None:
    reason = (VERDICTS | SLOW)[name]
    model = zoo.build(name, layers=None if name in ("mixtral", "deepseek_v3") else 1)
    found = verdict(model)
    if reason:
        assert found.kind == "mixing" and reason in found.text
        assert found.module and found.source is not None
        return
    assert found.kind == "causal", found
    # The proof holds: with other tokens behind them, live rows are those of the prompt alone.
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for length, bucket in ((24, 32), (17, 64)):
            alone, among = (model.make_inputs(n, generator) for n in (length, bucket))
            among["input_ids"][:, :length] = alone["input_ids"]
            torch.testing.assert_close(model.model(**among)[0][:, :length], model.model(**alone)[0])
