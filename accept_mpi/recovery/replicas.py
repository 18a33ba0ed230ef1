"""Snapshots in memory: each rank keeps its own layers' state and that of the stage before it, so that a lost rank's layers
exist elsewhere, too (FTPipeHD's chain replication, section III-E).

A layer's state is one safetensors blob: ``weights/<name>`` and ``optimizer/<what>/<name>``, names as in the whole model.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from accept_mpi.job import LOCAL_KEPT
from accept_mpi.recovery.layer_state import Blobs, Copy

Holdings = dict[int, list[int]]
"""Layers whose state a rank holds, by the step after which the state was copied."""


class Disk(Protocol):
    """A place in which snapshots outlive the process (``disk_replicas.DiskReplicas``)."""

    def write(self, step: int, layers: Blobs) -> None: ...

    def drop_after(self, step: int) -> None: ...


class Replicas:
    """The states of layers that one rank holds, by step. Thread-safe."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._steps: dict[int, Blobs] = {}
        self._local: dict[int, dict[int, Copy]] = {}

    def keep(self, step: int, layers: Mapping[int, bytes]) -> None:
        """Keep the states of some layers after ``step`` steps."""
        with self._lock:
            self._steps.setdefault(step, {}).update(layers)

    def keep_local(self, step: int, layers: dict[int, Copy]) -> None:
        """Keep a local copy after ``step`` steps, and forget the oldest if there are more than ``LOCAL_KEPT``."""
        with self._lock:
            self._local[step] = layers
            for old in sorted(self._local)[:-LOCAL_KEPT]:
                del self._local[old]

    def commit(self, step: int) -> None:
        """Write the snapshot after ``step`` steps, which is complete everywhere, to the disk if there is one; forget earlier
        ones."""
        with self._lock:
            self._steps = {s: blobs for s, blobs in self._steps.items() if s >= step}
            layers = dict(self._steps.get(step, {}))
        if self._disk and layers:
            self._disk.write(step, layers)

    def back_to(self, step: int) -> None:
        """Forget the states after later steps than ``step``, since these steps will be repeated."""
        with self._lock:
            self._steps = {s: blobs for s, blobs in self._steps.items() if s <= step}
            self._local = {s: copies for s, copies in self._local.items() if s <= step}
        if self._disk:
            self._disk.drop_after(step)

    def clear(self) -> None:
        """Forget all states, to free their memory."""
        with self._lock:
            self._steps, self._local = {}, {}

    def holdings(self) -> Holdings:
        """The layers whose states are held, by step."""
        with self._lock:
            steps = sorted({*self._steps, *self._local})
            return {step: sorted({*self._steps.get(step, ()), *self._local.get(step, ())}) for step in steps}

    def get(self, step: int, layer: int) -> bytes:
        """State of ``layer`` after ``step`` steps. Raises KeyError if it is not held."""
        with self._lock:
            blobs = self._steps.get(step, {})
            return blobs[layer] if layer in blobs else self._local[step][layer].blob

    @property
    def nbytes(self) -> int:
        """Bytes of all states that are held."""
        with self._lock:
            local = sum(copy.nbytes for copies in self._local.values() for copy in copies.values())
            return local + sum(len(blob) for blobs in self._steps.values() for blob in blobs.values())


def newest(held: Sequence[Holdings], layers: int) -> int | None:
    """The last step after which the state of each of ``layers`` layers is held by some rank; None if there is none.
    ``held``: by rank."""
    for step in sorted({step for holdings in held for step in holdings}, reverse=True):
        if len({layer for holdings in held for layer in holdings.get(step, ())}) == layers:
            return step
    return None


def sources(held: Sequence[Holdings], step: int, wanted: Sequence[range]) -> dict[tuple[int, int], list[int]]:
    """Layers to move so that every rank gets those that it lacks, by (sending rank, receiving rank). ``wanted``: layers by
    rank. Ranks that hold the same layers share the work of sending them."""
    moves: dict[tuple[int, int], list[int]] = {}
    for dest, layers in enumerate(wanted):
        for layer in layers:
            if layer in held[dest].get(step, ()):
                continue
            holders = [rank for rank, holdings in enumerate(held) if layer in holdings.get(step, ())]
            source = min(holders, key=lambda rank, to=dest: sum(len(m) for (a, _), m in moves.items() if a == rank))  # type: ignore[misc]
            moves.setdefault((source, dest), []).append(layer)
    return moves
