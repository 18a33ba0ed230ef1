"""A session's program: accept_mpi itself. A point has ``job`` (path), ``set`` (overrides) and ``skip`` (first steps that do
not count)."""

from pathlib import Path

import numpy as np

from accept_mpi import config
from accept_mpi.comm.runtime import Runtime
from accept_mpi.log import open_log
from accept_mpi.run import Options, train
from harness.session import points


def main() -> None:
    runtime = Runtime()
    try:
        for point, answer in points():
            overrides = tuple(point["set"])
            train(runtime, Options(Path(point["job"]), overrides, quiet=True))
            job = config.parse(Path(point["job"]).read_text(), point["job"], overrides)
            answer(measured(job, point["skip"]) if runtime.rank == 0 else {})
    except BaseException as error:
        runtime.fail(error)
    runtime.finish(0)


def measured(job: config.Job, skip: int) -> dict[str, object]:
    """samples/s over all steps but the first ``skip``, evaluations as (seconds, accuracy), and the codecs of the plan."""
    with open_log(Path(job.output.directory) / "log.h5") as log:
        ends, samples, evals = log["steps"]["end"], log["steps"]["samples"], log["evals"][:]
        began = float(log["trace"]["start"].min())
        plan = log.attrs["plan"]
    rate = float(np.sum(samples[skip:]) / (ends[-1] - ends[skip - 1]))
    times = [[float(row["end"]) - began, float(row["accuracy"])] for row in evals]
    return {"samples_per_s": rate, "evals": times, "plan": plan, "log": str(Path(job.output.directory) / "log.h5")}


main()
