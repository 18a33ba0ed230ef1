"""Keeps the ranks' clocks in step with rank 0's while a run trains.

Clocks are compared when a run starts (``links.clock_offset``); from then on those of hosts without a common time server part
by some 20 to 100 us a second, a second in some hours. So rank 0 asks each rank for its time now and then. Whatever the
message took on either way, the answer was given between the question and its arrival; a clock that says something else is
set right by the least that it must be (after Marzullo and Owicki 1983). A good comparison at the start is thus not spoilt by
answers that took longer.
"""

import time
from collections.abc import Callable
from typing import ClassVar

from accept_mpi.comm.messages import ClockAsked, ClockOff, ClockRead, Control, Message
from accept_mpi.logs.recorder import Clock


class ClockCheck:
    """One rank's part, during one deployment."""

    every_seconds: ClassVar[float] = 30.0

    def __init__(self, clock: Clock, rank: int, ranks: int, post: Callable[[int, Control], None]) -> None:
        """``ranks``: the number of ranks; ``post`` sends a control message, from any thread."""
        self._clock, self._post = clock, post
        self._answered = set(range(1, ranks)) if rank == 0 else set()
        """Ranks that rank 0 may ask: a second question before the answer could correct twice."""
        self._asked = time.monotonic()

    def ask(self) -> None:
        """On rank 0, ask the other ranks for their time if they have not been asked for a while; on others, nothing."""
        if self._answered and time.monotonic() - self._asked > self.every_seconds:
            self._asked = time.monotonic()
            ranks, self._answered = self._answered, set()
            for rank in ranks:
                self._post(rank, ClockAsked(self._clock.now()))

    def handle(self, message: Message) -> bool:
        """Take a message on the data-plane thread; returns False if it is not about clocks."""
        control = message.control
        if isinstance(control, ClockAsked):
            self._post(message.source, ClockRead(control.asked, self._clock.now()))
        elif isinstance(control, ClockRead):
            least, most = control.asked - control.read, self._clock.now() - control.read
            if by := max(least, 0.0) + min(most, 0.0):
                self._post(message.source, ClockOff(by))
            self._answered.add(message.source)
        elif isinstance(control, ClockOff):
            self._clock.shift(control.by)
        else:
            return False
        return True
