"""Compile units: the parts of segments that a compiler sees, cut where structure repeats.

A segment is what one CUDA graph holds; a unit is what one compile sees. A model of 61 equal layers without a break is
one segment, and compiled as a whole its compile time grows with the layers. Cut at the layers, one of them is compiled,
and the code is called with the weights of each. Units of one segment are captured together, so cuts cost no launch;
what they cost is what a compiler would have fused across them, so a segment that does not repeat itself stays whole.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile

from torch.fx import Node

from bcg_compiler.breaks import BoundBreak
from bcg_compiler.facts import NodeFacts
from bcg_compiler.facts.known_ops import PRODUCTS

#: The first number in a module's path: ``model.layers.3`` of ``model.layers.3.mlp.experts.0``.
_LAYER = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")

#: Shorter stretches are not searched for repetitions that module paths do not show.
LEAST_REPEATED = 8


def cut_units(
    nodes: Sequence[Node], facts: Callable[[Node], NodeFacts], key: Callable[[Sequence[Node]], str]
) -> list[list[Node]]:
    """The units of one segment, in order; a segment whose parts do not repeat is one unit.

    ``key`` is the structural key of a part: parts of equal keys are compiled once. A segment is cut only where that
    leaves a compiler at most half of it to see; and around bodies that no compiler sees. Cuts are in front of products,
    if that makes no more parts to compile than cuts between layers.
    """
    for cut in (_by_layer, _by_period):  # the second one takes time with the square of the nodes
        pieces = cut(nodes, facts)
        if len(pieces) < 3:
            continue
        ways = [whole_groups(_around_bodies(way, facts), facts) for way in (_from_products(pieces, facts), pieces)]
        different = [{key(piece): len(piece) for piece in way} for way in ways]
        way = 0 if len(different[0]) <= len(different[1]) else 1
        if 2 * sum(different[way].values()) <= len(nodes):
            return ways[way]
    return whole_groups(_around_bodies([nodes], facts), facts) if nodes else []


def _from_products(pieces: Sequence[Sequence[Node]], facts: Callable[[Node], NodeFacts]) -> list[list[Node]]:
    """The same pieces, but what they begin with, up to a product, goes to the piece before.

    A layer begins with a norm of what the layer before has added up, which one kernel can do. A product is a kernel of
    a library, with which nothing is fused, so a cut in front of it costs nothing. No piece moves more than the first
    one does: behind the last layer is often the same norm, and something else.
    """
    found, begin = [list(pieces[0])], _before_products(pieces[1], facts)
    if len(begin) == len(pieces[1]):
        return [list(piece) for piece in pieces]
    for piece in pieces[1:]:
        pairs = zip(begin, _before_products(piece, facts), strict=False)
        moved = sum(1 for _ in takewhile(lambda pair: facts(pair[0]).op == facts(pair[1]).op, pairs))
        found[-1] += piece[:moved]
        found.append(list(piece[moved:]))
    return [piece for piece in found if piece]


def _before_products(piece: Sequence[Node], facts: Callable[[Node], NodeFacts]) -> list[Node]:
    return list(takewhile(lambda node: not _is_product(facts(node)), piece))


def _is_product(facts: NodeFacts) -> bool:
    return any(op.partition(".")[0] in PRODUCTS for op in facts.aten)


def _around_bodies(pieces: Sequence[Sequence[Node]], facts: Callable[[Node], NodeFacts]) -> list[list[Node]]:
    """The same pieces, with the bodies of breaks that are captured in pieces of their own, with what takes items of
    their results.
    """
    bodies = {facts(n).group for piece in pieces for n in piece if isinstance(n.target, BoundBreak)}
    return [list(part) for piece in pieces for _, part in groupby(piece, key=lambda n: facts(n).group in bodies)]


def whole_groups(pieces: Sequence[Sequence[Node]], facts: Callable[[Node], NodeFacts]) -> list[list[Node]]:
    """The same pieces, with each group where it begins: a unit neither takes nor gives a tuple."""
    home: dict[int, int] = {}
    found: list[list[Node]] = [[] for _ in pieces]
    for index, piece in enumerate(pieces):
        for node in piece:
            found[home.setdefault(facts(node).group, index)].append(node)
    return [sorted(piece, key=lambda node: facts(node).ordinal) for piece in found if piece]


def _by_layer(nodes: Sequence[Node], facts: Callable[[Node], NodeFacts]) -> list[list[Node]]:
    """Stretches of one layer each, by the paths of modules; what is in no layer is a stretch, too."""

    def layer(node: Node) -> str:
        found = _LAYER.match(facts(node).module)
        return found[0] if found else ""

    return [list(stretch) for _, stretch in groupby(nodes, key=layer)]


def _by_period(nodes: Sequence[Node], facts: Callable[[Node], NodeFacts]) -> list[list[Node]]:
    """What comes before, the turns, and what comes after the longest stretch in which the operations repeat."""
    ops = [facts(node).op for node in nodes]
    length, start, period = 0, 0, 0
    for distance in range(1, len(ops) // 2 + 1):
        run = 0
        for at in range(len(ops) - distance):
            run = run + 1 if ops[at] == ops[at + distance] else 0
            # A multiple of the period covers no more than the period itself: the shortest wins.
            if run >= distance and run + distance > length:
                length, start, period = run + distance, at - run + 1, distance
    if length < LEAST_REPEATED:
        return [list(nodes)]
    end = start + length - length % period
    turns = [list(nodes[at : at + period]) for at in range(start, end, period)]
    return [piece for piece in (list(nodes[:start]), *turns, list(nodes[end:])) if piece]
