"""What ``bcg doctor`` and ``bcg explain`` say of kernels and libraries."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import bcg_compiler as bcg
from bcg_compiler.cli import app, machine
from bcg_compiler.debug import doctor
from bcg_compiler.debug.doctor import examine, kernels_line
from bcg_compiler.models.layers import attention, flashinfer, gpus, kernels
from bcg_compiler.models.layers.pages import PagePool


@pytest.fixture(autouse=True)
def _no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has tests of its own."""
    monkeypatch.setattr(machine, "self_test", lambda device: ())


def test_doctor_names_the_kernel_in_use_and_why_not_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = examine()
    assert found.libraries["safetensors"] != "" and found.libraries["deep_ep"] == "" and found.devices == ()
    assert found.kernels == kernels.choices("cpu")
    assert found.notes[0].startswith("No CUDA")
    assert "mla_attention does without flashinfer: it needs an NVIDIA GPU." in found.notes
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert f"torch {torch.__version__}" in words and "mla_attention torch" in words and "deep_ep —" in words


def test_doctor_judges_a_layout_of_ranks() -> None:
    def asked(*pairs: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", *(word for pair in pairs for word in ("--layout", pair))])
        return result.exit_code, " ".join(result.output.split())

    code, words = asked()
    assert code == 0 and "ranks one digest" in words and "None of the 8 rules for ranks speaks against" in words
    code, words = asked("cp=4", "dp=2", "cp_strategy=ring", "two_batch_overlap=true")
    assert code == 0 and "ranks dp 2, cp 4, cp_strategy ring, two_batch_overlap True" in words
    assert "cp_strategy The strategy of context parallelism is 'ring'" in words and "cp_attention cp is 4" in words
    assert "two_batch_overlap Two halves" in words and words.endswith("Nothing is replayed: all ranks run eagerly.")
    assert asked("cp=4", "attention_does_cp=true")[1].endswith("speaks against replay.")
    code, words = asked("pc=4")
    assert code == 2 and "no field 'pc'" in words


def test_doctor_on_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has 8-bit numbers, without Triton, with FlashInfer."""
    properties: Any = type("Properties", (), {"name": "H200", "total_memory": 141 << 30, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer, "_library", lambda: type("Library", (), {"__version__": "0.7.4"}))
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "triton" else "1.0")
    found = examine()
    assert found.devices == ("H200, 141 GiB, compute capability 9.0",)
    assert found.kernels["mla_attention"] == {"flashinfer": "", "torch": ""}
    slots, sparse, index = found.notes
    assert "Without Triton slots are filled one by one" in slots
    assert "sparse_mla_attention does without triton: Triton is not installed" in sparse
    assert "index_top_k does without triton fp8: Triton is not installed" in index


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 4, 1, 8))
        self.register_buffer("values", torch.zeros(2, 4, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        attention.paged_attention(x, x.sin(), x.cos(), self.keys, self.values, out, 0.3)
        return out


def test_explain_names_the_kernels_of_serving_models_only(clean: None) -> None:
    batch = PagePool(2, 4).prefill({0: 5})
    compiled: Any = torch.compile(Attends(), backend="bcg")
    with batch.published():
        compiled(torch.randn(5, 1, 8))
    plans = tuple(program.plan for program in bcg.programs_of(compiled))
    assert "grouped_query_attention: torch" in kernels_line(plans, torch.device("cpu"))
    other: Any = torch.compile(lambda x: x.sin(), backend="bcg")
    other(torch.ones(3))
    assert kernels_line(tuple(p.plan for p in bcg.programs_of(other)), torch.device("cpu")) == ""
