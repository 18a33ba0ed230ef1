"""``train_all.py``, in which the first piece of a checkpoint takes so many seconds (the last argument) to arrive."""

import runpy
import sys
import time
from pathlib import Path

from accept_mpi.comm.messenger import Sending

seconds = float(sys.argv.pop())
plain_look = Sending.look
slow: list[Sending] = []


def look(sending: Sending) -> bool:
    if not slow and b"CheckpointChunk" in sending._data[:64]:
        slow.append(sending)
    if sending in slow and time.monotonic() - sending._began < seconds:
        return False
    return plain_look(sending)


Sending.look = look  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("train_all.py")))
