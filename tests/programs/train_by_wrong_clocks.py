"""``train`` on ranks whose clocks were all compared wrongly at the start, by seconds, and are compared again ten times a
second."""

import sys

from mpi4py import MPI

from accept_mpi.cli import main
from accept_mpi.comm import runtime
from accept_mpi.comm.clock_check import ClockCheck
from accept_mpi.logs.recorder import Clock

RANK = MPI.COMM_WORLD.rank


def wrong(origin: float, offset: float) -> Clock:
    return Clock(origin, offset + 7.0 * (0, -1, 1)[RANK])


runtime.Clock, ClockCheck.every_seconds = wrong, 0.1  # type: ignore[assignment, misc]
sys.exit(main(["train", *sys.argv[1:]]))
