"""Bulk transfers that yield to training: the number of pieces in flight follows from how long a piece takes to arrive.

One piece at a time leaves a link idle until its receiver, short of CPU, polls; many at a time are a queue in front of the
messages that computing waits for. So the number grows by one after each piece that arrived soon, and falls by one after each
that took longer than ``_TARGET_SECONDS`` (as LEDBAT does for TCP: RFC 6817).
"""

import time
from collections import deque

from accept_mpi.comm.messages import Control
from accept_mpi.comm.messenger import Messenger, Sending

_TARGET_SECONDS = 0.08
_MOST = 8
_PATIENCE_SECONDS = 0.2  # after these a piece goes even if training sends: a busy link must not block it for ever


class Background:
    """Control messages that may wait. Any thread may use ``put`` and ``busy``, only the data plane's thread the rest."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._waiting: deque[tuple[int, Control]] = deque()
        self._active: deque[Sending] = deque()
        self._last = 0.0
        self.window = 1
        """Maximum number of pieces in flight."""

    def put(self, dest: int, control: Control) -> None:
        """Queue a message to rank ``dest``."""
        self._waiting.append((dest, control))

    @property
    def busy(self) -> bool:
        """True if a piece is in flight or queued."""
        return bool(self._active or self._waiting)

    def move(self, quiet: bool) -> bool:
        """Start the sends that may start; ``quiet``: training sends nothing. Returns True if any send started or arrived."""
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
