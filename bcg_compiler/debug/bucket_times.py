"""Measured times of a program: of each bucket, and of eager runs."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcg_compiler.errors import BcgError, nearest

#: What a file of times looks like.
FORM = '{"buckets": {"256": 910, "512": 1480}, "eager_us": 2600, "eager_us_per_token": 1.9}'
FIELDS = ("buckets", "eager_us", "eager_us_per_token")


class TimesError(BcgError, ValueError):
    """A file of times that cannot be used, or a bucket beyond what was measured."""


@dataclass(frozen=True)
class BucketTimes:
    """Microseconds of one call."""

    buckets: Mapping[int, float]
    """Of a replay in each bucket that was measured, ascending."""
    eager: float
    """Of an eager run, whatever its rows: mostly launches."""
    eager_per_token: float
    """Of each row of an eager run beside that."""

    def replay(self, bucket: int) -> float:
        """Of a replay; between two measured buckets on the line through both. ``TimesError`` above the last one."""
        known = tuple(self.buckets)
        at = bisect_left(known, bucket)
        if at == len(known):
            raise TimesError(
                f"Bucket {bucket} is above {known[-1]}, the largest that was measured: measure it, or give a ladder "
                "that ends there."
            )
        high = known[at]
        if high == bucket or at == 0:
            return self.buckets[high]
        low = known[at - 1]
        share = (bucket - low) / (high - low)
        return self.buckets[low] * (1 - share) + self.buckets[high] * share

    def run_eagerly(self, rows: int) -> float:
        """Of an eager run of so many rows; of none, nothing."""
        return self.eager + self.eager_per_token * rows if rows else 0.0


def read_times(path: Path) -> BucketTimes:
    """Read a JSON file of the form ``FORM``. Raises ``TimesError`` with what is wrong in it."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise TimesError(f"Cannot read the times from {path}: {error.strerror}.") from None
    except ValueError as error:
        raise TimesError(f"{path} is no JSON: {error}. Give {FORM}.") from None
    if not isinstance(found, dict) or set(found) != set(FIELDS):
        unknown = [name for name in found if name not in FIELDS] if isinstance(found, dict) else []
        near = f" {nearest(unknown[0], FIELDS)}" if unknown else ""
        raise TimesError(f"{path} holds {_short(found)}; give {FORM}, in microseconds of one call.{near}")
    buckets = found["buckets"]
    if not isinstance(buckets, dict) or not buckets:
        raise TimesError(f"buckets in {path} is {_short(buckets)}; it has a time for one bucket at least.")
    times: dict[int, float] = {}
    for bucket, time in buckets.items():
        if not bucket.isascii() or not bucket.isdecimal() or int(bucket) < 1:
            raise TimesError(f"{bucket!r} in {path} is not a bucket: a number of tokens, at least 1.")
        times[int(bucket)] = _time(path, f"The time of bucket {bucket}", time)
    eager, per_token = (_time(path, name, found[name]) for name in FIELDS[1:])
    return BucketTimes(dict(sorted(times.items())), eager, per_token)


def _time(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise TimesError(f"{name} in {path} is {value!r}; it is a number of microseconds, at least 0.")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
