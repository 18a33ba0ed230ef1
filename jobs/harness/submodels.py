"""A session's program: times of sub-models on every host, each host by itself, for the latency predictor's data.

A point has ``job``, ``set`` (overrides) and ``count``: how many sub-models besides the ten that cover the model. They are
the same on every host. The answer holds runs of layers as (first, last + 1, seconds forward, backward): ``probes`` and
``intervals``; and ``layers``, (forward, backward) of each, from the probes.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accept_mpi import config
from accept_mpi.data import load as load_data
from accept_mpi.device import keep_memory
from accept_mpi.models import load as load_model
from accept_mpi.outline import outline_of
from accept_mpi.probe import Piece, micro_batch, pieces, random_inputs
from accept_mpi.stage import find_loss
from harness.session import points

_SECONDS = 0.2  # of each sub-model; a slow host takes longer: a few rounds at least


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    keep_memory()
    for point, answer in points():
        job = config.parse(Path(point["job"]).read_text(), point["job"], point["set"])
        answer(measured(job, point["count"]) | {"samples_per_s": 0.0})


def measured(job: config.Job, count: int) -> dict[str, Any]:
    """All sub-models, in a random order, so that what disturbs for a while disturbs all alike."""
    chain, loss = load_model(job.model.name, job.model.args, job.train.seed), find_loss(job.train.loss)
    inputs, target = micro_batch(load_data(job.data.name, job.data.args)[0], job)
    model = outline_of(chain, job, inputs)
    last = len(model.layers)
    cover = pieces(model)
    asked = [("probes", run) for run in cover] + [("intervals", run) for run in sub_models(last, count)]
    found: dict[str, Any] = {"probes": [], "intervals": [], "layers": [[0.0, 0.0]] * last}
    for at in np.random.default_rng(7).permutation(len(asked)):
        kind, (start, stop) = asked[at]
        piece = Piece(chain, model, job, start, stop, loss if stop == last else None)
        given = inputs if start == 0 else random_inputs(model, start)
        rows, _, (forward, backward) = piece.measure(given, target, _SECONDS)
        found[kind].append([start, stop, forward, backward])
        if kind == "probes":
            found["layers"][start:stop] = rows[:2].T.tolist()
    for kind in ("probes", "intervals"):
        found[kind].sort()
    return found


def sub_models(layers: int, count: int) -> list[tuple[int, int]]:
    """``count`` different runs of layers: the whole model, and others of all lengths."""
    generator = np.random.default_rng(layers)
    runs = {(0, layers)}
    while len(runs) < min(count, layers * (layers + 1) // 2):
        length = int(np.exp(generator.uniform(0, np.log(layers))).round())
        start = int(generator.integers(0, layers - length + 1))
        runs.add((start, start + length))
    return sorted(runs)


if __name__ == "__main__":
    main()
