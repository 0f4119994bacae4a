"""Memory that the captures of one program use one at a time: of all its buckets only one is replayed at once."""

from collections.abc import Hashable, Mapping

import torch

from bcg_compiler.runtime.memory import Form, View, in_storage


class Arena:
    """Buffers by name, each as large as the largest that was asked for.

    The bucket that is captured first should be the largest: a larger one later gets new memory, and what was captured
    before stays where it is.
    """

    def __init__(self) -> None:
        self._storages: dict[Hashable, torch.UntypedStorage] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """All bytes that were ever taken, those of outgrown buffers included."""
        return self._bytes

    def buffer(self, name: Hashable, form: Form) -> torch.Tensor:
        """The buffer ``name`` as a tensor of that form, without values that mean anything."""
        return self._tensor(self._storage(name, form.bytes, form.device), 0, form)

    def packed(
        self, name: Hashable, forms: Mapping[int, Form], offsets: Mapping[int, int], size: int
    ) -> dict[int, torch.Tensor]:
        """Tensors at offsets (in bytes) of one buffer of ``size`` bytes for each device."""
        found = {}
        for key, form in forms.items():
            storage = self._storage((name, form.device), size, form.device)
            found[key] = self._tensor(storage, offsets[key], form)
        return found

    def _storage(self, name: Hashable, size: int, device: torch.device) -> torch.UntypedStorage:
        storage = self._storages.get(name)
        if storage is None or storage.nbytes() < size:
            with torch.inference_mode(False):
                storage = torch.zeros(max(size, 1), dtype=torch.uint8, device=device).untyped_storage()
            self._storages[name] = storage
            self._bytes += storage.nbytes()
        return storage

    @staticmethod
    def _tensor(storage: torch.UntypedStorage, offset: int, form: Form) -> torch.Tensor:
        with torch.inference_mode(False):
            view = View(form.shape, form.strides, offset // form.dtype.itemsize, form.dtype, False, False, False)
            return in_storage(storage, view).requires_grad_(form.grad)
