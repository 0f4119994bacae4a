"""What a program is made of."""

from collections import Counter
from dataclasses import dataclass

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.compat.fake import replaced_sizes, size_conditions
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.facts.node import RANDOM_STATE, WORLD
from bcg_compiler.lower import Lowered, Texts, UnitCompiler
from bcg_compiler.plan import Plan, Step
from bcg_compiler.plan.sizes import substitute


@dataclass(frozen=True)
class Compiled:
    """A marked graph, its plan and its code, and what compiles its units, if anything.

    ``texts`` keeps the code that is generated later.
    """

    graph: AnnotatedGraph
    plan: Plan
    lowered: Lowered
    compiler: UnitCompiler | None = None
    texts: Texts | None = None

    @property
    def eager_units(self) -> Counter[str]:
        """The units that were not compiled, by reason code."""
        return Counter() if self.compiler is None else self.compiler.refused

    @property
    def specialized_units(self) -> int:
        """How many units were compiled once more for exactly one bucket."""
        return 0 if self.compiler is None else self.compiler.specialized

    @property
    def has_plans(self) -> bool:
        """Whether a break function of it plans for others (``prepare``)."""
        breaks = (node.target for node in self.graph.facts if isinstance(node.target, BoundBreak))
        return any(bound.spec.plan is not None for bound in breaks)

    def size_names(self) -> dict[str, str]:
        """Sizes of inputs as the plan names them, by what the graph calls them."""
        values, names = self.plan.by_ordinal, dict[str, str]()
        for facts in self.graph.input_facts.values():
            for raw, spec in zip(facts.specs, values[facts.ordinal].specs, strict=True):
                names.update(zip((*raw.shape, *raw.strides), (*spec.shape, *spec.strides), strict=True))
        return names

    def size_conditions(self) -> list[str]:
        """What holds of the sizes that the plan leaves open, what compilers of units assumed of them included."""
        names, mode = self.size_names(), self.graph.fake_mode
        found = list(size_conditions(mode))
        found += [f"Eq({symbol}, {size})" for symbol, size in replaced_sizes(mode).items() if symbol in names]
        return list(dict.fromkeys((*self.plan.conditions, *(substitute(c, names) for c in found))))

    def unseen_segments(self) -> frozenset[int]:
        """Segments that may run for nothing: by the index of their step."""
        graph = self.graph
        facts_of = {facts.ordinal: facts for facts in graph.facts.values()}
        slots = frozenset().union(*(graph.input_facts_of(slot.ordinal).results for slot in self.plan.slots))
        seen = (graph.outside - slots) | {RANDOM_STATE, WORLD}

        def is_unseen(step: Step) -> bool:
            nodes = [facts_of[node.ordinal] for node in step.nodes]
            checks = any("_assert_async" in name for facts in nodes for name in facts.aten)
            return not checks and not any(facts.writes & seen for facts in nodes)

        return frozenset(step.index for step in self.plan.segments if is_unseen(step))
