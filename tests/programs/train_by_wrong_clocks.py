"""``train`` on ranks whose clocks were all compared wrongly at the start, by seconds, and are compared again ten times a
second."""

import sys
from typing import Any

from mpi4py import MPI

from accept_mpi.cli import main
from accept_mpi.comm import runtime
from accept_mpi.comm.clock_check import ClockCheck

compared = runtime.clock_offset


def wrong(*args: Any) -> float:
    rank = MPI.COMM_WORLD.rank
    return compared(*args) + (-1) ** rank * 7.0 * (rank > 0)


runtime.clock_offset, ClockCheck.every_seconds = wrong, 0.1
sys.exit(main(["train", *sys.argv[1:]]))
