"""Ranks that work together, on ``torch.distributed``: which rows each holds, what they must agree on, and how they do.

``context_parallel``  which rows of a batch each rank holds: numbers and indices alone
``gather``            the rows of all ranks of a group
``pipeline``          which layers each stage has, and what goes from one to the next
``replay_vote``       whether all ranks replay, in which buckets, and what they capture before
``vote_wire``         a vote as int64 numbers
``exchange``          one all-gather that ends in time, and names the ranks that do not come
``launch``            the process group of what torchrun has started
``agreement``         what must be the same on all ranks, compared once
``rules``             which layouts of ranks cannot replay, and what to change
"""

from bcg_compiler.distributed.context_parallel import Zigzag
from bcg_compiler.distributed.gather import GroupRows, RowGather

__all__ = ["GroupRows", "RowGather", "Zigzag"]
