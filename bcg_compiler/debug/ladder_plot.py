"""A picture of a ladder over a histogram of the prompts, as a PNG or SVG file. Needs the extra ``plot``."""

from importlib.util import find_spec
from pathlib import Path

from bcg_compiler.debug.ladders import LadderReport, bars
from bcg_compiler.errors import BcgError

#: The formats, by the suffix of the file.
FORMATS = (".png", ".svg")

#: The histogram has at most so many bars.
MOST_BARS = 160


class PlotError(BcgError):
    """A picture that cannot be made here."""


def check_plot(path: Path) -> None:
    """Raise ``PlotError`` before the work is done rather than after it."""
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f"Cannot plot to {path}: its name must end in {' or '.join(FORMATS)}.")
    if find_spec("matplotlib") is None:
        raise PlotError('To plot needs matplotlib: pip install "bcg-compiler[plot]".')


def plot(report: LadderReport, path: Path) -> None:
    """Write the histogram of the lengths up to the ceiling, with a line for each rung."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    shown = list(bars(report, MOST_BARS))
    starts = [first - 1 for first, _, _, _ in shown]
    widths = [last - first + 1 for first, last, _, _ in shown]
    axes.bar(starts, [number for _, _, number, _ in shown], widths, align="edge", color="C0", alpha=0.6)
    axes.vlines(
        list(report.ladder), 0, 1, transform=axes.get_xaxis_transform(), color="C3", linewidth=0.8, label="buckets"
    )
    axes.set(xlim=(0, report.ladder.ceiling * 1.01), xlabel="prompt length (tokens)", ylabel="prompts")
    axes.set_title(
        f"{len(report.ladder)} buckets: {report.waste.ratio:.2%} padding; "
        f"the default ladder's {len(report.default)}: {report.default_waste.ratio:.2%}"
    )
    axes.legend(loc="upper right")
    try:
        figure.savefig(path, format=path.suffix[1:].lower())
    except OSError as error:
        raise PlotError(f"Cannot write the picture to {path}: {error.strerror}.") from None
