"""Trace rows of one rank, gathered by its threads and shipped to rank 0 in batches."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from accept_mpi.logs.format import KINDS, TRACE, Rows

_NUMBER = {kind: i for i, kind in enumerate(KINDS)}


class Clock:
    """Seconds since the run began, on rank 0's clock. ``offset`` is rank 0's clock minus this one's, in seconds."""

    def __init__(self, origin: float, offset: float = 0.0) -> None:
        self._shift = offset - origin
        self.offset = offset

    def now(self) -> float:
        return time.monotonic() + self._shift


class Recorder:
    """Collects rows. Appending to a list is atomic, so the computing and the data-plane thread share one."""

    def __init__(self, clock: Clock, rank: int, stage: int, names: Sequence[int] | None = None) -> None:
        """``names``: what rank 0, 1, ... are called in the trace, where not so."""
        self.clock = clock
        self._names = names
        self._rank, self._stage = rank, stage
        self._rows: list[tuple[object, ...]] = []

    def add(
        self,
        kind: str,
        start: float,
        step: int,
        micro_batch: int = -1,
        boundary: int = -1,
        direction: int = -1,
        raw: int = 0,
        wire: int = 0,
        end: float | None = None,
        of: tuple[int, int] | None = None,
    ) -> None:
        """One row, from ``start`` to ``end`` (now, if not given), of this rank and stage or of the pair ``of``."""
        end = self.clock.now() if end is None else end
        number = _NUMBER[kind]
        rank, stage = of or (self._rank, self._stage)
        rank = self._names[rank] if self._names else rank
        self._rows.append((start, end, rank, stage, number, boundary, direction, step, micro_batch, raw, wire))

    @contextmanager
    def span(self, kind: str, step: int, micro_batch: int = -1) -> Iterator[None]:
        """A row for what happens inside the ``with``."""
        start = self.clock.now()
        yield
        self.add(kind, start, step, micro_batch)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> Rows:
        """All rows so far as an array of dtype TRACE; the recorder is empty afterwards."""
        rows, self._rows = self._rows, []
        return np.array(rows, TRACE)
