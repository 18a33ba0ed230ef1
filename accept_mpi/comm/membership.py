"""Who works together: a run's communicators, and what is left of them when ranks are lost (ULFM: Bland et al. 2013).

When a process is lost, some of what others wait for fails and some never ends. So whoever notices first revokes all
communicators of the circle, which interrupts everyone; then the survivors shrink it to a new circle, and agree that all of
them have it.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # mpirun sets it
_POLL = 0.001


def survivable() -> bool:
    """Whether this MPI tells of lost processes instead of ending the job: ``mpirun --with-ft ulfm`` of Open MPI."""
    return hasattr(MPI.Comm, "Shrink") and os.environ.get(_ENABLED, "0") not in ("0", "false")


class Circle(NamedTuple):
    """Communicators of the same ranks in the same order."""

    world: MPI.Intracomm
    control: MPI.Intracomm
    """For the messenger."""
    data: MPI.Intracomm
    """For the data plane."""

    @staticmethod
    def of(world: MPI.Intracomm) -> "Circle":
        """All ranks of ``world`` together."""
        return Circle(world, world.Dup(), world.Dup())

    def revoke(self) -> None:
        """Let all that anybody waits for here fail. Any thread, any rank."""
        for comm in self:
            with contextlib.suppress(MPI.Exception):
                comm.Revoke()

    def survivors(self) -> "Circle":
        """A circle of those who are left, in the same order; all of them call this together."""
        world = self.world
        while True:
            world = MPI.Intracomm(world.Shrink())
            circle = None
            try:
                circle = Circle.of(world)
            except MPI.Exception:
                world.Revoke()  # others may still wait for this rank
            if _all_agree(world, circle is not None, lambda: None) and circle is not None:
                return circle


def leave_together(world: MPI.Intracomm, meanwhile: Callable[[], object]) -> bool:
    """Whether all ranks have come here. False on all of them alike where one was lost instead. ``meanwhile``: called again
    and again, takes what others still have to send before they come."""
    return _all_agree(world, True, meanwhile)


def _all_agree(world: MPI.Intracomm, fine: bool, meanwhile: Callable[[], object]) -> bool:
    """The same answer everywhere: whether all ranks live and say so."""
    flag = np.array([int(fine)], np.intc)
    try:
        request = world.Iagree(flag)
        while not request.Test():
            with contextlib.suppress(MPI.Exception):  # a loss: the others will not come, which the request tells
                meanwhile()
            time.sleep(_POLL)
    except MPI.Exception:
        return False
    return bool(flag[0])
