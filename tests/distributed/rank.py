"""One rank of a test, in a process of its own: joins the group and calls a function of the test's file.

Run by ``conftest.on_ranks``, which gives ``rank``, ``ranks``, ``file``, ``function`` and ``folder`` as globals.
"""

import datetime
import importlib.util
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

rank: int = globals()["rank"]
ranks: int = globals()["ranks"]
file: str = globals()["file"]
function: str = globals()["function"]
folder: Path = globals()["folder"]

torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("on_ranks", file)
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[module.__name__] = module  # Dynamo looks up what the file's functions use
spec.loader.exec_module(module)
dist.init_process_group(
    "gloo",
    store=dist.FileStore(str(folder / f"{function}.store"), ranks),
    rank=rank,
    world_size=ranks,
    timeout=datetime.timedelta(seconds=60),
)
try:
    with torch.no_grad():
        getattr(module, function)(rank, ranks, folder)
    dist.barrier()
except BaseException:
    (folder / f"rank{rank}.error").write_text(traceback.format_exc())
    raise
finally:
    dist.destroy_process_group()
