"""Layers that have been handed out: none is handed out twice."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from accept_mpi.models.memory import checksum, memory_of
from accept_mpi.models.shared import parts


class Handed:
    """Weak references to the layers that have been handed out, so that nothing is handed out twice."""

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
        """Layers, and for those without trained state their attributes when they were handed out."""
        self._memory: dict[int, tuple[StorageWeakRef, int | None]] = {}

    def add(self, layers: Iterable[nn.Module]) -> list[nn.Module]:
        """Remember layers that are handed out, and return them. A layer without trained state that was handed out before is
        replaced by a copy of what it was then: a function may always return the same ``nn.ReLU``, but hooks, say, must be
        put on one copy alone."""
        self._memory = {key: known for key, known in self._memory.items() if not known[0].expired()}
        given = [_another(layer, self._layers[layer]) if layer in self._layers else layer for layer in layers]
        for layer in given:
            self._layers[layer] = {} if any(part.written for part in parts(layer)) else _own(vars(layer))
            for part in parts(layer):
                if (storage := memory_of(part.tensor)) is not None:
                    reference = StorageWeakRef(storage)
                    if part.written or reference.cdata not in self._memory:
                        self._memory[reference.cdata] = (reference, None if part.written else checksum(storage))
        return given

    def used(self, layer: nn.Module) -> list[str]:
        """Names of a layer's tensors that have been handed out before and may have changed since."""
        found = []
        for part in parts(layer):
            storage = memory_of(part.tensor)
            if storage is None or storage._cdata not in self._memory:
                continue
            _, values = self._memory[storage._cdata]
            if part.written or values is None or values != checksum(storage):
                found.append(part.name)
        return found

    def __contains__(self, layer: nn.Module) -> bool:
        return layer in self._layers


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a layer, with copies of dictionaries (hooks, submodules)."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in state.items()}


def _another(layer: nn.Module, state: dict[str, Any]) -> nn.Module:
    """New layer of the same type with these attributes, in place of ``layer``, which has no trained state."""
    other = type(layer).__new__(type(layer))
    vars(other).update(_own(state))
    return other
