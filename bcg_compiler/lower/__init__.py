"""From a plan to something that runs.

``emit``     statements of Python for the nodes of a step
``writer``   lines of source text that know which node they are for
``program``  a function for each segment, and the flat function over all steps, eagerly
``replay``   the flat function over replays and breaks of one capture
"""

from bcg_compiler.lower.program import Lowered, lower
from bcg_compiler.lower.replay import Captured, Code, write_replay

__all__ = ["Captured", "Code", "Lowered", "lower", "write_replay"]
