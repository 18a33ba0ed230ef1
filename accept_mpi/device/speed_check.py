"""How fast a device is while a plan leaves it idle, or little to do: the same piece of arithmetic, timed now and then.

What a stage with little to do takes says nothing of that: a device that mostly waits gets its core at once when it wants it,
from the other work there or from a quota, and would not if it wanted it all the time.
"""

import time

import torch

EVERY, EVERY_BESIDE_A_STAGE = 3.0, 6.0
"""Seconds between two."""
_SECONDS = 0.35  # longer than a few periods of a CPU quota
_SIZE = 160


class SpeedCheck:
    """1.0 is as fast as when this was made."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(2, _SIZE, _SIZE)
        self._out = torch.empty(_SIZE, _SIZE)
        torch.mm(self._left, self._right, out=self._out)  # memory, and the library's choice of a routine
        self._first = self._round()
        self._next = 0.0

    def factor(self) -> float | None:
        """How many times as long as at first it takes now; None: it is not time yet."""
        if time.monotonic() < self._next:
            return None
        found = self.beat()
        self._next = time.monotonic() + EVERY
        return found

    def beat(self) -> float:
        """How many times as long as at first it takes now."""
        return self._round() / self._first

    def _round(self) -> float:
        """Seconds of the clock that a multiplication takes."""
        began, count = time.monotonic(), 0
        while (took := time.monotonic() - began) < _SECONDS:
            torch.mm(self._left, self._right, out=self._out)
            count += 1
        return took / count
