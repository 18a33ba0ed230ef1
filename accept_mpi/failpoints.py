"""Kill a rank at a chosen point, for tests.

``ACCEPT_MPI_FAULTS="2@backward:17 0@move"`` kills rank 2 at its 17th backward and rank 0 when it first hands over layers.
Ranks are numbered as at the start of the job. Without the variable, a failpoint costs next to nothing.
"""

import os
import signal
from collections import Counter

VARIABLE = "ACCEPT_MPI_FAULTS"
POINTS = ("plan", "forward", "backward", "update", "evaluate", "snapshot", "checkpoint", "regroup", "move", "build", "end")
"""``plan``: planning before the first deployment. ``forward``, ``backward``, ``update``: the actions of training.
``evaluate``: a micro-batch of an evaluation. ``snapshot``, ``checkpoint``: copying the state. ``regroup`` and ``move``:
regrouping and handing over layers after a loss. ``build``: building the stage, also in the first deployment. ``end``: all
steps are made."""


def _planned() -> dict[str, int]:
    """Map each point at which this process is to die to the visit, counted from 1, at which it dies there."""
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
    """Count a visit of ``point``, and kill this process if the visit is the one that ``ACCEPT_MPI_FAULTS`` names."""
    if point in _PLANNED:
        _SEEN[point] += 1
        if _SEEN[point] == _PLANNED[point]:
            os.kill(os.getpid(), signal.SIGKILL)
