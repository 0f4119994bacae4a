"""Which nodes belong to the indexer of DeepSeek's sparse attention (DSA).

An indexer is a module whose class name ends with ``Indexer``; the projection of its head weights is its submodule
``weights_proj``. So they are called in DeepSeek's reference and in the implementations that follow it.
"""

from bcg_compiler.facts import NodeFacts


def indexer_of(facts: NodeFacts) -> str | None:
    """The path of the indexer that a node was traced in, or ``None``."""
    return next((path for path, cls in facts.modules if cls.endswith("Indexer")), None)


def in_weights_projection(facts: NodeFacts) -> bool:
    """Whether a node belongs to the weights projection of an indexer."""
    path = indexer_of(facts)
    return path is not None and any(inner == f"{path}.weights_proj" for inner, _ in facts.modules)
