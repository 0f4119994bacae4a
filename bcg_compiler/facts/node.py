"""The facts of one node. Pure data: nothing here refers to a graph, a tensor or a device."""

from dataclasses import dataclass, field
from typing import Literal

#: Roots are small integers that stand for storages; these negative ones stand for state that is not a storage.
RANDOM_STATE = -1  # the generators' state: order of random operations
WORLD = -2  # what an opaque break may touch besides its arguments
FENCE = -3  # everything: an operation that sets state nobody here understands
STREAMS = -4  # the order of work on streams: an operation that waits for one, or records an event


@dataclass(frozen=True)
class Source:
    """The user's line that a node was traced from."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Reason:
    """Why something is where it is: a code of ``docs/reasons.md``, and a sentence."""

    code: str
    text: str


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor; symbolic sizes by name."""

    dtype: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.shape)}]"


@dataclass(frozen=True)
class ModeState:
    """The mode that a node runs in, relative to the caller's.

    ``stack`` holds the ordinals of the nodes that entered an autocast or inference region around it; ``grad`` is the
    grad mode set by the graph, ``None`` where it is what the caller (or the region) has. ``stream`` numbers the side
    stream that it is captured on, 0 for the caller's.
    """

    stack: tuple[int, ...] = ()
    grad: bool | None = None
    stream: int = 0


@dataclass(frozen=True)
class RowVerdict:
    """Whether padded rows can reach live ones, for one number of rows that the graph leaves open.

    ``inputs``  (ordinal, dimension) of each input whose size is that number
    ``kind``    ``row_wise``: never, whatever padded rows hold; ``causal``: not as long as they are finite, and
                all that is computed of them;
                ``mixing``: they can, or it could not be shown
    ``least``   the fewest live rows for which that holds: a graph may take its first two rows, say
    ``bounds``  conditions on the number of rows in a bucket: beyond them padded positions are in no table
    ``text`` …  of a mixing graph: why, and the node that mixes rows first, as far as known
    """

    inputs: tuple[tuple[int, int], ...]
    kind: Literal["row_wise", "causal", "mixing"]
    least: int = 1
    bounds: tuple[str, ...] = ()
    text: str = ""
    ordinal: int = -1
    op: str = ""
    module: str = ""
    source: Source | None = None


@dataclass(frozen=True)
class NewStorage:
    """A storage that a node allocates.

    ``root``    its number
    ``bytes``   its size, an expression in the graph's symbols
    ``device``  where it lies
    ``lasts``   how many more storages the node allocates until nothing of it uses this one any more; ``None`` if it
                outlives the node
    """

    root: int
    bytes: str
    device: str
    lasts: int | None = None


@dataclass(frozen=True)
class NodeFacts:
    """What one node does.

    ``ordinal``     position in Dynamo's graph; the stable name of its value is ``%ordinal``
    ``op``          stable name of what it calls: ``linear``, ``.view``, ``ns::op.overload``, ``module.function``
    ``module``      path of the module it was traced in, and all (path, class) pairs around it, outermost first
    ``aten``        the operations it dispatches, composite ones before their parts
    ``kernels``     how many of them launch a kernel
    ``reads``, ``writes``  roots (storages) whose data it reads or writes, plus the negative ones above
    ``reshapes``    roots of tensors whose shape or strides it changes in place
    ``results``     roots that its result lives in; ``fresh`` those that it allocated
    ``allocates``   the storages that its operations allocate, in order, those included that die inside it
    ``specs``       its result tensors; ``size`` the expression that its result is, if that is a symbolic integer
    ``uncapturable`` reasons why no graph may hold it, most telling first; empty if one may
    ``host_only``   no tensor goes in or comes out: arithmetic on sizes and numbers
    ``opaque``      the body is not seen: a break function, a custom op
    ``owner``       class of the object among the caller's arguments that an input is an attribute of, if it is
    ``group``       ordinal of the first node of a functorch region that must stay whole, or of the producer of the
                    tuple that this node takes an item of; else its own ordinal
    """

    ordinal: int
    op: str
    module: str = ""
    modules: tuple[tuple[str, str], ...] = ()
    source: Source | None = None
    aten: tuple[str, ...] = ()
    kernels: int = 0
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    reshapes: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    fresh: frozenset[int] = frozenset()
    allocates: tuple[NewStorage, ...] = ()
    specs: tuple[TensorSpec, ...] = ()
    size: str = ""
    uncapturable: tuple[Reason, ...] = ()
    host_only: bool = False
    opaque: bool = False
    mode: ModeState = field(default_factory=ModeState)
    owner: type | None = None
    group: int = -1

    @property
    def module_class(self) -> str:
        """Class name of the innermost module around the node."""
        return self.modules[-1][1] if self.modules else ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"%{self.ordinal} {self.op}{where}"
