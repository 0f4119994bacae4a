"""The command line over ranks, as torchrun starts them, and what it says without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcg_compiler.cli import app

#: A DeepSeek-V3.2 with an indexer, of two layers: one of experts.
FIELDS = dict(
    model_type="deepseek_v32",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    index_topk=8,
    index_n_heads=12,
    index_head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    initializer_range=0.1,
    first_k_dense_replace=1,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_shared_experts=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with that configuration, without weights, as the current one; nothing of a launcher."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "lengths.csv").write_text("20\n50\n9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def torchrun(ranks: int, *args: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    return done.returncode, done.stdout + done.stderr


RUN = ("run", "small", "--lengths", "lengths.csv", "--ladder", "16,32")


def test_run_over_ranks_is_equal() -> None:
    code, said = torchrun(2, "-m", "bcg_compiler.cli", *RUN, "--dp", "2", "--ep", "2")
    assert code == 0, said
    assert said.count("EQUAL  ") == 1 and said.count("2 buckets: 16, 32") == 1, said  # the first rank alone prints
    ranks = [line.split() for line in said.splitlines() if line.endswith("EQUAL")]
    assert [(rank[0], rank[1], rank[-1]) for rank in ranks] == [("0", "0", "EQUAL"), ("1", "1", "EQUAL")], said
    assert all(int(rank[rank.index("to") + 4]) > 0 for rank in ranks), said  # replays


#: One rank has other weights. Exit codes go to files: a launcher stops the others once one has failed.
SABOTAGE = """
import os, sys
from bcg_compiler.cli import main
from bcg_compiler.debug import rank_run

runner = rank_run.serving.runner

def other(model, **how):
    model.lm_head.weight.data.mul_(1.01 if os.environ["RANK"] == "1" else 1)
    return runner(model, **how)

rank_run.serving.runner = other
try:
    main()
except SystemExit as exit:
    open("exit" + os.environ["RANK"], "w").write(str(exit.code))
"""


@pytest.mark.nightly
def test_all_ranks_exit_alike_if_one_differs(place: Path) -> None:
    (place / "sabotage.py").write_text(SABOTAGE)
    code, said = torchrun(2, "sabotage.py", *RUN, "--cp", "2")
    assert code == 0 and said.count("DIFFERENT  ") == 1 and "rank 1, call 0: logits" in said, said
    assert "rank 0, call" not in said
    assert [(place / f"exit{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [("--cp", "2", "--pp", "2"), ("--pp", "2", "--dp", "2", "--ep", "2")])
def test_run_over_four_ranks_is_equal(sizes: tuple[str, ...]) -> None:
    code, said = torchrun(4, "-m", "bcg_compiler.cli", *RUN, *sizes)
    assert code == 0 and said.count("EQUAL  ") == 1, said


@pytest.mark.nightly
def test_doctor_compares_ranks_and_their_plans() -> None:
    code, said = torchrun(2, "-m", "bcg_compiler.cli", "doctor", "small", "--ranks", "--layout", "cp=2")
    assert code == 0 and "2 ranks came" in said and "NCCL" in said, said
    (plan,) = [line for line in said.splitlines() if line.startswith("plan of stage 0")]
    assert plan.endswith("on ranks 0 and 1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["run", "small", "--cp", "2", "--pp", "2"],
            "for 4 ranks, which a launcher starts. Type:\n"
            "torchrun --nproc-per-node 4 -m bcg_compiler.cli run small --cp 2 --pp 2",
        ),
        (["run", "small", "--dp", "2", "--ep", "2"], "torchrun --nproc-per-node 2 -m"),
        (["run", "llama", "--dp", "2"], "no serving model of the family 'llama'"),
        (["doctor", "--ranks"], "torchrun --nproc-per-node 2 -m bcg_compiler.cli doctor --ranks"),
        (["doctor", "small", "--ranks", "--layout", "dp=3"], "torchrun --nproc-per-node 3 -m"),
        (["doctor", "small", "--layout", "pc=3"], "no field 'pc'"),
        (["doctor", "smal", "--ranks"], "no model 'smal'"),
    ],
)
def test_without_a_launcher_the_command_is_given(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bcg", *args])
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert "Traceback" not in result.output


def test_what_ranks_cannot_do_is_said_with_the_rank(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    (place / "small" / "config.json").write_text(json.dumps({**FIELDS, "model_type": "llama"}))
    result = CliRunner().invoke(app, [*RUN, "--cp", "2"])
    assert result.exit_code == 2 and "error on rank 1: There is no serving model of the family 'llama'" in result.stderr


def test_explain_and_doctor_know_what_a_serving_model_declares() -> None:
    result = CliRunner().invoke(app, ["doctor", "small", "--layout", "cp=2", "--layout", "ep=2"])
    words = " ".join(result.output.split())
    assert result.exit_code == 0 and "attention_does_cp True, all_to_all torch, all_to_all_declared True" in words
    assert "None of the 8 rules for ranks speaks against replay" in words
    result = CliRunner().invoke(app, ["doctor", "small", "--layout", "cp=2", "--layout", "attention_does_cp=false"])
    assert "cp_attention cp is 2" in " ".join(result.output.split())
