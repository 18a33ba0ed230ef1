"""``train_all.py``, in which some pieces of a checkpoint take their time to arrive: the last arguments are how many seconds
each, and how many of each rank's first pieces. Ranks from the third on are not slow."""

import os
import runpy
import sys
import time
from pathlib import Path

from accept_mpi.comm.messenger import Sending

pieces, seconds = int(sys.argv.pop()), float(sys.argv.pop())
plain_look = Sending.look
slow: list[Sending] = []


def look(sending: Sending) -> bool:
    if sending not in slow and len(slow) < pieces and b"CheckpointChunk" in sending._data[:64]:
        slow.append(sending)
    if sending in slow and time.monotonic() - sending._began < seconds:
        return False
    return plain_look(sending)


if int(os.environ["OMPI_COMM_WORLD_RANK"]) < 2:
    Sending.look = look  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("train_all.py")))
