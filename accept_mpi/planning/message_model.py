"""The computing core's time for a message if the data plane has no core of its own: the only model of it.

The partitioner uses it for every boundary that a plan could have (``formulation``), forecasts use it for those that a plan
has (``forecast``). Both get the same seconds for the same message on the same link.

A poll costs a share of a message's fixed cost. The share and the number of polls are from the CPU time of data-plane threads
and their numbers of polls and messages: a poll takes 0.04 ms, a message 0.36 ms besides coding, where the measurement before
a run says 0.4 (comm/README.md).
"""

from typing import TypeVar

import numpy as np

from accept_mpi.polling import SENDING_SECONDS, SOCKET_BYTES

N = TypeVar("N", float, np.ndarray)

_POLL = 0.1
"""Cost of one poll, as a share of a message's fixed cost."""
_POLLS = 4.0
"""Polls per message of any size: the thread that hands it over or waits for it wakes the data plane, which later polls
again to find it done."""


def message_seconds(
    values: N, nbytes: N, per_value: float, per_byte: float, per_message: float, on_link: N | None = None
) -> N:
    """Seconds of the computing core for one message at one of its ends: coding its values, moving its bytes, its fixed cost
    and its polls.

    ``per_value``: seconds to code one of its ``values``; ``per_byte``: seconds to move one of its ``nbytes``;
    ``per_message``: its measured fixed cost in seconds. ``on_link``, at the sending end: seconds until the link has carried
    it, during which a message larger than ``SOCKET_BYTES`` is polled for.
    """
    seconds = values * per_value + nbytes * per_byte + (1 + _POLLS * _POLL) * per_message
    if on_link is not None:
        seconds = seconds + (nbytes > SOCKET_BYTES) * (on_link / SENDING_SECONDS * _POLL * per_message)
    return seconds
