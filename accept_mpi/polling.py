"""Polling intervals of the data plane, and the cost of a poll. The planner's forecasts use the same numbers.

A poll takes 0.04 ms of CPU between convolutions, a message 0.36 besides coding (``planning.message_model``).
"""

import time
from collections.abc import Callable

from accept_mpi.errors import DeadlineError

SENDING_SECONDS = 0.002
"""Seconds between two polls while a large message is being sent."""
SOCKET_BYTES = 1 << 17
"""Bytes that a socket accepts at once: sending a message of at most this size needs no further polls."""

# Seconds between two polls: while the computing thread waits for a message (AWAITED); while a message larger than
# SOCKET_BYTES is being sent (SENDING); otherwise (IDLE); on a rank without neighbours (ALONE), which polls as if SENDING for
# LIVELY_SECONDS after a message; and where the only core computes and polling gains nothing (RARE), since messages are then
# decoded when a send or a wait wakes the thread.
LIVELY_SECONDS = 0.2
POLL_AWAITED, POLL_SENDING, POLL_IDLE, POLL_ALONE, POLL_RARE = 0.0002, SENDING_SECONDS, 0.008, 0.02, 0.032


def wait_while(pending: Callable[[], object], every: float, deadline: float, check: Callable[[], None], what: str) -> None:
    """Wait as long as something is ``pending``, looking ``every`` so many seconds. Raises DeadlineError, which names
    ``what`` was waited for, after ``deadline`` seconds, and what ``check`` raises."""
    until = time.monotonic() + deadline
    while pending():
        check()
        if time.monotonic() > until:
            raise DeadlineError(f"waited {deadline:.0f} s for {what}")
        time.sleep(every)
