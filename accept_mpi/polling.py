"""How often the data plane looks at MPI, and what that costs. Numbers, since forecasts and the partitioner count them, too.

Estimates, by what CPU data-plane threads of busy stages took and how often they looked (ARCHITECTURE, "What looks cost"): a
look takes 0.10 to 0.17 ms between convolutions, where a message was measured to take 0.26 ms.
"""

SENDING_SECONDS = 0.002
"""Between two looks while something large is sent."""
SOCKET_BYTES = 1 << 17
"""What a socket takes at once: a message of no more than that is not looked after."""
_OF_A_MESSAGE = 0.5
"""What a look takes, as a share of a message's fixed cost."""
_FOR_EACH = 1.5
"""Looks for a message of any size: who hands it over, or waits for it, wakes the data plane, which finds it done later."""


def per_message(message: float) -> float:
    """Seconds that a message takes where it must be looked for, bytes and coding apart. ``message``: as it was measured."""
    return (1 + _FOR_EACH * _OF_A_MESSAGE) * message


def while_sending(seconds: float, message: float) -> float:
    """Seconds that looks take until the link, for so many ``seconds``, has carried something large."""
    return seconds / SENDING_SECONDS * _OF_A_MESSAGE * message
