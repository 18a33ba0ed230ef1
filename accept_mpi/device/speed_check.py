"""Speed of a device that a plan leaves idle or with little to do: the same piece of arithmetic, timed now and then.

The times of a stage with little to do do not show it: a device that mostly waits gets its core at once when it wants it,
from other programs or from a quota, and would not if it computed all the time.
"""

import time

import torch

EVERY, EVERY_BESIDE_A_STAGE = 3.0, 6.0
"""Seconds between two checks: on an idle rank, and on a rank that has a stage."""
_SECONDS = 0.35  # several periods of a CPU quota
_SIZE = 160


class SpeedCheck:
    """Times a matrix multiplication, and compares it with its time when this object was made."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(2, _SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        torch.mm(self._left, self._right, out=self._out)  # untimed: takes memory and lets the library choose a routine
        self._first = self._round()
        self._next = 0.0

    def factor(self) -> float | None:
        """Time of the multiplication as a multiple of its first time; None if no check is due yet."""
        if time.monotonic() < self._next:
            return None
        found = self.beat()
        self._next = time.monotonic() + EVERY
        return found

    def beat(self) -> float:
        """Time of the multiplication as a multiple of its first time."""
        return self._round() / self._first

    def _round(self) -> float:
        """Wall-clock seconds per multiplication."""
        began, count = time.monotonic(), 0
        while (took := time.monotonic() - began) < _SECONDS:
            torch.mm(self._left, self._right, out=self._out)
            count += 1
        return took / count
