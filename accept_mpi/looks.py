"""How often the data plane looks at MPI while it sends something large, and what that costs. Numbers, since forecasts count
them, too."""

SENDING_SECONDS = 0.002
"""Between two looks."""
SOCKET_BYTES = 1 << 17
"""What a socket takes at once: a message of no more than that is not looked after."""
OF_A_MESSAGE = 0.25
"""What a look takes, as a share of a message's fixed cost, both between convolutions. An estimate: 0.08 ms of CPU, by what a
data plane took more, the more it looked, of the 0.3 ms that a message was measured to take there."""
