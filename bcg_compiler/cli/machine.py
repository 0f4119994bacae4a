"""``bcg doctor``: this machine and its ranks."""

from typing import Annotated

import torch
import typer

from bcg_compiler.cli.arguments import DEFAULT_LADDER, Device, Dtype, DtypeOption, LayoutPairs
from bcg_compiler.cli.common import errors_in_words, fields_of, find_device, find_launch, quiet, read_layout
from bcg_compiler.debug import screen
from bcg_compiler.debug.doctor import examine, health_view, layout_view
from bcg_compiler.debug.ladders import read_ladder
from bcg_compiler.debug.rank_doctor import examine_ranks, plan_of, ranks_health_view
from bcg_compiler.debug.self_test import self_test, self_test_view
from bcg_compiler.debug.served import ServedModel
from bcg_compiler.distributed.ranks import Ranks

#: Seconds that ranks wait for each other.
DOCTOR_TIMEOUT = 60.0


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A serving model: a zoo name, or a folder with a config.json."),
    ] = None,
    layout: LayoutPairs = None,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Compare the ranks that torchrun has started: this command on each of them.")
    ] = False,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Print versions, devices, libraries, the kernels that serving models use here, and what is slower or off; compile,
    capture and replay a tiny program, and exit with 1 if that fails.

    With --layout also which rules speak against replay on ranks that are laid out like that; of MODEL it is known what
    it declares. With --ranks also whether all ranks come and have the same environment, and of MODEL the same plans:
    exits with 1 if not.
    """
    with quiet(), errors_in_words():
        fields = None if model is None else fields_of(model)
        parallel = read_layout(fields, layout)
        launch = find_launch(max(2, parallel.dp * parallel.pp * parallel.cp)) if ranks else None
        health, failed = examine(), False
        out = screen.console()
        out.quiet = launch is not None and launch.rank != 0
        out.print(health_view(health), "")
        if model is None and not layout and launch is None:
            checks = self_test(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            out.print(self_test_view(checks), "")
            failed = any(check.state == "failed" for check in checks)
        out.print(layout_view(parallel))
        if launch is None:
            raise typer.Exit(1 if failed else 0)
        where = find_device(device, launch)
        with launch.group(where, DOCTOR_TIMEOUT):
            joined = Ranks.join(parallel) if model or layout else None
            plan = ""
            if model is not None and joined is not None:
                served = ServedModel.of(model, dtype=getattr(torch, dtype), device=where)
                plan = plan_of(served, joined, read_ladder(DEFAULT_LADDER, []))
            found = examine_ranks(health, DOCTOR_TIMEOUT, joined, plan)
        out.print("", ranks_health_view(found))
    raise typer.Exit(0 if found.healthy else 1)
