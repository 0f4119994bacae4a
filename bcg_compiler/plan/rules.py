"""Rules of configuration: what does not go together, found at set-up, with what to do about it.

A rule is a row of ``RULES``. One for a new mechanism is a row there, the fields of ``Configuration`` that it reads, and
its code in ``docs/reasons.md``. What ranks must not be is a table of the same form (``distributed/rules.py``).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from bcg_compiler.errors import OptionError, nearest

#: What stands in the padded rows of a slot. ``ZERO``: zeros, at each fill; ``SENTINEL``: a value, at each fill;
#: ``KEEP``: what was there; ``ONCE``: what the allocation filled in.
POLICIES = ("ZERO", "SENTINEL", "KEEP", "ONCE")

#: All other dtypes may be an index, as integers are, or a mask.
NOT_AN_INDEX = ("float", "bfloat", "complex")


#: ``error``: results would be wrong; ``eager``: nothing is replayed; ``note``: something asked for has no effect.
Severity = Literal["error", "eager", "note"]

#: What a rule is about.
Facts = TypeVar("Facts")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The facts of a set-up, chosen ones and defaults. Raises ``OptionError`` for a slot policy that does not exist."""

    capture: str
    """``Options.capture``."""
    has_ladder: bool
    assume_rows_independent: bool
    """The user's own word that live rows do not depend on padded ones."""
    padding: Literal["", "row_wise", "causal", "assumed"]
    """Why padding is safe: the weakest ``RowVerdict.kind``, or the user's word; empty where nothing is padded."""
    slot_policies: tuple[tuple[str, str, str], ...]
    """(input, policy, dtype) of each slot that is padded: ``("input_ids", "ZERO", "int64")``."""
    hoisted: tuple[str, ...] = ()
    """The names of the hoisted plans."""
    max_requests: int | None = None
    """``Limits.max_requests``."""

    def __post_init__(self) -> None:
        for name, policy, _ in self.slot_policies:
            if policy not in POLICIES:
                raise OptionError(f"The policy of slot {name} is {policy!r}. {nearest(policy, POLICIES)}")

    @property
    def plans(self) -> str:
        """The names of the hoisted plans as text."""
        return ", ".join(self.hoisted)

    @property
    def kept(self) -> str:
        """The names of the slots whose padded rows are left as they are."""
        return ", ".join(name for name, policy, _ in self.slot_policies if policy == "KEEP")

    @property
    def kept_indices(self) -> str:
        """Those of them that may hold indices, each with its dtype."""
        return ", ".join(
            f"{name} ({dtype})"
            for name, policy, dtype in self.slot_policies
            if policy == "KEEP" and not dtype.removeprefix("torch.").startswith(NOT_AN_INDEX)
        )


@dataclass(frozen=True)
class Rule(Generic[Facts]):
    """One thing that a configuration must not be, or need not be."""

    code: str
    """A code of ``docs/reasons.md``."""
    severity: Severity
    broken: Callable[[Facts], bool]
    text: str
    """A sentence; ``{c.…}`` stands for a value of the configuration."""
    remedy: str


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a configuration breaks, with the values seen."""

    code: str
    severity: Severity
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}"


RULES: tuple[Rule[Configuration], ...] = (
    Rule(
        code="keep_causal",
        severity="error",
        broken=lambda c: c.padding == "causal" and bool(c.kept),
        text="Padded rows are safe only while they are finite (causal), and the slot policy KEEP leaves what was there "
        "in {c.kept}.",
        remedy="Use ZERO or SENTINEL there.",
    ),
    Rule(
        code="keep_index",
        severity="error",
        broken=lambda c: bool(c.kept_indices),
        text="The slot policy KEEP would leave indices of another call in the padded rows of {c.kept_indices}: they "
        "may point outside of what this call has.",
        remedy="Use ZERO, or SENTINEL with an index that is always valid.",
    ),
    Rule(
        code="ladder_off",
        severity="note",
        broken=lambda c: c.has_ladder and c.capture == "off",
        text="There is a ladder, and capture is {c.capture!r}: nothing is captured, so nothing is padded.",
        remedy='Drop the ladder, or set options={"capture": "auto"}.',
    ),
    Rule(
        code="assumption_unused",
        severity="note",
        broken=lambda c: c.assume_rows_independent and not c.has_ladder,
        text="assume_rows_independent is {c.assume_rows_independent}, and there is no ladder: nothing is padded.",
        remedy="Drop it, or give a ladder.",
    ),
    Rule(
        code="plan_requests",
        severity="note",
        broken=lambda c: bool(c.hoisted) and bool(c.padding) and c.max_requests is None,
        text="What is captured depends on a plan ({c.plans}), and no limit says for how many requests there is room in "
        "it: a batch with more is not refused.",
        remedy='Set options={"limits": bcg.Limits(max_requests=...)}, and publish the batch of each call.',
    ),
)


def evaluate(configuration: Configuration) -> tuple[BrokenRule, ...]:
    """The rules that a configuration breaks, in the order of the table."""
    return broken_rules(configuration, RULES)


def broken_rules(facts: Facts, rules: Iterable[Rule[Facts]]) -> tuple[BrokenRule, ...]:
    """The rules of a table that the facts break, in its order."""
    return tuple(
        BrokenRule(rule.code, rule.severity, rule.text.format(c=facts), rule.remedy)
        for rule in rules
        if rule.broken(facts)
    )
