"""Run under mpirun, one rank: train a job on images; write the bytes that the plan foresees and those that were taken since
the stage was built (a JSON list) into a file."""

import json
import re
import sys
from pathlib import Path

import torch

from accept_mpi.comm.runtime import Runtime
from accept_mpi.job_file import parse
from accept_mpi.logs.reader import open_log
from accept_mpi.models import load
from accept_mpi.plan import Plan
from accept_mpi.planning.memory import memory_of
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.profiling.outline import outline_of
from accept_mpi.training.deployment import Deployment
from accept_mpi.training.run import train
from accept_mpi.training.start import Options


def resident(what: str) -> int:
    """Bytes of memory that this process has now ("VmRSS"), or has had at most so far ("VmHWM")."""
    found = re.search(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def measured(path: Path, out: Path) -> None:
    befores, start = [], Deployment.start

    def noted(*args: object) -> Deployment:
        deployment = start(*args)  # type: ignore[arg-type]
        befores.append(resident("VmRSS"))  # kernels are compiled and the data loaded, the stage is not built
        return deployment

    Deployment.start = noted  # type: ignore[method-assign,assignment]
    train(runtime, Options(path, quiet=True))
    taken = resident("VmHWM") - befores[0]
    job = parse(path.read_text(), str(path))
    images = torch.randn(job.train.batch_size // int(job.train.micro_batches), 3, 32, 32)
    outline = outline_of(load(job.model.name, job.model.args, 0), job, (images,))
    with open_log(path.parent / job.output.directory / "log.h5") as log:
        plan = Plan.from_json(log.attrs["plan"])
    (foreseen,) = memory_of(ClusterProfile(outline, [], [], []), job, plan)
    out.write_text(json.dumps([foreseen, taken]))


runtime = Runtime.start()
try:
    measured(Path(sys.argv[1]), Path(sys.argv[2]))
except BaseException as error:
    runtime.fail(error)
runtime.finish(0)
