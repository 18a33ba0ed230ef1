"""Polling intervals of the data plane, and the cost of a poll. The planner's forecasts use the same numbers.

A poll of MPI takes an estimated 0.10 to 0.17 ms between convolutions (from the CPU time of busy stages' data-plane threads
and the number of their polls), where a message was measured to take 0.26 ms.
"""

SENDING_SECONDS = 0.002
"""Seconds between two polls while a large message is being sent."""
SOCKET_BYTES = 1 << 17
"""Bytes that a socket accepts at once: sending a message of at most this size needs no further polls."""

# Seconds between two polls: while the computing thread waits for a message (AWAITED); while a message larger than
# SOCKET_BYTES is being sent (SENDING); otherwise (IDLE); on a rank without neighbours (ALONE), which polls as if SENDING for
# LIVELY_SECONDS after a message; and where the only core computes and polling gains nothing (RARE), since messages are then
# decoded when a send or a wait wakes the thread. A poll costs about 0.1 ms of that core, whose caches are cold.
LIVELY_SECONDS = 0.2
POLL_AWAITED, POLL_SENDING, POLL_IDLE, POLL_ALONE, POLL_RARE = 0.0002, SENDING_SECONDS, 0.008, 0.02, 0.032
