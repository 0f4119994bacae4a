"""What a launcher has started: the place of this process, and who did not come."""

import pytest
import torch.distributed as dist

from bcg_compiler.distributed.launch import Launch, roll_call
from bcg_compiler.errors import RankError


def test_the_environment_tells_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Launch.found() is None
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Launch.found() == Launch(5, 8, 5)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Launch.found() == Launch(5, 8, 1)


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    with pytest.raises(RankError, match=r"Of 4 ranks ranks 0, 2 and 3 did not come within 0.05 seconds"):
        roll_call(store, 1, 4, 0.05)
    with pytest.raises(RankError, match=r"Of 4 ranks rank 0 did not come"):
        for rank in (2, 3):
            store.set(f"bcg roll call {rank}", "here")
        roll_call(store, 1, 4, 0.05)
    roll_call(store, 0, 4, 0.05)  # the last one, which waits for nobody
