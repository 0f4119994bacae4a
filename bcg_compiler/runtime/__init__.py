"""What runs.

``program``   a plan with its code: called by Dynamo
``ahead``     captures all buckets before the first request, answers whether a call would replay
``counters``  what happened, as numbers that tests can expect
``registry``  which programs are alive, and what they add up to for one compiled callable
"""

from bcg_compiler.runtime.ahead import CaptureReport, admission, capture
from bcg_compiler.runtime.counters import Counters, counters
from bcg_compiler.runtime.program import Program
from bcg_compiler.runtime.registry import Stats, programs_of, register, register_for, reset, stats

__all__ = [
    "CaptureReport",
    "Counters",
    "Program",
    "Stats",
    "admission",
    "capture",
    "counters",
    "programs_of",
    "register",
    "register_for",
    "reset",
    "stats",
]
