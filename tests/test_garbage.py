"""Garbage is looked for less often while a graph is compiled, and as before when the last compile is over."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.fx import GraphModule

import bcg_compiler as bcg
from bcg_compiler import garbage
from bcg_compiler.garbage import YOUNG, seldom_collected


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_thresholds_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="wanted"), seldom_collected():
        assert gc.get_threshold()[0] == YOUNG
        raise ValueError("wanted")


def test_of_several_compiles_the_last_one_brings_them_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def compile_beside() -> None:
        with seldom_collected():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=compile_beside)
    before = gc.get_threshold()
    with seldom_collected():
        thread.start()
        inside.wait(60)
    assert gc.get_threshold()[0] == YOUNG  # the other one is not through
    leave.set()
    thread.join()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("thresholds", [(0, 10, 10), (YOUNG + 1, 5, 5)])
def test_thresholds_of_somebody_who_wants_fewer_collections_are_left(thresholds: tuple[int, int, int]) -> None:
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        with seldom_collected():
            assert gc.get_threshold() == thresholds
        assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)


def test_thresholds_that_are_set_meanwhile_are_left() -> None:
    before = gc.get_threshold()
    try:
        with seldom_collected():
            gc.set_threshold(123, 4, before[2])
        assert gc.get_threshold()[:2] == (123, 4)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_compile_is_such_a_block(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    seen: list[int] = []

    def compiler(module: GraphModule, fakes: object) -> object:
        seen.append(gc.get_threshold()[0])
        return module.forward

    options = {"segment_compiler": compiler, "capture": "emulated"}
    x = torch.ones(4)
    with torch.no_grad():
        if ahead:
            bcg.aot_compile(torch.sin, (x,), options=options)
        else:
            torch.compile(torch.sin, backend="bcg", options=options)(x)
    assert seen == [YOUNG]
    assert garbage._compiles == 0
