"""From a plan to something that runs.

``emit``     statements of Python for the nodes of a step
``texts``    keeps them as files, if asked to
``writer``   lines of source text that know which node they are for
``program``  a function for each segment, and the flat function over all steps, eagerly
``units``    compiles the units of segments
``beside``   products of one input, which a compiler is given as one operation
``compiled`` a unit with what a compiler made of it
``stubs``    what a capture does in place of break functions
``replay``   the flat function over replays and breaks of one capture
``marked``   that function once more, with a call between its parts
"""

from bcg_compiler.lower.compiled import CompiledUnit, units_seen_by
from bcg_compiler.lower.marked import marked
from bcg_compiler.lower.program import Lowered, lower, lower_noted, lower_prefix
from bcg_compiler.lower.replay import Captured, Code, write_replay
from bcg_compiler.lower.stubs import Stub
from bcg_compiler.lower.texts import GENERATED, Texts
from bcg_compiler.lower.units import SegmentCompiler, UnitCompiler
from bcg_compiler.lower.writer import Part

__all__ = [
    "GENERATED",
    "Captured",
    "Code",
    "CompiledUnit",
    "Lowered",
    "Part",
    "SegmentCompiler",
    "Stub",
    "Texts",
    "UnitCompiler",
    "lower",
    "lower_noted",
    "lower_prefix",
    "marked",
    "units_seen_by",
    "write_replay",
]
