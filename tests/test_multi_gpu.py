"""``bench/multi_gpu.py`` runs to its end without a GPU: alone, and over ranks that gloo connects."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "bench/multi_gpu.py"


def run(*launcher: str, ranks: int, folder: Path) -> dict[str, float]:
    """What it wrote: the largest difference from one rank, by model and layout."""
    found = folder / "found.json"
    # In a session of its own, so that no rank outlives a launcher that is stopped.
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--device", "cpu", "--json", str(found)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(found.read_text())
    assert told["ranks"] == ranks and told["checks"] > 0 and not told["failed"]
    assert all(one["eager_ms"] > 0 and one["replayed_ms"] > 0 for one in told["results"])
    return {f"{one['model']} {one['layout']}": one["error"] for one in told["results"]}


def test_one_rank_alone(tmp_path: Path) -> None:
    found = run(ranks=1, folder=tmp_path)
    assert set(found) == {"deepseek_v32 one rank", "gpt_oss one rank"}


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_torchrun_has_started(ranks: int, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    found = run(*launcher, ranks=ranks, folder=tmp_path)
    layouts = {1: 1, 2: 4, 4: 5}  # of four ranks two layers make no pipeline of four stages
    assert sum(name.startswith("deepseek") for name in found) == layouts[ranks]
