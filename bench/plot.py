"""Pictures of what the other benchmarks wrote as JSON.

    python bench/plot.py FOLDER

For each ``replay.json`` and ``models.json`` in the folder an SVG file beside it. Needs matplotlib, and no GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def bars(path: Path, title: str, groups: dict[str, dict[str, float]], unit: str) -> None:
    """A group of horizontal bars for each of ``groups``, a bar for each variant."""
    figure = Figure(figsize=(9, 1 + 0.28 * sum(len(group) + 1 for group in groups.values())), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for ax, (name, values) in zip(axes, groups.items(), strict=True):
        names = list(values)[::-1]
        drawn = ax.barh(names, [values[n] for n in names], color=["C0" if n.startswith("bcg") else "C7" for n in names])
        ax.bar_label(drawn, fmt="%.4g", padding=3)
        ax.set_title(name, loc="left", fontsize="medium")
        ax.margins(x=0.12)
    axes[-1].set_xlabel(unit)
    figure.suptitle(title)
    figure.savefig(path)
    print(path)


def replay(path: Path, found: dict[str, Any]) -> None:
    """Wall time of the chain by its rows."""
    rows = list(next(iter(found["results"].values())))
    groups = {f"T = {r}": {v: by_rows[r]["wall_us"] for v, by_rows in found["results"].items()} for r in rows}
    bars(path.with_suffix(".svg"), f"{found['layers']} layers, a break each, {found['gpu']}", groups, "µs a call")


def models(path: Path, found: dict[str, Any]) -> None:
    """First calls and wall time of whole models."""
    for figure, unit in (("wall_us", "µs a call"), ("first_calls_s", "s until the third call returned")):
        groups: dict[str, dict[str, float]] = {}
        for one in found["results"]:
            if figure in one:
                caches = f", {one['caches']}" if one["caches"] else ""
                group = groups.setdefault(f"{one['model']}, {one['layers']} layers{caches}", {})
                group[one["variant"]] = one[figure]
        bars(path.with_name(f"{path.stem}_{figure}.svg"), f"{found['tokens']} tokens, {found['gpu']}", groups, unit)


def main() -> None:
    """Draw what there is."""
    folder = Path(sys.argv[1])
    for name, draw in (("replay.json", replay), ("models.json", models)):
        path = folder / name
        if path.exists():
            draw(path, json.loads(path.read_text()))


if __name__ == "__main__":
    main()
