"""Marks the projection that gives the weights of an indexer's heads: opt-in, as a graph can hold it."""

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.indexer import in_weights_projection
from bcg_compiler.passes.result import PassResult


def mark_logits_gate(graph: AnnotatedGraph, *, wanted: bool) -> PassResult:
    """Mark the nodes of every indexer's weights projection, if ``wanted``.

    Beside the mark of the indexer it makes no break of its own: neighbouring breaks join. It is a mark of its own as an
    indexer that is one call may be given the weights, which are then computed before it.
    """
    if not wanted:
        return PassResult("mark_logits_gate", 0)
    found = [n for n, f in graph.facts.items() if not f.host_only and in_weights_projection(f)]
    changes = sum(
        graph.mark(n, "logits_gate", "weights of an indexer's heads, by options={'mark': ...}") for n in found
    )
    notes = () if found else ("no weights projection: no module of a class *Indexer has one called weights_proj",)
    return PassResult("mark_logits_gate", changes, notes)
