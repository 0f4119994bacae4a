"""The graph with its facts and marks: what passes read and change."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule, Node

from bcg_compiler.facts.node import NodeFacts, Reason, RowVerdict
from bcg_compiler.hoisting import PlanCall


@dataclass
class AnnotatedGraph:
    """Dynamo's graph, the facts of each node that computes, and the marks that passes have set.

    ``device``       the device that the graph computes on, ``"cpu"`` only if no other appears
    ``whole``        Dynamo put all of the user's function into this one graph
    ``input_facts``  facts of the placeholders (their roots and specs)
    ``marks``        node → why it runs as a break
    ``parameters``   roots that hold nothing but parameters: nobody writes them unseen
    ``constants``    get_attr nodes → what they hold
    ``fakes``        the value of each node when the graph was run on fakes of ``fake_mode``
    ``exit_grad``    the grad mode that the graph leaves behind, ``None`` if it is the caller's
    ``written``      roots that the graph's own operations write (``facts`` add what may be written unseen)
    ``moving``       ordinals of parameters, buffers and held tensors that are given new memory again and again
    ``rows``         whether padded rows can reach live ones, for each number of rows that the graph leaves open
    ``conditions``   what holds of the sizes that the graph leaves open, as expressions: for others it is another graph
    ``input_views``  (ordinal, input) of returned values that lie in the memory of an input but are not the input itself
    ``proxies``  ordinals of inputs that lie in a ``PipelineProxy``: their rows are the tokens of the call
    ``hoisted``      breaks whose plan runs before the graph, with that plan
    ``objects``      numbers of Python objects of which nothing is known but their identity: the same in every plan
    ``outside``      roots that exist outside the call: inputs, parameters, buffers, constants
    """

    module: GraphModule
    facts: dict[Node, NodeFacts]
    input_facts: dict[Node, NodeFacts]
    device: str
    whole: bool
    parameters: frozenset[int]
    outside: frozenset[int]
    written: frozenset[int]
    fakes: dict[Node, Any] = field(default_factory=dict)
    fake_mode: Any = None
    rows: tuple[RowVerdict, ...] = ()
    conditions: tuple[str, ...] = ()
    input_views: frozenset[tuple[int, int]] = frozenset()
    constants: dict[Node, Any] = field(default_factory=dict)
    exit_grad: bool | None = None
    mode_nodes: dict[int, Node] = field(default_factory=dict)
    marks: dict[Node, Reason] = field(default_factory=dict)
    moving: set[int] = field(default_factory=set)
    proxies: set[int] = field(default_factory=set)
    hoisted: dict[Node, PlanCall] = field(default_factory=dict)
    objects: dict[Any, int] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that compute, in the order of the program."""
        return list(self.facts)

    @property
    def known(self) -> dict[Node, NodeFacts]:
        """Facts of inputs and operations alike."""
        return {**self.input_facts, **self.facts}

    def input_facts_of(self, ordinal: int) -> NodeFacts:
        """The facts of an input."""
        return next(facts for facts in self.input_facts.values() if facts.ordinal == ordinal)

    def mark(self, node: Node, code: str, text: str) -> bool:
        """Make ``node`` a break, unless an earlier pass has done so. Returns whether the mark is new."""
        if node in self.marks:
            return False
        self.marks[node] = Reason(code, text)
        return True

    def renumber(self) -> None:
        """Give every node the ordinal of its place, after a pass has moved or added nodes and left facts for them."""
        order = {node: place for place, node in enumerate(self.module.graph.nodes)}
        known = [(f.ordinal, n) for n, f in self.known.items()]
        new = {ordinal: order[node] for ordinal, node in (*known, *self.mode_nodes.items())}

        def renumbered(facts: NodeFacts) -> NodeFacts:
            mode = replace(facts.mode, stack=tuple(new[ordinal] for ordinal in facts.mode.stack))
            group = new.get(facts.group, facts.group)
            return replace(facts, ordinal=new[facts.ordinal], group=group, mode=mode)

        self.facts = {node: renumbered(self.facts[node]) for node in order if node in self.facts}
        self.input_facts = {node: renumbered(facts) for node, facts in self.input_facts.items()}
        self.mode_nodes = {new[ordinal]: node for ordinal, node in self.mode_nodes.items()}
        self.moving = {new[ordinal] for ordinal in self.moving}
        self.proxies = {new[ordinal] for ordinal in self.proxies}
        self.input_views = frozenset((new[result], new[given]) for result, given in self.input_views)
        self.rows = tuple(
            replace(
                verdict,
                inputs=tuple((new[ordinal], dim) for ordinal, dim in verdict.inputs),
                ordinal=new.get(verdict.ordinal, -1),
            )
            for verdict in self.rows
        )
        self.module.graph.lint()
        self.module.recompile()

    def hoist(self, node: Node, plan: PlanCall) -> None:
        """Let the plan of a break run before the graph; its body then counts as a kernel of a segment."""
        self.hoisted[node] = plan
        self.facts[node] = replace(self.facts[node], kernels=1)

    def producer_facts(self, value: Any) -> NodeFacts | None:
        """Facts of the node behind an argument: of a computing node or of a placeholder."""
        if not isinstance(value, Node):
            return None
        return self.facts.get(value) or self.input_facts.get(value)
