"""Two searches on plain numbers: which buckets pad least, and which of them to keep within a budget of bytes."""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate


def fewest_padded(values: Sequence[int], rows: Sequence[int], count: int) -> list[int]:
    """Of ascending ``values``, the at most ``count`` that pad ``rows`` least; the last value is always one of them.

    ``rows[i]`` > 0 rows have the value ``values[i]``, and each is padded to the next chosen one; the last value may
    have no row. See Note [The cheapest ladder].
    """
    count = min(count, len(values))
    if count == len(values):
        return list(values)
    seen = list(accumulate(rows, initial=0))
    tokens = list(accumulate((value * number for value, number in zip(values, rows, strict=True)), initial=0))
    whole = [0, *(value * seen[end] - tokens[end] for end, value in enumerate(values, 1))]

    # best[j]: padding of the first j values with so many buckets, the j-th value the last of them.
    best = whole
    chosen_before: list[array[int]] = []
    for made in range(1, count):
        now, came_from = [0] * len(whole), array("q", bytes(8 * len(whole)))
        lines: deque[tuple[int, int, int]] = deque()
        for end in range(made + 1, len(whole)):
            start = end - 1
            _add_line(lines, (-seen[start], best[start] + tokens[start], start))
            value = values[start]
            while len(lines) > 1 and lines[1][0] * value + lines[1][1] <= lines[0][0] * value + lines[0][1]:
                lines.popleft()
            slope, height, came_from[end] = lines[0]
            now[end] = whole[end] + slope * value + height
        best = now
        chosen_before.append(came_from)

    ends = [len(values)]
    for came_from in reversed(chosen_before):
        ends.append(came_from[ends[-1]])
    return [values[end - 1] for end in reversed(ends)]


# Note [The cheapest ladder]
#
# An optimal bucket can be lowered to the longest prompt that it holds, so only the lengths that occur (rounded up) can
# be buckets. Let W[j] and S[j] be the rows and the tokens of the first j values. With b buckets, the last one at the
# j-th value v:
#
#     best[b][j] = min over i < j of  best[b-1][i] + v * (W[j] - W[i]) - (S[j] - S[i])
#                = v * W[j] - S[j]  +  min over i < j of  (-W[i]) * v + (best[b-1][i] + S[i])
#
# What is minimised is a set of straight lines, at v. Their slopes fall as i grows, and v grows with j, so the lower
# envelope is a queue: a new line goes in behind, lines that are passed fall off in front (the "convex hull trick").
# That is count * different lengths steps in exact integers; to try all pairs would be quadratic in the lengths.


def _add_line(lines: deque[tuple[int, int, int]], new: tuple[int, int, int]) -> None:
    """Put a line of smaller slope behind the envelope, and drop the lines that it leaves nowhere lowest."""
    while len(lines) > 1:
        (slope, height, _), (middle_slope, middle_height, _) = lines[-2], lines[-1]
        # The new line meets the one before the last no later than the last does.
        if (new[1] - height) * (slope - middle_slope) > (middle_height - height) * (slope - new[0]):
            break
        lines.pop()
    lines.append(new)


def keep_within(buckets: Sequence[int], rows: Sequence[int], costs: Sequence[int], budget: int) -> list[int]:
    """Positions of the buckets to keep so that their costs stay within ``budget``; the last one is always kept.

    ``rows[i]`` rows are padded to ``buckets[i]``; those of a dropped bucket go to the next kept one. The bucket that
    saves the fewest padded tokens for each byte that is too many goes first. Afterwards those that turn out to have
    room come back, the one that saves most first: a large bucket that went late may leave room for small ones that
    went early. This is greedy; the best choice is a knapsack problem.
    """
    up_to = list(accumulate(rows, initial=0))

    def saved(position: int, before: int, after: int) -> int:
        """Padded tokens that a bucket saves between two kept ones."""
        return (up_to[position + 1] - up_to[before + 1]) * (buckets[after] - buckets[position])

    kept = list(range(len(buckets)))
    total = sum(costs)
    while total > budget:
        neighbours = zip(kept, [-1, *kept], kept[1:], strict=False)
        _, _, cheapest = min(
            # Bytes beyond those that are too many are worth nothing.
            (saved(position, before, after) / min(costs[position], total - budget), -costs[position], position)
            for position, before, after in neighbours
            if costs[position]
        )
        kept.remove(cheapest)
        total -= costs[cheapest]

    dropped = sorted(set(range(len(buckets))) - set(kept))
    while True:
        gains = []
        for position in dropped:
            if costs[position] <= budget - total:
                before = max((k for k in kept if k < position), default=-1)
                gains.append(
                    (saved(position, before, min(k for k in kept if k > position)), -costs[position], position)
                )
        gain, _, position = max(gains, default=(0, 0, 0))
        if not gain:
            return kept
        dropped.remove(position)
        kept = sorted([*kept, position])
        total += costs[position]
