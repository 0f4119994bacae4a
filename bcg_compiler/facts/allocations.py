"""Which storages a node allocates, how large they are, and how long it uses them."""

from collections.abc import Callable, Iterable, Sequence

import torch

from bcg_compiler.compat.fake import is_traceable_wrapper_subclass, storage_key
from bcg_compiler.compat.recorder import Recorded
from bcg_compiler.facts.footprint import op_name
from bcg_compiler.facts.node import NewStorage


def new_storages(
    calls: Iterable[Recorded],
    result: Sequence[torch.Tensor],
    root_of: Callable[[torch.Tensor], int],
    known: int,
    gives_argument: bool = False,
) -> tuple[NewStorage, ...]:
    """The storages that the operations of a node allocate, in order, each once.

    ``result`` are the tensors that the node gives, ``root_of`` numbers the storage of one; roots below ``known`` are
    older than the node. ``gives_argument``: the node gives its argument back where fakes make a copy, which does not
    count. A storage that is not in the result counts as freed after the last operation that reads it: a composite
    operation may hold it until it returns. What has no storage of its own (a sparse tensor, a wrapper around others)
    counts nothing, and neither does what a kernel takes for itself: a workspace is no tensor.
    """
    made: dict[int, torch.Tensor] = {}
    until: dict[int, int] = {}
    foreign: set[int] = set()
    for call in calls:
        used = {root_of(t) for t in filter(_has_storage, call.reads)}
        foreign |= used - made.keys()
        if gives_argument and op_name(call.op) == "aten::clone":
            foreign |= {root_of(t) for t in filter(_has_storage, call.results)}
        for tensor in filter(_has_storage, call.results):
            root = root_of(tensor)
            if root >= known and root not in foreign:
                made.setdefault(root, tensor)
                used.add(root)
        until.update(dict.fromkeys(used, len(made)))
    given = {root_of(t): t for t in filter(_has_storage, result)}
    for root, tensor in given.items():  # of a body that is not seen
        if root >= known and root not in foreign:
            made.setdefault(root, tensor)
    return tuple(
        NewStorage(
            root,
            str(tensor.untyped_storage().nbytes()),
            str(tensor.device),
            None if root in given else until[root] - position - 1,
        )
        for position, (root, tensor) in enumerate(made.items())
    )


def _has_storage(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return False
    return storage_key(value) is not None
