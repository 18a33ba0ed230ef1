"""A session's program: accept_mpi itself. A point has ``job`` (path), ``set`` (overrides) and ``skip`` (numbers of first and
last steps that do not count; None: only the plan is wanted)."""

from pathlib import Path

import numpy as np

from accept_mpi.comm.runtime import Runtime
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.logs.reader import open_log, read_facts
from accept_mpi.logs.timeline import between, rank_use
from accept_mpi.plan import Plan
from accept_mpi.planning.estimate import replayed
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.training.run import train
from accept_mpi.training.start import Options
from harness.session import points


def main() -> None:
    runtime = Runtime.start()
    try:
        for point, answer in points():
            overrides = tuple(point["set"])
            train(runtime, Options(Path(point["job"]), overrides, quiet=True))
            job = parse(Path(point["job"]).read_text(), point["job"], overrides)
            answer(measured(job, point["skip"], point.get("survey")) if runtime.rank == 0 else {})
    except BaseException as error:
        runtime.fail(error)
    runtime.finish(0)


def measured(job: Job, skip: list[int] | None, planned: str | None) -> dict[str, object]:
    """The result of a finished run, without its ``skip`` first and last steps.

    It has samples/s (of the slowest stage: others may be catching up), the share of that time in which each stage computed
    (``stages_busy``), the busiest one's (``busy``) and the mean over all hosts (``used``), evaluations as (seconds,
    accuracy), plan and log. With ``planned``, the log of the run that found the cuts, also the step time that this forecast
    and the simulator's for this trace.
    """
    file = Path(job.output.directory) / "log.h5"
    with open_log(file) as log:
        if skip is None:
            count = Job.from_json(log.attrs["job"]).train.micro_batches  # decided, if the job says "auto"
            return {"samples_per_s": 0.0, "plan": log.attrs["plan"], "log": str(file), "micro_batches": count}
        numbers, samples, evals = log["steps"]["step"], log["steps"]["samples"], log["evals"][:]
        began = float(log["trace"]["start"].min())
        plan, hosts = log.attrs["plan"], read_facts(log)["hosts"]
        trace = log["trace"][:]
    first, last = skip[0], len(numbers) - skip[1]
    start, end = between(trace, int(numbers[first - 1]), int(numbers[last - 1]))
    busy = [use.busy / (end - start) for use in rank_use(trace, start, end)]
    rate = float(np.sum(samples[first:last]) / (end - start))
    times = [[float(row["end"]) - began, float(row["accuracy"])] for row in evals]
    found = {
        "samples_per_s": rate,
        "busy": max(busy),
        "used": sum(busy) / len(hosts),
        "stages_busy": busy,
        "evals": times,
        "plan": plan,
        "log": str(file),
    }
    if planned:
        with open_log(Path(planned)) as log:
            if "survey" not in log:  # of one rank, which measures lanes alone
                return found
            cluster, facts = ClusterProfile.read(log["survey"]), read_facts(log)
        again = replayed(cluster, job, Plan.from_json(plan), trace)
        found |= {"forecast_s": facts["forecast_step_s"], "replayed": list(again)}
    return found


main()
