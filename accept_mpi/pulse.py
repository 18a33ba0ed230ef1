"""How fast a device is while a plan leaves it idle: the same piece of arithmetic, timed now and then."""

import time

import torch

EVERY = 3.0
"""Seconds between two."""
_SECONDS = 0.35  # longer than a few periods of a CPU quota
_SIZE = 160


class Pulse:
    """``factor()`` is 1.0 as long as the device is as fast as at the first time."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(2, _SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        self._first = self._round()
        self._next = time.monotonic() + EVERY

    def factor(self) -> float | None:
        """How many times as long as at first it takes now; None: it is not time yet."""
        if time.monotonic() < self._next:
            return None
        found = self._round() / self._first
        self._next = time.monotonic() + EVERY
        return found

    def _round(self) -> float:
        """Seconds of the clock that a multiplication takes."""
        began, count = time.monotonic(), 0
        while (took := time.monotonic() - began) < _SECONDS:
            torch.mm(self._left, self._right, out=self._out)
            count += 1
        return took / count
