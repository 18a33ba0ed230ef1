"""Run under mpirun: train a job, in which the first piece of a checkpoint takes so many seconds to arrive."""

import sys
import time
from pathlib import Path

from accept_mpi.comm.messenger import Sending
from accept_mpi.comm.runtime import Runtime
from accept_mpi.training.run import train
from accept_mpi.training.start import Options

seconds = float(sys.argv[2])
plain_look = Sending.look
slow: list[Sending] = []


def look(sending: Sending) -> bool:
    if not slow and b"CheckpointChunk" in sending._data[:64]:
        slow.append(sending)
    if sending in slow and time.monotonic() - sending._began < seconds:
        return False
    return plain_look(sending)


Sending.look = look  # type: ignore[method-assign]
runtime = Runtime.start()
try:
    train(runtime, Options(Path(sys.argv[1]), quiet=True))
except BaseException as error:
    runtime.fail(error)
runtime.finish(0)
