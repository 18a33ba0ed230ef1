"""Collects the trace rows of one rank; they go to rank 0 in batches."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from accept_mpi.logs.format import KINDS, TRACE, Rows, number_of

_NUMBER = {kind: i for i, kind in enumerate(KINDS)}


class Clock:
    """A clock of the seconds since the run began, in step with rank 0's.

    ``origin``: the run's start on rank 0's clock. ``offset``: rank 0's clock minus this one's. Both in seconds.
    """

    def __init__(self, origin: float, offset: float = 0.0) -> None:
        self._shift = offset - origin

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() + self._shift

    def shift(self, seconds: float) -> None:
        """Add to all that the clock says from now on."""
        self._shift += seconds


_here = threading.local()


def in_lane(lane: int) -> None:
    """Have the rows that this thread adds belong to this lane of its rank."""
    _here.lane = lane


class Subject(NamedTuple):
    """What a row is about: an action, or a message. -1 stands for "does not apply"."""

    step: int
    """Counted from 1."""
    micro_batch: int = -1
    boundary: int = -1
    direction: int = -1
    raw: int = 0
    """Bytes before coding."""
    wire: int = 0
    """Bytes after coding."""


class Recorder:
    """Collects trace rows. Appending to a list is atomic, so all threads of a rank share a recorder."""

    def __init__(self, clock: Clock, rank: int, stage: int, names: Sequence[int] | None = None) -> None:
        """``names``: the numbers of ranks 0, 1, ... in the trace, if they differ: after a loss ranks keep their old ones."""
        self.clock = clock
        self._names = names
        self._rank, self._stage = rank, stage
        self._rows: list[tuple[object, ...]] = []

    def add(
        self, kind: str, start: float, subject: Subject, end: float | None = None, of: tuple[int, int] | None = None
    ) -> None:
        """Add a row of ``kind`` from ``start`` to ``end`` (default: now), both in seconds of ``clock``. ``of``: rank and
        stage, by default this recorder's."""
        end = self.clock.now() if end is None else end
        number = _NUMBER[kind]
        rank, stage = of or (self._rank, self._stage)
        rank = number_of(rank, self._names)
        step, micro_batch, boundary, direction, raw, wire = subject
        lane = getattr(_here, "lane", 0)
        self._rows.append((start, end, rank, stage, number, boundary, direction, step, micro_batch, raw, wire, lane))

    @contextmanager
    def span(self, kind: str, step: int, micro_batch: int = -1) -> Iterator[None]:
        """Add a row that lasts as long as the ``with`` block; none if the block raises."""
        start = self.clock.now()
        yield
        self.add(kind, start, Subject(step, micro_batch))

    def __len__(self) -> int:
        return len(self._rows)

    def take(self) -> Rows:
        """Remove all rows and return them as an array of dtype TRACE."""
        rows, self._rows = self._rows, []
        return np.array(rows, TRACE)
