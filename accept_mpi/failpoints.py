"""Deaths on demand, for tests: ``ACCEPT_MPI_FAULTS="2@backward:17 0@move"`` kills rank 2 (as it was when the job began) at
its 17th backward and rank 0 when it first hands over layers. Without the variable a point costs next to nothing.
"""

import os
import signal
from collections import Counter

VARIABLE = "ACCEPT_MPI_FAULTS"
POINTS = ("plan", "forward", "backward", "update", "evaluate", "snapshot", "checkpoint", "regroup", "move", "build", "end")
"""Planning before the first term; the actions of training; a micro-batch of an evaluation; copying the state; and, after a
loss: finding together, handing over layers, building the stage (also in the first term). ``end``: all steps are made."""


def _planned() -> dict[str, int]:
    """Point -> at which time this process dies there."""
    rank, planned = os.environ.get("OMPI_COMM_WORLD_RANK", "0"), {}
    for word in os.environ.get(VARIABLE, "").split():
        who, _, where = word.partition("@")
        point, _, time = where.partition(":")
        if who == rank:
            planned[point] = int(time or 1)
    return planned


_PLANNED = _planned()
_SEEN: Counter[str] = Counter()


def failpoint(point: str) -> None:
    """This process comes by a point."""
    if point in _PLANNED:
        _SEEN[point] += 1
        if _SEEN[point] == _PLANNED[point]:
            os.kill(os.getpid(), signal.SIGKILL)
