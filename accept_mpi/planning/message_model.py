"""What messages take from the computing core where the data plane has no core of its own."""

from accept_mpi.polling import SENDING_SECONDS

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
