"""Finds what makes a compiled model give other numbers than eager: a pass, a segment, a break, an operation.

``calls``      a model called eagerly and compiled, with checks in every replay
``reference``  the numbers of Dynamo's own graphs, node by node, beside those between the steps of replays
``search``     calls, numbers, passes, segments, operations: in this order, until there is a culprit
``repro``      a file that shows the difference by itself
``view``       what was found, for a terminal
"""

from bcg_compiler.debug.bisect.search import Bisection, Trial, bisect, bisect_model

__all__ = ["Bisection", "Trial", "bisect", "bisect_model"]
