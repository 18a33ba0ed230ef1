"""Seconds of the whole of planning (search, groups, simulations, codecs) for 200 layers on eight devices on paper.

PYTHONPATH=. python jobs/experiments/partition/planning_seconds.py
"""

import itertools
import time

import numpy as np
import torch
from accept_mpi.kernels.cache import compiled
from torch import nn

from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import as_chain
from accept_mpi.planning.codec_choice import codings_of
from accept_mpi.planning.planner import plan_for, planning_kernels
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.outline import outline

LAYERS, WIDTH, SAMPLES, RATE, LATENCY = 200, 64, 4, 12.5e6, 1e-4
FLEETS = {"8 unlike": np.geomspace(1, 4, 8), "4 and 4 x 3 slower": np.repeat([1.0, 3.0], 4)}
GROUPS = {"none": "groups = false", "exact sums": "", "any sums": 'gradients = "auto"'}
CODING = {"none": 0.1, "bf16": 0.3, "uniform:8": 0.5, "uniform:6": 0.7, "uniform:4": 0.5, "uniform:3": 0.8, "mbq:1": 1.5}
JOB = """
data.name = "d"
model.name = "m"
output.directory = "r"
[train]
steps = 1
batch_size = {samples}
micro_batches = {micro_batches}
[pipeline]
schedule = "{schedule}"
forward = "auto"
backward = "auto"
{groups}
"""


def cluster(job: Job, speeds: np.ndarray) -> ClusterProfile:
    """Devices so many times slower than 1 ms forward and 2 back for each of some uneven layers."""
    seconds = 1e-3 * np.random.default_rng(1).uniform(0.5, 1.5, LAYERS)
    devices = [
        DeviceProfile(
            host=f"edge{n}", forward=[*(speed * seconds)], backward=[*(2 * speed * seconds)],
            weight_gradient=[*(speed * seconds)], update=[1e-5] * LAYERS, shared=True, memory=1e9,
            encode={name: 1e-9 * speed * CODING.get(name, 0.6) for name in codings_of(job)},
            decode={name: 8e-10 * speed * CODING.get(name, 0.6) for name in codings_of(job)},
            seconds_per_byte=1e-10, seconds_per_message=5e-5,
        )
        for n, speed in enumerate(speeds)
    ]  # fmt: skip
    model = outline(as_chain([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]), 0, (torch.zeros(SAMPLES, WIDTH),))
    return ClusterProfile(model, devices, [[RATE] * len(speeds)] * len(speeds), [[LATENCY] * len(speeds)] * len(speeds))


def main() -> None:
    """Print the table."""
    for name in planning_kernels(8):
        compiled(name)
    print(f"{'devices':<20}{'schedule':<13}{'micro-batches':>13}  {'groups':<12}{'CPU seconds':>11}{'step [ms]':>11}")
    schedules = (("1f1b", 32), ("1f1b", 8), ("zero-bubble", 32), ("1f1b-async", 32))
    for (fleet, speeds), (schedule, count), (how, groups) in itertools.product(FLEETS.items(), schedules, GROUPS.items()):
        job = parse(JOB.format(samples=SAMPLES * count, micro_batches=count, schedule=schedule, groups=groups), "job")
        known, began = cluster(job, speeds), time.process_time()
        found = plan_for(known, job)
        took = time.process_time() - began
        print(f"{fleet:<20}{schedule:<13}{count:>13}  {how:<12}{took:>11.2f}{1e3 * found.step:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
