"""Binds what comes from the pipeline stage before as slots of the token axis."""

from bcg_compiler.facts import AnnotatedGraph
from bcg_compiler.passes.result import PassResult
from bcg_compiler.proxies import PipelineProxy


def bind_pp_proxies(graph: AnnotatedGraph) -> PassResult:
    """Bind the tensors of a ``PipelineProxy`` among the arguments, whatever it is called and wherever it lies in them.

    The plan then takes their first dimension for the number of tokens, and zeroes their padded rows: a stage runs on
    what the stage before gives for live rows, and on nothing else. Changes no node.
    """
    bound = {facts.ordinal for facts in graph.input_facts.values() if facts.owner is PipelineProxy}
    graph.proxies |= bound
    return PassResult("bind_pp_proxies", len(bound))
