"""What stands in the padded rows of a slot."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from bcg_compiler.errors import OptionError

Kind = Literal["zero", "sentinel", "keep", "once"]


@dataclass(frozen=True)
class SlotPolicy:
    """How the padded rows of one input are filled.

    ``zero``      with zeros, at each call
    ``sentinel``  with ``value``, at each call
    ``keep``      not at all: what earlier calls left stands there. For programs whose rows are independent only, and
                  never for an input that is used as an index
    ``once``      the whole input is copied at its first call and never again: it holds the same values at each call.
                  For inputs without rows
    """

    kind: Kind = "zero"
    value: float | int | bool = 0

    @classmethod
    def parse(cls, name: str, given: object) -> "SlotPolicy":
        """``"zero"``, ``"keep"``, ``"once"``, or a number: the sentinel. Raises ``OptionError`` that names the slot."""
        if isinstance(given, SlotPolicy):
            return given
        if given in ("zero", "keep", "once"):
            return cls(given)
        # A number of NumPy, say: what the program writes is Python's own.
        if isinstance(given, Integral):
            return cls("sentinel", given if isinstance(given, bool) else int(given))
        if isinstance(given, Real):
            return cls("sentinel", float(given))
        raise OptionError(
            f"Option 'slots' gives {given!r} for {name!r}; it must be 'zero', 'keep', 'once', or a number that padded "
            f"rows are filled with."
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.value}" if self.kind == "sentinel" else self.kind
