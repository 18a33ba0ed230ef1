"""How often the data plane looks at MPI, and what that costs. Numbers, since forecasts and the partitioner count them, too.

Estimates, by what CPU data-plane threads of busy stages took and how often they looked (ARCHITECTURE, "What looks cost"): a
look takes 0.10 to 0.17 ms between convolutions, where a message was measured to take 0.26 ms.
"""

SENDING_SECONDS = 0.002
"""Between two looks while something large is sent."""
SOCKET_BYTES = 1 << 17
"""What a socket takes at once: a message of no more than that is not looked after."""

# Seconds between two looks at MPI: while the computing thread waits for a message; while something larger than a socket
# takes at once is being sent; otherwise; on a lone rank; and where nothing would be gained from looking while the only core
# computes: what has arrived is decoded when a send or a wait wakes this thread. A look costs some 0.1 ms of that core, for
# its caches are cold.
LIVELY_SECONDS = 0.2
POLL_AWAITED, POLL_SENDING, POLL_IDLE, POLL_ALONE, POLL_RARE = 0.0002, SENDING_SECONDS, 0.008, 0.02, 0.032
