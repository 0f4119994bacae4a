"""What all tests share."""

import sys
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


@pytest.fixture(autouse=True, scope="session")
def _guards_that_last() -> Iterator[None]:
    """Some tests replace modules under compiled code.

    torch 2.11's guards keep a pointer to the dictionary of a module that was freed (pytorch/pytorch#183753), whichever
    backend compiled it, and the process dies. Later versions leave that kind of guard out by default.
    """
    if "torch" in sys.modules:  # else no test of this session has any use for it
        from torch._dynamo import config

        config.use_recursive_dict_tags_for_guards = False
    yield


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
