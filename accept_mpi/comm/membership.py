"""The communicators of a run, and their repair when ranks are lost (ULFM: Bland et al. 2013).

When a process is lost, some requests of other ranks fail and some never complete. So the first rank that notices revokes
all communicators of the circle, which interrupts everyone. Then the survivors shrink it to a new circle, and agree that all
of them have it.
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
    """True if this MPI reports lost processes instead of ending the job: Open MPI with ``mpirun --with-ft ulfm``."""
    return hasattr(MPI.Comm, "Shrink") and os.environ.get(_ENABLED, "0") not in ("0", "false")


class Circle(NamedTuple):
    """Communicators of the same ranks in the same order."""

    world: MPI.Intracomm
    control: MPI.Intracomm
    """Communicator of the messenger."""
    data: MPI.Intracomm
    """Communicator of the data plane."""

    @staticmethod
    def of(world: MPI.Intracomm) -> "Circle":
        """A circle of all ranks of ``world``, which call this together."""
        return Circle(world, world.Dup(), world.Dup())

    def revoke(self) -> None:
        """Make all pending requests of all ranks on these communicators fail. Any rank may call this."""
        for comm in self:
            with contextlib.suppress(MPI.Exception):
                comm.Revoke()

    def survivors(self) -> "Circle":
        """A circle of the surviving ranks, in the same order; all of them call this together."""
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
    """Wait until all ranks have called this. Returns True, or, on all ranks alike, False if one was lost instead, or one
    has called ``stay``.

    ``meanwhile`` is called repeatedly while waiting; it receives the messages that others must send before they get here.
    """
    return _all_agree(world, True, meanwhile)


def stay(world: MPI.Intracomm) -> None:
    """Before ranks shrink ``world``: have those that wait in ``leave_together`` hear of the loss, which only this rank may
    know of. Each rank calls one of the two once, since collective calls must match: else a shrinking rank's agreement
    would be taken for a leaving one's."""
    _all_agree(world, False, lambda: None)


def _all_agree(world: MPI.Intracomm, fine: bool, meanwhile: Callable[[], object]) -> bool:
    """True if all ranks are alive and passed ``fine``; the answer is the same on all of them."""
    flag = np.array([int(fine)], np.intc)
    try:
        request = world.Iagree(flag)
        while not request.Test():
            with contextlib.suppress(MPI.Exception):  # after a loss the request reports it
                meanwhile()
            time.sleep(_POLL)
    except MPI.Exception:
        return False
    return bool(flag[0])
