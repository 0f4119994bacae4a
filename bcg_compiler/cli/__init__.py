"""The command ``bcg``: run a model against eager, explain its plan, choose a ladder, simulate a fleet, see what is
installed.

Parses and prints; no more.

``arguments``  what commands take; ``common`` reads it
``runs``       run, bisect; ``plans`` explain, diff, check; ``times`` trace, stats
``fleet``      ladder, simulate; ``machine`` doctor
"""

import typer

from bcg_compiler.cli import fleet, machine, plans, runs, times

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help='The tools of bcg_compiler, a backend of torch.compile: torch.compile(model, backend="bcg").',
)

app.command("run", short_help="Run MODEL compiled, and compare it with eager.")(runs.run)
app.command("explain", short_help="Print what MODEL compiles to, and why.")(plans.explain)
app.command("bisect", short_help="Find what makes MODEL give other numbers than eager.")(runs.bisect)
app.command("ladder", short_help="Choose the buckets that prompts are padded to.")(fleet.ladder)
app.command("doctor", short_help="Print what is installed, and what is slower or off because of it; try it.")(
    machine.doctor
)
app.command("simulate", short_help="Simulate a fleet of ranks that vote on replay, from measured times.")(
    fleet.simulate_fleet
)
app.command("trace", short_help="Time each step of a replay of MODEL, and write a timeline for Perfetto.")(
    times.trace_model
)
app.command("stats", short_help="Run MODEL over prompts, and count what replays, what not, and how long steps take.")(
    times.stats_of_model
)
app.command("diff", short_help="Print what two plans differ in.")(plans.diff)
app.command("check", short_help="Fail if MODEL compiles to more than it once did.")(plans.check)


def main() -> None:
    """Entry point of the console script."""
    app()
