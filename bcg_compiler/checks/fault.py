"""What a check has found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bcg_compiler.errors import BcgError
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.facts.node import Source

Kind = Literal["capture", "padding", "compiler", "write", "result"]

#: What each kind of fault means, and what to do about it.
KINDS: dict[Kind, tuple[str, str]] = {
    "capture": (
        "A replay gives other numbers than the operation itself on the same inputs: it reads what is no input of the "
        "graph, and that was frozen at capture (a number of the host's, memory that has moved).",
        "Give the operation what it reads as a tensor, or let it run eagerly: take it out of the option capturable, or "
        "declare it with @eager_break.",
    ),
    "padding": (
        "Padded rows reach live ones: in its bucket the live rows are not those of the exact length.",
        "Leave assume_rows_independent out: it is not so here, and exact shapes are captured instead. To pad all the "
        "same, mask what the operation reads, or make it a break that reads live rows only.",
    ),
    "compiler": (
        "The segment compiler's code gives other numbers than the operations that it was made of, on the same inputs.",
        "Compile with options={'segment_compiler': 'eager'}, or make the operation a break by a rule "
        "(options={'breaks': [...]}), and report it to whoever wrote the compiler.",
    ),
    "write": (
        "A break writes what it does not declare: what comes behind it goes on with old values, or the write is lost.",
        "Name it in mutates_args of @eager_break or of torch.library.custom_op.",
    ),
    "result": (
        "A break gives another form than its fake says: what was planned and compiled behind it takes it for that.",
        "Let fake= of @eager_break, or register_fake of the custom op, give what the body gives.",
    ),
}


@dataclass(frozen=True)
class Fault:
    """An operation of a compiled graph that gives something else than in eager code.

    ``kind``     see ``KINDS``
    ``step``     index of its step in the plan; ``step_kind`` what that is
    ``ordinal``, ``op``, ``module``, ``source``  the operation, and the user's line
    ``what``     what was seen, in words
    ``largest``  the largest absolute difference of its numbers; infinite where there is none to speak of
    ``rows``     live rows of the call and rows of its bucket, where it was padded
    ``graph``    the graph that it is in
    ``given``, ``made``  by ordinal: what its segment was given, and what the operations of that make of it at the exact
                 number of rows; of a break what it was given
    """

    kind: Kind
    step: int
    step_kind: Literal["segment", "break"]
    ordinal: int
    op: str
    module: str
    source: Source | None
    what: str
    largest: float
    rows: tuple[int, int] | None = None
    graph: AnnotatedGraph | None = field(default=None, repr=False, compare=False)
    given: Mapping[int, Any] = field(default_factory=dict, repr=False, compare=False)
    made: Mapping[int, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def place(self) -> str:
        """The step, the operation, its module and the user's line, in one line."""
        where = f" in {self.module}" if self.module else ""
        line = f" ({self.source})" if self.source else ""
        return f"{self.step_kind} {self.step}, %{self.ordinal} {self.op}{where}{line}"

    def __str__(self) -> str:
        code = f"\n    {self.source.code}" if self.source and self.source.code else ""
        rows = f" ({self.rows[0]} live rows in a bucket of {self.rows[1]})" if self.rows else ""
        meaning, remedy = KINDS[self.kind]
        return f"{self.place}{code}\n{self.what}{rows}\n{meaning}\n{remedy}"


class SanitizerError(BcgError, AssertionError):
    """A check has found a ``fault``."""

    says_where = True

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.kind}: {fault}")
        self.fault = fault
