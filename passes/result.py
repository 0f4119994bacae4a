"""What every pass returns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PassResult:
    """What one pass did: how many nodes it marked or rewrote, and what it has to say about it."""

    name: str
    changes: int
    notes: tuple[str, ...] = ()
