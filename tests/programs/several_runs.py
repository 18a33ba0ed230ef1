"""Run under mpirun: several runs one after another in one MPI session, as command lines in JSON: [job, overrides, resume].
A mistake that all ranks know of is printed, and the next run begins."""

import json
import sys
from pathlib import Path

from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import Agreed
from accept_mpi.training.run import train
from accept_mpi.training.start import Options

runtime = Runtime.start()
try:
    for job, overrides, resume in json.loads(sys.argv[1]):
        if runtime.rank == 0:
            print(f"== {overrides}", flush=True)
        try:
            train(runtime, Options(Path(job), tuple(overrides), Path(resume) if resume else None, quiet=True))
        except Agreed as mistake:
            if runtime.rank == 0:
                print(f"accept_mpi: {mistake}", flush=True)
except BaseException as error:
    runtime.fail(error)
runtime.finish(0)
