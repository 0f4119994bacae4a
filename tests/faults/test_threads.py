"""Threads that call compiled functions at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bcg_compiler as bcg

ONE_FORM = pytest.mark.parametrize("breaks", ["custom_op"], indirect=True)


@bcg.eager_break(fake=lambda x: torch.empty_like(x))
def shifted(x: Tensor) -> Tensor:
    return x + bcg.current_context().shift


@pytest.mark.parametrize("warm", [True, False], ids=["compiled_before", "compiled_by_both"])
@pytest.mark.parametrize("breaks", ["custom_op", "eager_break"], indirect=True)
def test_threads_call_one_compiled_function(
    breaks: SimpleNamespace, rand: Any, way: dict[str, Any], warm: bool
) -> None:
    """Two threads shared buffers, or the context of a break: each got values of the other (pytorch/pytorch#158551)."""
    torch.manual_seed(1)
    lin = nn.Linear(16, 16)

    def program(x: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        h = breaks.wall(lin(x).sin())
        breaks.fold_(acc, h)
        h = shifted(h).cos()
        parts = breaks.three(h)
        return parts[0] + parts[2][:, None], acc.sum(0)

    compiled = torch.compile(program, backend="bcg", fullgraph=True, options=way)
    inputs = {n: [rand(8, 16) for _ in range(12)] for n in range(2)}
    if warm:
        with bcg.forward_context(shift=0):
            compiled(rand(8, 16), rand(8, 16))
    gate = threading.Barrier(2, timeout=60)

    def work(n: int) -> list[Any]:
        gate.wait()
        results = []
        with torch.no_grad(), bcg.forward_context(shift=n):
            for x in inputs[n]:
                acc = x.clone()
                results.append((compiled(x, acc), acc))
        return results

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(work, range(2)))
    for n, results in enumerate(seen):
        for x, (got, acc) in zip(inputs[n], results, strict=True):
            with bcg.forward_context(shift=n):
                want_acc = x.clone()
                want = program(x, want_acc)
            assert torch.equal(acc, want_acc)
            assert all(map(torch.equal, got, want))


@ONE_FORM
def test_threads_call_two_compiled_functions(breaks: SimpleNamespace, rand: Any, way: dict[str, Any]) -> None:
    """Programs of different functions at once (pytorch/pytorch#158551)."""
    bodies = [lambda x: breaks.wall(x.sin()).cos() + 1, lambda x: breaks.three(x.cos())[1].sin() - breaks.mix(x)]
    compiled = [torch.compile(body, backend="bcg", fullgraph=True, options=way) for body in bodies]
    inputs = [rand(8, 8) for _ in range(12)]
    gate = threading.Barrier(2, timeout=60)

    def work(n: int) -> list[Tensor]:
        gate.wait()
        with torch.no_grad():
            return [compiled[n](x) for x in inputs]

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(work, range(2)))
    for body, results in zip(bodies, seen, strict=True):
        assert all(torch.equal(got, body(x)) for got, x in zip(results, inputs, strict=True))


def test_thread_keeps_its_own_modes(compile_pair: Any, rand: Any, way: dict[str, Any]) -> None:
    """Grad mode and autocast belong to a thread: a program leaves those of other threads (pytorch/pytorch#193044)."""

    def program(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = (x @ x).sin()
        return h.float() @ x

    compiled = torch.compile(program, backend="bcg", fullgraph=True, options=way)
    x = rand(4, 4)
    want = program(x)
    states: list[Any] = []

    def work(grad: bool) -> Tensor:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=False):
            out = compiled(x)
            states.append((grad, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return out

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, [True, False] * 3))
    assert all(torch.equal(result, want) for result in results)
    assert all(grad == seen and not autocast for grad, seen, autocast in states)
