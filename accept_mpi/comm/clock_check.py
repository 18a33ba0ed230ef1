"""Keeps the ranks' clocks in step with rank 0's while a run trains.

Clocks are compared when a run starts (``links.clock_offset``); from then on those of hosts without a common time server
part by some 20 to 100 us a second, a second in some hours. So each rank asks rank 0 for its time now and then. Whatever the
messages took, the answer was given between the question and its arrival; a clock that says something else is set right by
the least that it must be (after Marzullo and Owicki 1983). A good comparison at the start is thus not spoilt by answers
that took longer.
"""

import math
import time
from collections.abc import Callable
from typing import ClassVar

from accept_mpi.comm.messages import ClockAsked, ClockTold, Control, Message
from accept_mpi.logs.recorder import Clock
from accept_mpi.polling import wait_while

_POLL = 0.002


class ClockCheck:
    """One rank's part, during one deployment."""

    every_seconds: ClassVar[float] = 30.0

    def __init__(self, clock: Clock, rank: int, post: Callable[[int, Control], None]) -> None:
        """``post`` sends a control message, from any thread."""
        self._clock, self._post = clock, post
        self._asks = rank > 0
        self._asked = -math.inf
        self._open = False
        """True while rank 0 has not answered."""

    def ask(self) -> None:
        """Ask rank 0 for its time, if that is due."""
        if self._asks and not self._open and time.monotonic() - self._asked > self.every_seconds:
            self._open, self._asked = True, time.monotonic()
            self._post(0, ClockAsked(self._clock.now()))

    def settle(self, deadline: float, check: Callable[[], None]) -> None:
        """Wait for an answer that is on its way: a rank that leaves before it takes no more messages. Raises DeadlineError
        after ``deadline`` seconds, and what ``check`` raises."""
        wait_while(lambda: self._open, _POLL, deadline, check, "rank 0 to say its time")

    def handle(self, message: Message) -> bool:
        """Take a message on the data-plane thread; returns False if it is not about clocks."""
        control = message.control
        if isinstance(control, ClockAsked):
            self._post(message.source, ClockTold(control.asked, self._clock.now()))
        elif isinstance(control, ClockTold):
            least, most = control.told - self._clock.now(), control.told - control.asked
            self._clock.shift(max(least, 0.0) + min(most, 0.0))
            self._open = False
        else:
            return False
        return True
