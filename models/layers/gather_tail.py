"""The end of a model over context-parallel ranks: the rows of all ranks come together, in order."""

import torch

import bcg_compiler as bcg
from bcg_compiler.models.layers.batch import live_batch


def _rows_of_the_batch(rows: torch.Tensor) -> torch.Tensor:
    """How many there are, the batch says that is published."""
    tokens = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty(tokens, *rows.shape[1:])


@bcg.eager_break(reason="cp_gather_tail", reads_live_rows=True, fake=_rows_of_the_batch)
def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows of the whole batch ``[tokens, ...]`` in order, of this rank's ``[its tokens or more, ...]``.

    All ranks call it together. Of a batch that is not shared out, its live rows. What follows is the tail of a graph:
    it runs eagerly, on live rows (``docs/passes/mark_cp_gather_tail.md``).
    """
    batch = live_batch(rows)
    live = rows[: batch.tokens]
    return live if batch.share is None else batch.share.restore(live)
