"""Marks attention that is a plain operation of torch's: opt-in, as a graph can hold it."""

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.result import PassResult

#: What attention dispatches first, whatever kernel is chosen for it.
ATTENTION = frozenset({"aten::scaled_dot_product_attention", "flex_attention"})


def mark_attention(graph: AnnotatedGraph, *, wanted: bool) -> PassResult:
    """Mark every call of scaled dot-product or flex attention, if ``wanted``; what is declared a break keeps its mark.

    Nothing else of the attention module is marked: projections and rotary embedding stay in segments.
    """
    if not wanted:
        return PassResult("mark_attention", 0)
    found = [n for n, f in graph.facts.items() if ATTENTION & {op.partition(".")[0] for op in (f.op, *f.aten)}]
    changes = sum(graph.mark(node, "attention", "attention, by options={'mark': ['attention']}") for node in found)
    notes = () if found else ("no attention: nothing dispatches scaled_dot_product_attention or flex_attention",)
    return PassResult("mark_attention", changes, notes)
