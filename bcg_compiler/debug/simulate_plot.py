"""A picture of a simulated fleet, as a PNG or SVG file. Needs the extra ``plot``."""

from pathlib import Path

from bcg_compiler.debug.ladder_plot import PlotError
from bcg_compiler.debug.simulate import SHARES, Simulation


def plot(found: Simulation, path: Path) -> None:
    """Draw where the time of a step goes, and which buckets are used; for own buckets, and for one for all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    where, which = figure.subplots(2, 1)
    both = {"own buckets": found.own, "one bucket\nfor all": found.same}
    calls = found.fleet.ranks * found.fleet.steps * 1e3
    # What the group gains a rank is below 0, and drawn to the left.
    right, left = [0.0] * len(both), [0.0] * len(both)
    for colour, (share, label) in enumerate(SHARES.items()):
        widths = [outcome.shares[share] / calls for outcome in both.values()]
        starts = [right[at] if width >= 0 else left[at] for at, width in enumerate(widths)]
        where.barh(list(both), widths, left=starts, label=label, color=f"C{colour}")
        for at, width in enumerate(widths):
            right[at] += max(width, 0)
            left[at] += min(width, 0)
    where.invert_yaxis()
    where.set_xlabel("ms a step")
    where.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    places = range(len(found.ladder))
    for shift, (name, outcome) in zip((-0.2, 0.2), both.items(), strict=True):
        total = max(outcome.buckets.total(), 1)
        heights = [outcome.buckets[bucket] / total for bucket in found.ladder]
        which.bar([place + shift for place in places], heights, 0.4, label=name.replace("\n", " "))
    step = -(-len(found.ladder) // 24)
    which.set_xticks(list(places)[::step], [str(bucket) for bucket in found.ladder][::step], rotation=45)
    which.set(xlabel="bucket", ylabel="part of the replays")
    which.legend()
    replays = found.own.replays / max(found.own.batches, 1), found.same.replays / max(found.same.batches, 1)
    figure.suptitle(
        f"{found.fleet.ranks} ranks, {found.fleet.steps} steps: {replays[0]:.1%} of the batches replay in own buckets, "
        f"{replays[1]:.1%} in one for all"
    )
    try:
        figure.savefig(path, format=path.suffix[1:].lower())
    except OSError as error:
        raise PlotError(f"Cannot write the picture to {path}: {error.strerror}.") from None
