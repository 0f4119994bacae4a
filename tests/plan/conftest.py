"""Each test starts without compiled code, without gradients and from one random state."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.compiler.reset()
