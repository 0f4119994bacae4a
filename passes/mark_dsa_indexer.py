"""Marks the indexer of sparse attention where it is plain torch: opt-in, as a graph can hold it."""

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.indexer import indexer_of
from bcg_compiler.passes.result import PassResult


def mark_dsa_indexer(graph: AnnotatedGraph, *, wanted: bool) -> PassResult:
    """Mark all that runs inside of an indexer module, if ``wanted``: projections, key cache, scores and top-k.

    The whole module is marked, so that it is one break: between two marked parts a segment would be launched for a few
    kernels.
    """
    if not wanted:
        return PassResult("mark_dsa_indexer", 0)
    found = {n: path for n, f in graph.facts.items() if not f.host_only and (path := indexer_of(f)) is not None}
    changes = sum(graph.mark(n, "dsa_indexer", f"inside of the indexer {path}") for n, path in found.items())
    notes = () if found else ("no indexer: no module of a class *Indexer",)
    return PassResult("mark_dsa_indexer", changes, notes)
