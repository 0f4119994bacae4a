"""What is judged safe to pad is run padded: rubbish in the padded rows reaches no live row.

The graphs are those of ``tests/facts/test_rows.py``. Where the verdict is that padding may hold anything, it is NaN
that earlier calls have left; where it must be finite, large numbers; and some valid number for an index.
"""

import importlib.util
import inspect
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_compiler as bcg


def _tables() -> ModuleType:
    """The module with the tables, once in this process: it registers an op."""
    name = "tests.facts.test_rows"  # what pytest calls it
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "facts" / "test_rows.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


TABLES = _tables()
SAFE = {**TABLES.ROW_WISE, **TABLES.CAUSAL}

#: Safe, but a view of the input is returned, for which there is a copy.
RETURNS_INPUT = {"heads_and_back"}


def spoil_slots(pair: Any) -> None:
    """NaN in all slots, and the largest number in those of integers, which are filled anew."""
    for slot in pair.plan.slots:
        for spec in pair.plan.value(slot.ordinal).specs:
            storage = pair.program._arena._storages.get(f"slot {slot.ordinal}")
            dtype = getattr(torch, spec.dtype)
            if storage is not None:
                memory = torch.empty(0, dtype=dtype).set_(storage)
                memory.fill_(math.nan if dtype.is_floating_point else torch.iinfo(dtype).max)


@pytest.mark.parametrize("name", SAFE)
def test_rubbish_in_padded_rows_reaches_no_live_row(padded: Any, poisoned: None, name: str) -> None:
    fn, inputs = SAFE[name]
    one, other = inputs(5), inputs(8)
    dims = [tuple(d for d in range(a.dim()) if a.shape[d] != b.shape[d]) for a, b in zip(one, other, strict=True)]
    names = list(inspect.signature(fn).parameters)
    causal = name in TABLES.CAUSAL

    def filler(tensor: Tensor) -> Any:
        return 17 if not tensor.dtype.is_floating_point else 3e4 if causal else "keep"

    slots = {label: filler(tensor) for label, tensor in zip(names, one, strict=True)}
    options = {"token_dim": f"{names[0]}:{dims[0][0]}"} if len(one) == 1 else {}
    tied = fn if len(one) == 1 else _tied(fn)
    pair = padded(tied, open=dims, close=True, slots=slots, max_padding_factor=8, **options)
    lengths = (30, 5, 12, 3, 31, 7, 32, 4, 16, 30, 5)
    for n in lengths:
        if bcg.programs_of(pair.compiled) and pair.plan.padding is not None:
            spoil_slots(pair)
        pair(*inputs(n))
    if name in RETURNS_INPUT:
        assert pair.plan.unpadded.code == "input_returned"
        return
    assert pair.plan.padding.proof == ("causal" if causal else "row_wise")
    assert pair.stats.replays >= len(lengths) - 1


def _tied(fn: Any) -> Any:
    """``fn`` of two inputs that are known to have as many rows."""

    def tied(x: Tensor, y: Tensor) -> Any:
        torch._check(x.shape[0] == y.shape[0])
        return fn(x, y)

    return tied
