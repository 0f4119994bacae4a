"""Tests of several ranks: each rank is a process of its own, over gloo on the CPU."""

import multiprocessing
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: Seconds that the ranks of a test have together. Far more than they need: only what hangs is stopped.
LIMIT = 240


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[[int, Callable[[int, int, Path], None]], None]:
    """``on_ranks(2, function)`` calls ``function(rank, ranks, tmp_path)`` of the test's file on each of two ranks."""
    # Processes are forked from one that has torch and nothing else: to import it takes longer than most tests.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "bcg_compiler"])

    def run(ranks: int, function: Callable[[int, int, Path], None]) -> None:
        given = dict(ranks=ranks, file=function.__code__.co_filename, function=function.__name__, folder=tmp_path)
        script = str(Path(__file__).with_name("rank.py"))
        started = [
            context.Process(target=runpy.run_path, args=(script, {**given, "rank": rank}), daemon=True)
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(LIMIT / ranks)
        hanging = [rank for rank, process in enumerate(started) if process.is_alive()]
        for process in started:
            process.kill()
        errors = [path.read_text() for path in sorted(tmp_path.glob("rank*.error"))]
        assert not errors, "\n".join(errors)
        assert not hanging, f"ranks {hanging} hang"
        assert all(process.exitcode == 0 for process in started), [process.exitcode for process in started]

    return run
