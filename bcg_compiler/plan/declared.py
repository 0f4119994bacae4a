"""What the break functions of a graph declare that concerns the program as a whole."""

import math

from bcg_compiler.breaks import BoundBreak, Break
from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.plan.plan import Reserve


def reserves(graph: AnnotatedGraph) -> tuple[Reserve, ...]:
    """The memory that each break function sets aside: once, however many places call it."""
    return tuple(Reserve(spec.name, spec.reserve_bytes) for spec in _specs(graph) if spec.reserve_bytes)


def bucket_multiple(graph: AnnotatedGraph, asked: int) -> int:
    """The least number that what is ``asked`` for and what every break function declares divide."""
    return math.lcm(asked, *(spec.bucket_multiple for spec in _specs(graph)))


def _specs(graph: AnnotatedGraph) -> list[Break]:
    found = (node.target.spec for node in graph.facts if isinstance(node.target, BoundBreak))
    return list(dict.fromkeys(found))
