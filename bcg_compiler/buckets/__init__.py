"""Which padded row counts a program is captured for, and which calls may use them.

``ladder``     the buckets that prompts are padded to; ``choose`` has the two searches behind it
``policy``     what stands in the padded rows of an input
``admission``  whether a call replays in a bucket or runs eagerly, and why
"""

from bcg_compiler.buckets.admission import Admission, Batch, Limits, admit
from bcg_compiler.buckets.ladder import Ladder
from bcg_compiler.buckets.policy import SlotPolicy

__all__ = ["Admission", "Batch", "Ladder", "Limits", "SlotPolicy", "admit"]
