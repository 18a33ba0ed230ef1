"""Polling intervals of the data plane, and the cost of a poll. The planner's forecasts use the same numbers.

A poll takes 0.04 ms of CPU between convolutions, a message 0.36 besides coding (``planning.message_model``).
"""

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
