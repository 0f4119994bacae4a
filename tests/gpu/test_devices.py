"""What only a real device shows: host and device values in one graph, copies between them, syncs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bcg_compiler as bcg
from bcg_compiler.models import zoo
from bcg_compiler.plan import plan_text
from bcg_compiler.runtime import programs_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def reasons(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Compile ``fn``, compare three calls with eager, and give the reason codes of its breaks."""
    compiled = torch.compile(fn, backend="bcg", fullgraph=True, options={"min_segment_kernels": 1})
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0)
    return bcg.stats(compiled).reasons


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def test_a_host_scalar_operand_is_cpu_compute() -> None:
    assert reasons(lambda x, t: (x / t).relu() + 1, on_gpu(4), torch.tensor(3.0)) == {"cpu_compute": 1}


def test_a_table_built_on_the_host_is_cpu_compute() -> None:
    found = reasons(lambda x: (x + torch.tensor([1.0, 2.0]).to(x.device)).relu() * 2, on_gpu(2))
    assert set(found) == {"cpu_compute"}


def test_a_python_constant_stored_into_a_tensor_keeps_to_one_operation() -> None:
    """Torch may copy it from the host, which no capture allows: then only the store is a break."""

    def store(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0] = 3.0
        return y.sin() * 2

    assert set(reasons(store, on_gpu(4))) <= {"capture_failed", "cpu_compute", "small_segment"}


def test_a_masked_store_of_a_python_constant_copies_it_from_the_host() -> None:
    def store(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[y > 2] = 1.0
        return y.sin() * 2

    assert reasons(store, on_gpu(4))["cpu_compute"] == 1


def test_a_tensor_of_a_constant_is_made_on_the_host() -> None:
    found = reasons(lambda x: (x + torch.tensor([1.0, 2.0], device=x.device)).relu() * 2, on_gpu(2))
    assert found["cpu_compute"] == 1


def test_a_masked_store_of_several_values_synchronises() -> None:
    def store(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[torch.tensor([True, False, True, False], device="cuda")] = v
        return y * 2

    assert "host_sync" in reasons(store, on_gpu(4), on_gpu(2))


def test_a_copy_to_the_host_synchronises() -> None:
    found = reasons(lambda x: (x.relu() + 1).to("cpu") * 2, on_gpu(4))
    assert found["host_sync"] == 1


@pytest.mark.parametrize("name", ["llama", "qwen3", "mamba2"])
def test_the_plan_is_that_of_the_host(name: str) -> None:
    """A plan may be made, looked at and tested on a machine without a GPU.

    (Not of every architecture: transformers itself runs other operations on a GPU for some.)
    """
    plans = []
    for device in ("cpu", "cuda"):
        torch.compiler.reset()
        model = zoo.build(name, device=device)
        compiled = torch.compile(model.model, backend="bcg")
        inputs = model.make_inputs(24, torch.Generator().manual_seed(1))
        with torch.inference_mode():
            compiled(**inputs)
        plans.append([program.plan and plan_text(program.plan) for program in programs_of(compiled)])
    assert plans[0] == plans[1]
