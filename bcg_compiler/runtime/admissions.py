"""Which calls of a program replay, and in which bucket."""

from collections.abc import Mapping
from dataclasses import replace

from bcg_compiler.buckets import Admission, Batch, Limits, admit
from bcg_compiler.context import published
from bcg_compiler.errors import AdmissionError
from bcg_compiler.runtime.buckets import Sizes

#: How many answers a program keeps: as many as there are lengths, mostly.
ANSWERS = 10_000


class Admissions:
    """What one ladder answers. ``sizes`` has its buckets; ``lost`` are rungs that could not be captured, and why."""

    def __init__(self, sizes: Sizes, limits: Limits, lost: Mapping[int, str]) -> None:
        self.sizes = sizes
        self._limits = limits
        self._lost = lost
        self._answers: dict[tuple[int, tuple[int, ...]], Admission] = {}

    def of_call(self, rows: int, others: tuple[int, ...]) -> Admission:
        """What becomes of a call with so many rows and these other open sizes: what the forward context has decided,
        or what the batch that it holds is answered, or a batch of so many rows.
        """
        agreed: Admission | None = published("admission")
        if agreed is not None:
            self._check_agreed(agreed, rows, others)
            if agreed.bucket is None or agreed.bucket not in self._lost:
                return agreed
            # In this very call: whoever admits cannot know it yet.
            return replace(agreed, bucket=None, reason="capture_failed", text=self._lost[agreed.bucket])
        batch: Batch | None = published("batch")
        if batch is None:
            found = self._answers.get((rows, others))
            if found is None:
                if len(self._answers) >= ANSWERS:
                    self._answers.clear()
                found = self._answers[rows, others] = self.of(Batch(rows=rows), others)
            return found
        if batch.rows != rows:
            raise AdmissionError(f"The batch of the forward context has {batch.rows} rows, and the inputs have {rows}.")
        return self.of(batch, others)

    def of(self, batch: Batch, others: tuple[int, ...]) -> Admission:
        """What becomes of a batch."""
        return admit(batch, tuple(b for b in self.sizes.usable(others) if b not in self._lost), self._limits)

    def forget(self) -> None:
        """Answer anew: a rung was lost."""
        self._answers.clear()

    def _check_agreed(self, agreed: Admission, rows: int, others: tuple[int, ...]) -> None:
        """What was decided for this call elsewhere, for all ranks, is done: here nothing is decided again."""
        usable = self.sizes.usable(others)
        if agreed.bucket is not None and (agreed.bucket not in usable or rows > agreed.bucket):
            raise AdmissionError(
                f"The forward context admits this call to bucket {agreed.bucket}, and the program, which is called "
                f"with {rows} rows, has the buckets {', '.join(map(str, usable)) or 'none'}: whoever admits must know "
                "the program's ladder, and the rows that its inputs have."
            )
        if agreed.rows > rows:
            raise AdmissionError(f"The forward context admits {agreed.rows} rows, and the inputs have {rows}.")
