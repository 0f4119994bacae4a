"""The dataclasses of a plan. Everything that anyone may act on is here, and nothing else is."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from bcg_compiler.buckets import SlotPolicy
from bcg_compiler.facts.node import ModeState, Reason, RowVerdict, Source, TensorSpec
from bcg_compiler.plan.rules import BrokenRule


@dataclass(frozen=True)
class Value:
    """What an input or a node gives: ``ordinal`` names it within the graph, ``name`` is stable between machines.

    ``kind``: ``input`` (a tensor of the caller's), ``size`` and ``number`` (of the caller's), ``static`` (parameter,
    buffer or tensor held by a module: it comes back at every call), ``constant`` (held by the graph), ``result``.
    ``size``: the expression of a symbolic integer. ``argument``: what the user calls an input; not part of the text.
    """

    ordinal: int
    name: str
    kind: Literal["input", "size", "number", "static", "constant", "result"]
    specs: tuple[TensorSpec, ...] = ()
    size: str = ""
    argument: str = ""


@dataclass(frozen=True)
class PlanNode:
    """One operation of a step. ``source`` is for people and not part of the stable text."""

    ordinal: int
    op: str
    module: str
    kernels: int
    mode: ModeState
    source: Source | None = None


@dataclass(frozen=True)
class StepReason:
    """Why a node runs in the step that it is in: the code and the sentence, with the node and the user's line.

    A segment has one for its first node (``capturable``) and one for each node moved to it (``moved``).
    """

    code: str
    text: str
    ordinal: int
    op: str
    module: str
    source: Source | None = None


@dataclass(frozen=True)
class Allocation:
    """A storage on the graph's device that a node of a step allocates.

    ``bytes``  its size, an expression in the plan's symbols
    ``born``   position of the node in the step
    ``dies``   position of the node after which it is freed; ``None`` if it survives the step
    ``lasts``  of one that dies inside its own node: how many more storages the node allocates before
    ``freed``  of one that survives: index of the step after which it may be freed; ``None`` if it is held to the end of
               the call: it is returned, or a break read it, whose body may keep what it was given
    """

    bytes: str
    born: int
    dies: int | None = None
    lasts: int | None = None
    freed: int | None = None


@dataclass(frozen=True)
class LiveRange:
    """The steps during which a value has to lie in memory: index of the ``first`` and of the ``last`` one."""

    ordinal: int
    first: int
    last: int


@dataclass(frozen=True)
class CompileUnit:
    """A part of a segment that is compiled once for all units of the same ``key``: ordinals of its ``nodes``, of the
    values that it takes and gives.
    """

    key: str
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A segment or a break.

    ``nodes``    in the order they run
    ``inputs``   ordinals of the values it reads from outside, in the order they are met; ``outputs`` of those that are
                 read after it
    ``frees``    ordinals of the values that nothing reads after it
    ``kernels``  how many kernels it launches
    ``fixed``    ordinals of a break's nodes that only look at fixed memory or allocate (views, sizes, empty buffers): a
                 capture does them once, and replays leave them out
    ``tails``    (node, value): the padded rows of the value are cleared behind that node of a break, which may have
                 written live rows only
    ``unit``     structural key: segments of the same key are the same computation on other values; "" for a break
    ``units``    the parts of a segment that are compiled apart, in order; arithmetic on sizes is in none of them, and
                 comes before them all
    ``allocations``  the storages that its nodes allocate, in order. Of a break function only its results are known
    """

    index: int
    kind: Literal["segment", "break"]
    nodes: tuple[PlanNode, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    kernels: int
    reasons: tuple[StepReason, ...]
    fixed: tuple[int, ...] = ()
    tails: tuple[tuple[int, int], ...] = ()
    unit: str = ""
    units: tuple[CompileUnit, ...] = ()
    allocations: tuple[Allocation, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A fixed-address buffer for an input that segments read: filled at each call, copied back if it is ``written``.

    ``moving``: the input is a parameter, buffer or held tensor, but one that is given new memory again and again.
    ``policy``: what stands in its padded rows, and whether it is filled at each call.
    """

    ordinal: int
    written: bool
    moving: bool = False
    policy: SlotPolicy = field(default_factory=SlotPolicy)


@dataclass(frozen=True)
class Padding:
    """How ``n`` live rows run in a bucket of more.

    ``symbol``      the size that is padded; ``place`` (ordinal, dimension) of an input whose size it is
    ``proof``       why live rows do not depend on padded ones: shown from the graph, or ``assumed``
    ``least``       the fewest live rows for which that holds
    ``buckets``     the ladder
    ``conditions``  expressions that must hold with a bucket in place of the symbol: else it is another graph
    ``specialized`` those buckets whose units are compiled for exactly their sizes
    """

    symbol: str
    place: tuple[int, int]
    proof: Literal["row_wise", "causal", "assumed"]
    least: int
    buckets: tuple[int, ...]
    conditions: tuple[str, ...] = ()
    specialized: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reserve:
    """Device memory of so many ``bytes`` that a break function takes for itself, once: its name says whose it is."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PassSummary:
    """What one pass changed when this plan was made."""

    name: str
    changes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HoistedPlan:
    """What the host prepares before the first step: the plan of the breaks ``nodes``, which share it.

    ``constants``  what it is given, as text; ``eager``  ordinals of the nodes whose bodies are breaks all the same
    """

    name: str
    constants: str
    nodes: tuple[PlanNode, ...]
    eager: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps of one graph in order, and the values between them.

    ``inputs``   ordinals of the graph's arguments in order, ``outputs`` those of the values it returns
    ``slots``    the inputs that need one when captured
    ``bridges``  ordinals of the values that a break makes and a segment reads: copied to a fixed address
    ``bridge_ranges``  how long each of them is needed there
    ``reserves``  what break functions take for themselves beside the memory of captures
    ``uncaptured``  why no program of this plan is captured, if so
    ``written_inputs``  ordinals of inputs that anything writes
    ``rows``     whether padding can reach live rows, for each number of rows that the graph leaves open
    ``conditions``  what holds of the sizes that the graph leaves open, as expressions: for others it is another graph
    ``hoisted``  plans of breaks, which run before the first step, in order
    ``padding``  how the ladder is used, ``unpadded`` why it is not; ``broken_rules`` what of the options has no effect
    """

    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    slots: tuple[Slot, ...]
    bridges: tuple[int, ...]
    written_inputs: tuple[int, ...]
    device: str
    uncaptured: Reason | None = None
    passes: tuple[PassSummary, ...] = ()
    rows: tuple[RowVerdict, ...] = ()
    conditions: tuple[str, ...] = ()
    padding: Padding | None = None
    unpadded: Reason | None = None
    broken_rules: tuple[BrokenRule, ...] = ()
    bridge_ranges: tuple[LiveRange, ...] = ()
    hoisted: tuple[HoistedPlan, ...] = ()
    reserves: tuple[Reserve, ...] = ()

    @property
    def segments(self) -> tuple[Step, ...]:
        """The steps that a graph can hold."""
        return tuple(step for step in self.steps if step.kind == "segment")

    @property
    def breaks(self) -> tuple[Step, ...]:
        """The steps that run eagerly."""
        return tuple(step for step in self.steps if step.kind == "break")

    @property
    def unique_units(self) -> int:
        """How many different parts of segments there are to compile."""
        return len({unit.key for step in self.segments for unit in step.units})

    def reasons(self) -> Counter[str]:
        """How many nodes are outside of segments, by reason code."""
        return Counter(reason.code for step in self.breaks for reason in step.reasons)

    def value(self, ordinal: int) -> Value:
        """The value of that ordinal."""
        return self.by_ordinal[ordinal]

    @cached_property
    def by_ordinal(self) -> Mapping[int, Value]:
        """All values by their ordinals."""
        return {value.ordinal: value for value in self.values}
