"""How often the data plane looks at MPI while it sends something large, and what that costs. Numbers, since forecasts count
them, too."""

SENDING_SECONDS = 0.002
"""Between two looks."""
SOCKET_BYTES = 1 << 17
"""What a socket takes at once: a message of no more than that is not looked after."""
OF_A_MESSAGE = 0.25
"""What a look takes, as a share of a message's fixed cost, both between convolutions: 0.08 of 0.3 ms of CPU, on a core at
2.2 GHz (what a data plane took more, the more it looked, in runs of the same job)."""
