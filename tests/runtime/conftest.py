"""Each test starts from one state, and runs where nothing needs a gradient."""

from collections.abc import Iterator

import pytest
import torch

import bcg_compiler as bcg


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    bcg.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    bcg.reset()
