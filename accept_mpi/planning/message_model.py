"""What crosses a boundary, and what it takes of the computing core if the data plane has no core of its own.

The partitioner uses this model, the only one, for every boundary that a plan could have (``formulation``), forecasts use it
for those that a plan has (``forecast``). Both get the same seconds for the same message on the same link.

A poll costs a share of a message's fixed cost. The share and the number of polls are from the CPU time of data-plane threads
and their numbers of polls and messages: a poll takes 0.04 ms, a message 0.36 ms besides coding, where the measurement before
a run says 0.4 (comm/README.md).
"""

from typing import TypeVar

import msgspec
import numpy as np

from accept_mpi.codecs.coding import bits_of
from accept_mpi.polling import SENDING_SECONDS, SOCKET_BYTES
from accept_mpi.profiling.outline import Sizes

N = TypeVar("N", float, np.ndarray)

_POLL = 0.1
"""Cost of one poll, as a share of a message's fixed cost."""
_POLLS = 4.0
"""Polls per message of any size: the thread that hands it over or waits for it wakes the data plane, which later polls
again to find it done."""


class Traffic(msgspec.Struct, frozen=True):
    """The messages of one boundary in one direction, and the link that carries them."""

    values: int
    """Number of values per micro-batch that a codec can code."""
    other_bytes: int
    """Further bytes per message, header included."""
    rate: float
    """Bytes/s from one end to the other, with both directions busy."""
    latency: float = 0.0
    """Seconds that a short message takes."""
    uncoded: int | None = None
    """Bytes of the values without a codec; None: four each."""

    @staticmethod
    def of(sizes: Sizes, rate: float, latency: float = 0.0) -> "Traffic":
        """Messages of these sizes."""
        return Traffic(sizes.values, sizes.other, rate, latency, sizes.uncoded)

    def nbytes(self, name: str) -> float:
        """Bytes of a message with codec ``name``."""
        if name == "none" and self.uncoded is not None:
            return self.uncoded + self.other_bytes
        return self.values * bits_of(name) / 8 + self.other_bytes


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
