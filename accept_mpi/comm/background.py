"""Bulk that yields to training: how many pieces are under way follows from how long a piece takes to arrive.

One at a time leaves a link idle while its receiver, short of CPU, gets round to looking; many at a time are a queue in front
of what computing waits for. So there is one more after each piece that came soon, and one less after each that took longer
than ``_TARGET_SECONDS`` (as LEDBAT does it for TCP: RFC 6817).
"""

import time
from collections import deque

from accept_mpi.comm.messages import Control
from accept_mpi.comm.messenger import Messenger, Sending

_TARGET_SECONDS = 0.08
_MOST = 8
_PATIENCE_SECONDS = 0.2  # after which a piece goes although training sends: a link that is always busy must not hold it off


class Background:
    """Control messages that may wait. ``put`` and ``busy`` from any thread, all else from the data plane's."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._waiting: deque[tuple[int, Control]] = deque()
        self._active: deque[Sending] = deque()
        self._last = 0.0
        self.window = 1
        """Pieces under way at most."""

    def put(self, dest: int, control: Control) -> None:
        self._waiting.append((dest, control))

    @property
    def busy(self) -> bool:
        """Whether a piece is under way, or waits."""
        return bool(self._active or self._waiting)

    def move(self, quiet: bool) -> bool:
        """Begin what may begin; ``quiet``: training sends nothing. Returns whether anything has arrived or begun."""
        moved = False
        while self._active and (took := self._active[0].took) is not None:
            full = len(self._active) >= self.window
            self._active.popleft()
            if took > _TARGET_SECONDS:
                self.window = max(1, self.window - 1)
            elif full:
                self.window = min(_MOST, self.window + 1)
            moved = True
        while self._waiting and self._may_begin(quiet):
            self._active.append(self._messenger.begin(*self._waiting.popleft()))
            self._last = time.monotonic()
            moved = True
        return moved

    def _may_begin(self, quiet: bool) -> bool:
        if quiet:
            return len(self._active) < self.window
        return not self._active and time.monotonic() - self._last > _PATIENCE_SECONDS
