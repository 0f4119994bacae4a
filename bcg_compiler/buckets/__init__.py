"""Which padded row counts a program is captured for.

``ladder``     the buckets that prompts are padded to; ``choose`` has the two searches behind it
"""

from bcg_compiler.buckets.ladder import Ladder

__all__ = ["Ladder"]
