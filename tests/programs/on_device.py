"""Run under mpirun: ``train`` a job with a device for each rank, given as in "cuda,cpu"."""

import os
import sys
from pathlib import Path

from accept_mpi.comm.runtime import Runtime
from accept_mpi.training.run import train
from accept_mpi.training.start import Options

runtime = Runtime.start()
try:
    os.environ["ACCEPT_MPI_DEVICE"] = sys.argv[1].split(",")[runtime.rank]
    train(runtime, Options(Path(sys.argv[2]), quiet=True))
except BaseException as error:
    runtime.fail(error)
runtime.finish(0)
