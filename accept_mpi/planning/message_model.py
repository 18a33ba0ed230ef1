"""What a message takes from the computing core where the data plane has no core of its own: the one model of it.

The partitioner asks it for every boundary that a plan could have (``formulation``), forecasts for those that a plan has
(``forecast``). Both get the same seconds for the same message on the same link.

A poll costs a share of a message's fixed cost. Both shares are estimates, from the CPU time of busy stages' data-plane
threads and their number of polls: a poll takes 0.10 to 0.17 ms between convolutions, where a message was measured to take
0.26 ms (comm/README.md).
"""

from typing import TypeVar

import numpy as np

from accept_mpi.polling import SENDING_SECONDS, SOCKET_BYTES

N = TypeVar("N", float, np.ndarray)

_POLL = 0.5
"""Cost of one poll, as a share of a message's fixed cost."""
_POLLS = 1.5
"""Polls per message of any size: whoever hands it over, or waits for it, wakes the data plane, which finds it done later."""


def message_seconds(
    values: N, nbytes: N, per_value: float, per_byte: float, per_message: float, on_link: N | None = None
) -> N:
    """Seconds of the computing core for one message at one of its ends: coding its values, moving its bytes, its fixed cost
    and the polls for it.

    ``per_value`` codes one of its ``values``, ``per_byte`` moves one of its ``nbytes``, ``per_message`` is its fixed cost as
    measured. ``on_link``, at the end that sends: seconds until the link has carried it; a message of more than a socket
    takes (``SOCKET_BYTES``) is polled for until then.
    """
    seconds = values * per_value + nbytes * per_byte + (1 + _POLLS * _POLL) * per_message
    if on_link is not None:
        seconds = seconds + (nbytes > SOCKET_BYTES) * (on_link / SENDING_SECONDS * _POLL * per_message)
    return seconds
