"""From a plan to something that runs.

``emit``     statements of Python for the nodes of a step
``program``  one source text with a function for each segment and the flat function over all steps
"""

from bcg_compiler.lower.program import Lowered, lower

__all__ = ["Lowered", "lower"]
