"""Rules for ranks: which layouts cannot replay, by what they are and never by the name of a model.

Judged at set-up, on what was chosen and on defaults alike: a choice that somebody made is no reason to skip a rule. A
layout that breaks one runs eagerly on all ranks, with the code of the rule as reason. ``digest`` goes into what ranks
compare before their first vote.
"""

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from bcg_compiler.errors import RankError, nearest
from bcg_compiler.plan.rules import BrokenRule, Rule, broken_rules


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a model is laid out over ranks, and what bears on replay in that.

    What is not known of attention and of an all-to-all backend never means yes. Raises ``RankError`` for sizes below 1.
    """

    dp: int = 1
    """Replicas of the model, each with batches of its own."""
    pp: int = 1
    """Stages that its layers are cut into."""
    cp: int = 1
    """Ranks that the tokens of a batch are shared out over."""
    tp: int | None = None
    """Ranks of a stage that share its layers out, and which context parallelism takes over for attention; ``None``: as
    many as ``cp``."""
    ep: int = 1
    """Ranks that experts are shared out over."""
    cp_strategy: str = "zigzag"
    attention_does_cp: bool = False
    """Whether the attention backend declares that it takes the parts of sequences that context parallelism makes."""
    all_to_all: str = "none"
    """The backend that carries rows to experts; ``"none"`` where they stay."""
    all_to_all_declared: bool = False
    """Whether it declares mode, stub, barrier, bucket multiple and reserve."""
    two_batch_overlap: bool = False
    """Whether two halves of a batch run in turn, one computing while the other one communicates."""
    dense_mla: bool = False
    """Whether attention is latent attention over all tokens (not sparse)."""
    prefix_captured: bool = False
    """Whether the path of it that is captured reads a prefix."""
    prefixes: bool = True
    """Whether batches with a prefix may be admitted: ``Limits.prefixes``."""
    index_adapter: bool = False
    """Whether an adapter may change the projection that makes the weights of the indexer's heads."""
    dual_stream: bool = False
    """The option of that name."""
    expert_rebalancing: bool = False
    """Whether experts move between ranks while the model serves."""

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "cp", "tp", "ep"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise RankError(f"{name} is {size!r}; it is a number of ranks, at least 1.")

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "Parallel":
        """A layout from names and values, as they are on a command line; ``RankError`` for those that it has not."""
        types = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in types:
                raise RankError(f"A layout of ranks has no field {name!r}. {nearest(name, types)}")
            wanted = types[name]
            if not isinstance(wanted, type):
                wanted = int
            if type(value) is not wanted:
                raise RankError(f"{name} is {value!r}; it is of type {wanted.__name__}.")
        return cls(**given)

    def digest(self) -> str:
        """16 hexadecimal digits: equal for equal layouts, and for the same rules of this table only."""
        told = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)]
        told += [f"{rule.code}: {rule.text}" for rule in PARALLEL_RULES]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


PARALLEL_RULES: tuple[Rule[Parallel], ...] = (
    Rule(
        code="cp_strategy",
        severity="eager",
        broken=lambda c: c.cp > 1 and c.cp_strategy != "zigzag",
        text="The strategy of context parallelism is {c.cp_strategy!r}, and the rows that a bucket needs on each rank "
        "are known of 'zigzag'.",
        remedy="Use the strategy 'zigzag'.",
    ),
    Rule(
        code="cp_size",
        severity="eager",
        broken=lambda c: c.cp > 1 and c.tp not in (None, c.cp),
        text="cp is {c.cp}, and tp is {c.tp}: attention would be shared out both by tokens and by heads.",
        remedy="Use as many ranks for cp as for tp.",
    ),
    Rule(
        code="cp_attention",
        severity="eager",
        broken=lambda c: c.cp > 1 and not c.attention_does_cp,
        text="cp is {c.cp}, and the attention backend does not declare that it takes parts of sequences.",
        remedy="Use an attention backend that does.",
    ),
    Rule(
        code="all_to_all_undeclared",
        severity="eager",
        broken=lambda c: c.all_to_all != "none" and not c.all_to_all_declared,
        text="The all-to-all backend {c.all_to_all!r} does not declare mode, stub, barrier, bucket multiple and "
        "reserve.",
        remedy="Use 'torch' or 'deepep', or declare all of them (docs/expert-parallel.md).",
    ),
    Rule(
        code="two_batch_overlap",
        severity="eager",
        broken=lambda c: c.two_batch_overlap,
        text="Two halves of a batch overlap: where it is cut depends on the batch, and a graph would freeze it.",
        remedy="Turn two-batch overlap off for prefill.",
    ),
    Rule(
        code="dense_mla_prefix",
        severity="eager",
        broken=lambda c: c.dense_mla and c.prefixes and not c.prefix_captured,
        text="The captured path of dense latent attention reads no prefix, and batches with one are admitted.",
        remedy='Set options={"limits": bcg.Limits(prefixes=False)}: then only batches with a prefix run eagerly.',
    ),
    Rule(
        code="index_adapter",
        severity="eager",
        broken=lambda c: c.index_adapter,
        text="An adapter may change the weights of the indexer's heads, and a graph would keep those it was captured "
        "with.",
        remedy="Leave the adapter off this projection.",
    ),
    Rule(
        code="dual_stream_experts",
        severity="eager",
        broken=lambda c: c.dual_stream and (c.all_to_all != "none" or c.expert_rebalancing),
        text="dual_stream is on, and experts are on several ranks (all_to_all is {c.all_to_all!r}) or move between "
        "them (expert_rebalancing is {c.expert_rebalancing}): both use streams of their own.",
        remedy='Drop options={"dual_stream": True}.',
    ),
)


def evaluate(layout: Parallel) -> tuple[BrokenRule, ...]:
    """The rules that a layout of ranks breaks, in the order of the table; any of them means: eager on all ranks."""
    return broken_rules(layout, PARALLEL_RULES)
