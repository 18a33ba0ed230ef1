"""Snapshots in memory: each rank keeps its own layers' state and that of the stage before it, so that a lost rank's layers
are still somewhere (FTPipeHD's chain replication, section III-E).

A layer's state is one safetensors blob: ``weights/<name>`` and ``optimizer/<what>/<name>``, names as in the whole model.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from accept_mpi.recovery.layer_state import Blobs

Holdings = dict[int, list[int]]
"""Step -> layers whose state after it a rank holds."""


class Disk(Protocol):
    """Where snapshots outlive the process (``disk_replicas.DiskReplicas``)."""

    def write(self, step: int, layers: Blobs) -> None: ...

    def drop_after(self, step: int) -> None: ...


class Replicas:
    """What one rank holds of the model's state after which steps. Any thread."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._steps: dict[int, Blobs] = {}

    def keep(self, step: int, layers: Mapping[int, bytes]) -> None:
        """States of layers after ``step`` steps."""
        with self._lock:
            self._steps.setdefault(step, {}).update(layers)

    def commit(self, step: int) -> None:
        """The snapshot after ``step`` is whole everywhere: no earlier one is needed."""
        with self._lock:
            self._steps = {s: blobs for s, blobs in self._steps.items() if s >= step}
            layers = dict(self._steps.get(step, {}))
        if self._disk and layers:
            self._disk.write(step, layers)

    def back_to(self, step: int) -> None:
        """What comes after ``step`` will be made anew."""
        with self._lock:
            self._steps = {s: blobs for s, blobs in self._steps.items() if s <= step}
        if self._disk:
            self._disk.drop_after(step)

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._steps = {}

    def holdings(self) -> Holdings:
        with self._lock:
            return {step: sorted(blobs) for step, blobs in self._steps.items()}

    def get(self, step: int, layer: int) -> bytes:
        with self._lock:
            return self._steps[step][layer]

    @property
    def nbytes(self) -> int:
        """Memory that all of it takes."""
        with self._lock:
            return sum(len(blob) for blobs in self._steps.values() for blob in blobs.values())


def newest(held: Sequence[Holdings], layers: int) -> int | None:
    """The last step after which every layer's state is held by someone; ``held``: by rank."""
    for step in sorted({step for holdings in held for step in holdings}, reverse=True):
        if len({layer for holdings in held for layer in holdings.get(step, ())}) == layers:
            return step
    return None


def sources(held: Sequence[Holdings], step: int, wanted: Sequence[range]) -> dict[tuple[int, int], list[int]]:
    """Who sends which layers to whom: (from, to) -> layers. ``wanted``: layers by rank. Those who hold a layer share the
    sending."""
    moves: dict[tuple[int, int], list[int]] = {}
    for dest, layers in enumerate(wanted):
        for layer in layers:
            if layer in held[dest].get(step, ()):
                continue
            holders = [rank for rank, holdings in enumerate(held) if layer in holdings.get(step, ())]
            source = min(holders, key=lambda rank, to=dest: sum(len(m) for (a, _), m in moves.items() if a == rank))  # type: ignore[misc]
            moves.setdefault((source, dest), []).append(layer)
    return moves
