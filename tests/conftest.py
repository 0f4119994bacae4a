"""What all tests share."""

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is no CUDA device."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    # torch takes seconds to import: only once a test asks for it.
    import torch

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def clean() -> Iterator[None]:
    """No programs of other tests, a seed, no grad mode."""
    import torch

    import bcg_compiler as bcg

    bcg.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    bcg.reset()
