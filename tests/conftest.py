"""What all tests share.

With ``--segments inductor`` whatever leaves the choice to ``segment_compiler="auto"`` has its segments compiled by
Inductor, and ``torch.equal`` takes floating numbers for equal that are close: it sums in another order, and fuses.
All else that a test compares stays as strict as it is: shapes, strides, dtypes, what shares memory with what, what is
written, in which order breaks run, and errors.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--segments``: what compiles segments where a test does not say it."""
    parser.addoption("--segments", choices=("eager", "inductor"), default="eager", help="what compiles segments")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is no CUDA device, and those marked eager_segments under Inductor."""
    if config.getoption("segments") == "inductor":
        for item in items:
            for mark in item.iter_markers("eager_segments"):
                item.add_marker(pytest.mark.skip(reason=mark.args[0]))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    # torch takes seconds to import: only once a test asks for it.
    import torch

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_looked_at_again() -> None:
    """Tests collect garbage, to see that models die: in a process that has imported transformers that takes seconds."""
    gc.collect()
    gc.freeze()


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
def inductor_segments() -> Iterator[None]:
    """Segments are compiled by Inductor where a test does not say by what, and ``torch.equal`` means close."""
    import torch

    with _auto_means("inductor") as patch:
        patch.setattr(torch, "equal", _close)
        yield


@pytest.fixture(autouse=True)
def _segments(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile segments as ``--segments`` says, on every device."""
    if request.config.getoption("segments") == "inductor":
        request.getfixturevalue("inductor_segments")
        yield
    elif "torch" in sys.modules:
        with _auto_means("eager"):
            yield
    else:
        yield


@contextmanager
def _auto_means(compiler: str) -> Iterator[pytest.MonkeyPatch]:
    from dataclasses import replace

    from bcg_compiler import backend

    choose = backend.segment_compiler

    def chosen(options: backend.Options, *, on_cuda: bool) -> Any:
        auto = options.segment_compiler == "auto"
        return choose(replace(options, segment_compiler=compiler) if auto else options, on_cuda=on_cuda)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "segment_compiler", chosen)
        yield patch


#: How far apart numbers may be, by the bits of their dtype, as a part of the largest one beside them.
TOLERANCE = {64: 1e-9, 32: 1e-4, 16: 2e-2}


def _close(one: "Tensor", other: "Tensor") -> bool:
    """In place of ``torch.equal``: floating numbers may differ by what another order of sums makes of them."""
    import torch

    if one.shape != other.shape or one.dtype != other.dtype or not (one.is_floating_point() or one.is_complex()):
        return bool((one == other).all()) if one.shape == other.shape else False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    tolerance = TOLERANCE[torch.finfo(other.dtype).bits]
    finite = other[other.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: ``text`` is that of the file ``golden/<name>.txt`` beside the test.

    With ``BCG_UPDATE_GOLDEN=1`` in the environment the file becomes the text.
    """
    folder = request.path.parent / "golden"

    def check(name: str, text: str) -> None:
        path: Path = folder / f"{name}.txt"
        if os.environ.get("BCG_UPDATE_GOLDEN") == "1":
            folder.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} is not there; write it with BCG_UPDATE_GOLDEN=1"
        assert text == path.read_text(), f"another text than {path}; see CONTRIBUTING.md for how to accept it"

    return check


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
