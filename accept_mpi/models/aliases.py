"""Names that stand for one tensor of a model, whether it is trained or not, in one layer or in several.

As in ``shared``, a tensor is identified by its memory, and layers may be looked at and freed one after another.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from accept_mpi.models.memory import memory_of


class Aliases:
    """Groups the names of layers' parameters and buffers. The layers are shown to it one after another."""

    def __init__(self) -> None:
        self._names: dict[Any, list[str]] = {}
        self._alive: list[StorageWeakRef] = []
        """The address of a storage is not reused while a weak reference to it exists."""

    def show(self, layer: nn.Module, prefix: str) -> None:
        """Look at a layer. ``prefix``: what names in the whole model have in front of its own."""
        for name, tensor in every_name(layer):
            if (storage := memory_of(tensor)) is not None and tensor.numel():
                reference = StorageWeakRef(storage)
                self._alive.append(reference)
                place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
                self._names.setdefault((reference.cdata, *place), []).append(prefix + name)

    def found(self) -> list[list[str]]:
        """The names of each tensor that has several, in the order of layers."""
        return [names for names in self._names.values() if len(names) > 1]


def every_name(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's parameters and buffers under all their names: a module, too, may have several."""
    for path, module in layer.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, tensor
