"""Work that is shared out over ranks, on ``torch.distributed``.

``context_parallel``  which rows of a batch each rank holds: numbers and indices alone
``gather``            the rows of all ranks of a group
"""

from bcg_compiler.distributed.context_parallel import Zigzag
from bcg_compiler.distributed.gather import GroupRows, RowGather

__all__ = ["GroupRows", "RowGather", "Zigzag"]
