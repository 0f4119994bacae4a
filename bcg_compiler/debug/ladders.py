"""How well a ladder suits the prompts of a file: what it pads, on rows it was not fitted on too, and a picture."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

from rich.bar import Bar
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bcg_compiler.buckets.ladder import Ladder, Waste
from bcg_compiler.debug.words import count
from bcg_compiler.errors import LadderError

#: What ``read_ladder`` takes.
FORMS = (
    "from-lengths:16 (16 buckets, chosen by the lengths; from-lengths:16:2048 ends at 2048), default:2048, "
    "relative:2048:0.1 (up to 2048, no prompt padded by more than a tenth), or a list of buckets: 64,128,256"
)

#: The histogram has at most so many bars, of this width in columns, and so many rungs are written beside each.
MOST_BARS = 24
BAR_WIDTH = 40
MOST_RUNGS = 6


@dataclass(frozen=True)
class Recipe:
    """How a ladder is chosen: the optimum of ``count`` buckets, or each bucket as ``waste`` allows, or the default."""

    count: int | None = None
    waste: float | None = None
    multiple: int = 1
    ceiling: int | None = None

    def make(self, lengths: Counter[int]) -> Ladder:
        """The ladder for these lengths; without a ceiling it ends at the longest one."""
        if self.count is not None:
            return Ladder.from_lengths(lengths, self.count, self.multiple, self.ceiling)
        ceiling = max(lengths) if self.ceiling is None else self.ceiling
        made = Ladder.default(ceiling) if self.waste is None else Ladder.relative(ceiling, self.waste)
        return made.multiple_of(self.multiple)

    def __str__(self) -> str:
        if self.count is not None:
            how = f"the fewest padded tokens with at most {count(self.count, 'bucket')}"
        elif self.waste is not None:
            how = f"no prompt padded by more than {self.waste:.3g} of its length"
        else:
            how = "the default ladder"
        return how + (f", all multiples of {self.multiple}" if self.multiple > 1 else "")


def read_ladder(text: str, lengths: Iterable[int]) -> Ladder:
    """The ladder that a text means, see ``FORMS``; ``lengths`` are what ``from-lengths`` chooses by.

    Raises ``LadderError`` for a text of another form, and for what no ladder can be made from.
    """
    kind, *numbers = text.split(":")
    try:
        match kind, numbers:
            case "from-lengths", [count]:
                recipe = Recipe(count=int(count))
            case "from-lengths", [count, ceiling]:
                recipe = Recipe(count=int(count), ceiling=int(ceiling))
            case "default", [ceiling]:
                recipe = Recipe(ceiling=int(ceiling))
            case "relative", [ceiling, waste]:
                recipe = Recipe(ceiling=int(ceiling), waste=float(waste))
            case _:
                return Ladder([int(bucket) for bucket in text.split(",")])
    except LadderError:
        raise
    except ValueError:
        raise LadderError(f"{text!r} is no ladder. Give {FORMS}.") from None
    return recipe.make(Counter(lengths))


@dataclass(frozen=True)
class LadderReport:
    """A ladder beside the default one, on the rows of a file."""

    recipe: Recipe
    lengths: Counter[int]
    ladder: Ladder
    default: Ladder
    waste: Waste
    default_waste: Waste
    held_out: Waste | None
    """The odd rows, on the ladder that is chosen by the even rows alone; ``None`` if either has no prompt that fits."""
    default_held_out: Waste | None


def measure(lengths: Iterable[int], recipe: Recipe) -> LadderReport:
    """Choose a ladder for lengths and count its padding. They are read once; only how often each occurs is kept."""
    even, odd = Counter[int](), Counter[int]()
    for half, length in zip(cycle((even, odd)), lengths, strict=False):
        half[length] += 1
    both = even + odd
    ladder = recipe.make(both)
    waste = ladder.waste(both)
    if not waste.rows:
        raise LadderError(
            f"The ceiling is {ladder.ceiling}, and the shortest length is {min(both)}: no prompt fits. Give a higher "
            "ceiling."
        )
    default = Ladder.default(ladder.ceiling).multiple_of(recipe.multiple)
    comparable = all(half and min(half) <= ladder.ceiling for half in (even, odd))
    fitted = replace(recipe, ceiling=ladder.ceiling).make(even) if comparable else None
    return LadderReport(
        recipe=recipe,
        lengths=both,
        ladder=ladder,
        default=default,
        waste=waste,
        default_waste=default.waste(both),
        held_out=fitted.waste(odd) if fitted else None,
        default_held_out=default.waste(odd) if fitted else None,
    )


def ladder_view(report: LadderReport) -> Group:
    """The buckets, what they pad, and a histogram of the lengths with the rungs."""
    waste, held_out = report.waste, report.held_out
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("buckets", "padding", "on odd rows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("this ladder", str(len(report.ladder)), _percent(waste), _percent(held_out), style="bold")
    table.add_row(
        "default ladder", str(len(report.default)), _percent(report.default_waste), _percent(report.default_held_out)
    )
    notes = ["Padding is padded tokens over live tokens."]
    if held_out is None:
        notes.append("There are too few rows to choose by the even ones and count on the odd ones.")
    elif report.recipe.count is not None:
        notes.append("On odd rows: chosen by rows 0, 2, 4, … alone and counted on rows 1, 3, 5, …")
    else:
        notes.append("On odd rows: counted on rows 1, 3, 5, …")
    if waste.rows_above:
        above = f"{count(waste.rows_above, 'prompt')} of {report.lengths.total():,} above the ceiling"
        notes.append(f"Not counted: {above}, which no bucket holds.")
    return Group(
        Text(f"{count(len(report.ladder), 'bucket')}: {list(report.ladder)}"),
        Text(),
        table,
        *(Padding(Text(note, style="dim"), (0, 0, 0, 2), expand=False) for note in notes),
        Text(),
        _histogram(report),
    )


def bars(report: LadderReport, most: int) -> Iterator[tuple[int, int, int, list[int]]]:
    """A histogram up to the ceiling, of at most so many bars of one width: first and last length, prompts, rungs."""
    ceiling, width = report.ladder.ceiling, 1
    while ceiling > width * most:
        width *= 2
    prompts, rungs = Counter[int](), defaultdict[int, list[int]](list)
    for length, number in report.lengths.items():
        if length <= ceiling:
            prompts[(length - 1) // width] += number
    for bucket in report.ladder:
        rungs[(bucket - 1) // width].append(bucket)
    for bar, before in enumerate(range(0, ceiling, width)):
        yield before + 1, min(before + width, ceiling), prompts[bar], rungs[bar]


def _histogram(report: LadderReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("prompts", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("rungs", overflow="fold")
    shown = list(bars(report, MOST_BARS))
    highest = max(number for _, _, number, _ in shown)
    for first, last, number, rungs in shown:
        bar = Bar(highest, 0, number, width=BAR_WIDTH, color="cyan")
        tokens = f"{first} to {last}" if first < last else f"{first}"
        table.add_row(tokens, f"{number:,}", bar, _some_rungs(rungs))
    if report.waste.rows_above:
        table.add_row(f"above {report.ladder.ceiling}", f"{report.waste.rows_above:,}", "", "", style="dim")
    return table


def _some_rungs(rungs: list[int]) -> str:
    if len(rungs) <= MOST_RUNGS:
        return " ".join(map(str, rungs))
    return f"{' '.join(map(str, rungs[: MOST_RUNGS - 2]))} … {rungs[-1]}: {len(rungs)} rungs"


def _percent(waste: Waste | None) -> str:
    return f"{waste.ratio:.2%}" if waste else "unknown"
