"""Run under mpirun: train several jobs one after another in one MPI session (starting ranks takes longer than training)."""

import sys
from pathlib import Path

from accept_mpi.comm.runtime import Runtime
from accept_mpi.training.run import train
from accept_mpi.training.start import Options

runtime = Runtime.start()
try:
    for job in sys.argv[1:]:
        train(runtime, Options(Path(job), quiet=True))
except BaseException as error:
    runtime.fail(error)
runtime.finish(0)
