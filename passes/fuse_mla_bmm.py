"""Takes the matmul of absorbed MLA out from between the break of the indexer and that of attention.

Note [The matmul between two breaks]
    Multi-head latent attention, absorbed, multiplies the query by the key's up-projection, ``q_nope · w_kc``, one
    batched matmul. The forward has it between the indexer's break and the attention break, where it is a segment of a
    single kernel. It needs nothing of the indexer, so the place for it is the segment in front of both. The partitioner
    does not move it there: it takes a break to write, unseen, what breaks are ever given, such as the query, and what a
    module holds and is no parameter. Here it is known better: what is declared an indexer writes its cache and what it
    says it does, and no weight; and no other break has seen the query yet.

    Where the indexer writes what the matmul reads (a rotary embedding in place, say) the matmul can only run between
    the two. It then joins the break, and writes into a buffer that is allocated once.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from bcg_compiler.compat import dynamo
from bcg_compiler.facts import AnnotatedGraph, NodeFacts, Reason
from bcg_compiler.passes.batched_matmul import batched_matmul, write_into_buffer
from bcg_compiler.passes.crossing import Crossing
from bcg_compiler.passes.result import PassResult

#: Why a matmul stays where it is (``docs/passes/fuse_mla_bmm.md``).
Refusal = Literal["special_kernel", "computed_weight", "several_users", "not_alone", "odd_spelling"]

INDEXER = frozenset({"dsa_indexer", "logits_gate"})


@dataclass(frozen=True)
class MlaBmmFusionPlan:
    """What happens to one matmul; all by ordinals of the graph as the pass found it.

    ``matmul``     the node, of which ``query`` and ``weight`` are the operands
    ``indexer``    the first node of the indexer's break, ``attention`` the one of the attention break
    ``placement``  ``before``: it goes in front of the indexer, with ``moved``: itself and what it needs from between.
                   ``inside``: it joins the break and writes into a buffer
    """

    matmul: int
    query: int
    weight: int
    indexer: int
    attention: int
    placement: Literal["before", "inside"]
    moved: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Site:
    """A matmul with the breaks around it, and the nodes between these in the order of the program."""

    matmul: Node
    breaks: tuple[Node, ...]
    attention: Node
    between: tuple[Node, ...]


def fuse_mla_bmm(graph: AnnotatedGraph) -> PassResult:
    """Move every such matmul in front of the indexer, or else join it with the break (reason ``mla_bmm``).

    Reads the marks of earlier passes: breaks are found by their reason. ``notes`` name each matmul that stays where it
    is, with why (``docs/passes/fuse_mla_bmm.md``).
    """
    notes: list[str] = []
    changes = 0
    sites = _sites(graph)
    crossing = Crossing(graph, [w for site in sites for w in site.matmul.all_input_nodes if _held(graph, w)])
    for site in sites:
        left = replace(site, between=tuple(n for n in site.between if n in graph.facts))
        plan = plan_fusion(graph, left, crossing)
        if isinstance(plan, Reason):
            facts = graph.facts[site.matmul]
            notes.append(f"{plan.code}: {facts.op} in {facts.module or 'the model'}: {plan.text}")
            continue
        changes += 1
        if plan.placement == "before":
            _move(graph, left, plan)
        else:
            product = write_into_buffer(graph, site.matmul)
            graph.mark(product, "mla_bmm", "alone between the indexer and attention, and it cannot go before them")
    if changes:
        graph.renumber()
    return PassResult("fuse_mla_bmm", changes, tuple(notes))


def plan_fusion(graph: AnnotatedGraph, site: _Site, crossing: Crossing) -> MlaBmmFusionPlan | Reason:
    """What to do with a matmul, or why nothing."""
    facts = graph.facts[site.matmul]
    operands = [n for n in site.matmul.all_input_nodes if graph.producer_facts(n) is not None]
    weights = [n for n in operands if _held(graph, n)]
    if facts.opaque or facts.kernels != 1 or not _dispatches(facts, "aten::bmm"):
        return Reason("special_kernel", f"it is no plain batched matmul: it dispatches {', '.join(facts.aten)}")
    if len(operands) != 2 or len(weights) != 1:
        return Reason("computed_weight", "its weight is computed, or adapted, in the forward")
    moved = _needed(site, site.matmul)
    before = crossing.allows(moved, _crossed(site, moved))
    if not before:
        if not _read_by_attention_alone(graph, site):
            return Reason("several_users", "not only the attention break reads its result")
        others = [_needed(site, n) for n in site.between if graph.facts[n].kernels and n is not site.matmul]
        if not all(crossing.allows(needed, _crossed(site, needed)) for needed in others):
            return Reason("not_alone", "other operations stand between the two breaks, so a segment is there anyway")
        if batched_matmul(graph, site.matmul) is None:
            return Reason("odd_spelling", "its operands are not those of the batched matmul that it dispatches")
    (weight,) = weights
    (query,) = (n for n in operands if n is not weight)
    ordinals = {n: f.ordinal for n, f in graph.known.items()}
    return MlaBmmFusionPlan(
        matmul=facts.ordinal,
        query=ordinals[query],
        weight=ordinals[weight],
        indexer=ordinals[site.breaks[0]],
        attention=ordinals[site.attention],
        placement="before" if before else "inside",
        moved=tuple(ordinals[n] for n in moved) if before else (),
    )


def _sites(graph: AnnotatedGraph) -> list[_Site]:
    """The candidates: in front of each attention break, if the break before that is an indexer's."""
    found = []
    nodes = graph.nodes
    for place, node in enumerate(nodes):
        if node not in graph.marks or graph.marks[node].code != "attention":
            continue
        behind = place
        while behind and nodes[behind - 1] not in graph.marks:
            behind -= 1
        first = behind
        while first and (_is_indexer(graph, nodes[first - 1]) or not _computes(graph, nodes[first - 1])):
            first -= 1
        breaks = tuple(n for n in nodes[first:behind] if n in graph.marks)
        between = tuple(nodes[behind:place])
        found += [_Site(n, breaks, node, between) for n in between if breaks and _is_candidate(graph, n, node)]
    return found


def _is_indexer(graph: AnnotatedGraph, node: Node) -> bool:
    return node in graph.marks and graph.marks[node].code in INDEXER


def _computes(graph: AnnotatedGraph, node: Node) -> bool:
    return node in graph.marks or bool(graph.facts[node].kernels)


def _is_candidate(graph: AnnotatedGraph, node: Node, attention: Node) -> bool:
    facts = graph.facts[node]
    held = (graph.input_facts[n] for n in node.all_input_nodes if _held(graph, n))
    stacked = any(len(spec.shape) == 3 for f in held for spec in f.specs)
    special = stacked and any(not op.startswith("aten::") for op in facts.aten)
    return (_dispatches(facts, "aten::bmm") or special) and _leads_to(graph, node, attention)


def _leads_to(graph: AnnotatedGraph, node: Node, attention: Node) -> bool:
    """Whether the attention break takes the result of a node, as it is or in part."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user is attention:
                return True
            if user in graph.facts and user not in graph.marks and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _held(graph: AnnotatedGraph, node: Node) -> bool:
    """Whether a value is a parameter, a buffer or another tensor that stays, and the graph never writes it."""
    facts = graph.input_facts.get(node)
    if facts is None or not (node.op == "get_attr" or dynamo.comes_back(node)):
        return False
    return not facts.results & graph.written


def _needed(site: _Site, node: Node) -> list[Node]:
    """The node, and what it needs of those between the breaks, in order."""
    needed = {node}
    for earlier in reversed(site.between):
        if earlier in needed:
            needed.update(earlier.all_input_nodes)
    return [n for n in site.between if n in needed]


def _crossed(site: _Site, moved: list[Node]) -> list[Node]:
    """What ``moved`` goes in front of: the indexer, and whatever else stands before it behind that."""
    own = set(moved)
    return [*site.breaks, *(n for n in site.between[: site.between.index(moved[-1])] if n not in own)]


def _read_by_attention_alone(graph: AnnotatedGraph, site: _Site) -> bool:
    todo = [site.matmul]
    while todo:
        readers = todo.pop().users.keys() - {site.attention}
        if any(reader not in site.between or graph.facts[reader].kernels for reader in readers):
            return False
        todo += readers
    return True


def _dispatches(facts: NodeFacts, op: str) -> bool:
    return any(name.partition(".")[0] == op for name in facts.aten)


def _move(graph: AnnotatedGraph, site: _Site, plan: MlaBmmFusionPlan) -> None:
    first = site.breaks[0]
    behind_first = set(graph.module.graph.nodes)
    for node in graph.module.graph.nodes:
        behind_first.discard(node)
        if node is first:
            break
    for node in (n for n in site.between if graph.facts[n].ordinal in plan.moved):
        for given in node.all_input_nodes:
            if given.op == "get_attr" and given in behind_first:
                first.prepend(given)
        first.prepend(node)
