"""A session's program that times sub-models on every host, each host alone, for the latency predictor's data.

A point has ``job``, ``set`` (overrides) and ``count``, the number of sub-models in addition to the ten that cover the model.
Sub-models are the same on every host. The answer has ``probes`` and ``intervals``, each as (first layer, last + 1, seconds
forward, seconds backward); ``passes``, the seconds of each interval in the even visits and in the odd ones; and ``layers``,
(forward, backward) seconds of each, from the probes.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accept_mpi.data import load as load_data
from accept_mpi.device.allocator import keep_memory
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import load as load_model
from accept_mpi.models.losses import find_loss
from accept_mpi.profiling.layer_timer import micro_batch, random_inputs
from accept_mpi.profiling.layer_times import pieces
from accept_mpi.profiling.outline import outline_of
from accept_mpi.profiling.timed_piece import TimedPiece, stretch_of
from harness.session import points

_VISITS = 10


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_memory()
    for point, answer in points():
        job = parse(Path(point["job"]).read_text(), point["job"], point["set"])
        answer(measured(job, point["count"]) | {"samples_per_s": 0.0})


def measured(job: Job, count: int) -> dict[str, Any]:
    """Time all sub-models in turn, many times, so that a temporary disturbance affects all of them alike."""
    chain, loss = load_model(job.model.name, job.model.args, job.train.seed), find_loss(job.train.loss)
    inputs, target, *_ = micro_batch(load_data(job.data.name, job.data.args)[0], job)
    model = outline_of(chain, job, inputs)
    last = len(model.layers)
    asked = [("probes", run) for run in pieces(model)] + [("intervals", run) for run in sub_models(last, count)]
    built = [TimedPiece(chain, model, job, start, stop, loss if stop == last else None) for _, (start, stop) in asked]
    for piece in built:
        piece.begin(inputs if piece.start == 0 else random_inputs(model, piece.start), target)
    rows: list[list[np.ndarray]] = [[] for _ in built]
    wall = cpu = 0.0
    generator = np.random.default_rng(7)
    for visit in range(-1, _VISITS):
        for at in generator.permutation(len(built)):
            built[at].round()  # warm-up, since the other sub-models have filled the caches
            timed = built[at].lap()
            if visit >= 0:
                rows[at].append(timed.layers)
                wall, cpu = wall + timed.wall, cpu + timed.cpu
    found: dict[str, Any] = {"probes": [], "intervals": [], "passes": [], "layers": [[0.0, 0.0]] * last}
    stretch = stretch_of(wall, cpu)
    for (kind, (start, stop)), visits in zip(asked, rows, strict=True):
        times = stretch * np.median(visits, axis=0)
        found[kind].append([start, stop, *times.sum(axis=1).tolist()])
        if kind == "intervals":
            found["passes"].append([stretch * float(np.median(half, axis=0).sum()) for half in (visits[::2], visits[1::2])])
        else:
            found["layers"][start:stop] = times.T.tolist()
    return found


def sub_models(layers: int, count: int) -> list[tuple[int, int]]:
    """``count`` different ranges (first layer, last + 1): the whole model, and others of all lengths."""
    generator = np.random.default_rng(layers)
    runs = {(0, layers)}
    while len(runs) < min(count, layers * (layers + 1) // 2):
        length = int(np.exp(generator.uniform(0, np.log(layers))).round())
        start = int(generator.integers(0, layers - length + 1))
        runs.add((start, start + length))
    return sorted(runs)


if __name__ == "__main__":
    main()
