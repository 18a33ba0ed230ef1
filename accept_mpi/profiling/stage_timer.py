"""Measures a rank's own stage before the first step: the seconds of its forward, its backward and its messages."""

import time

import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.tensors import BoundarySpecs, Tensors
from accept_mpi.data import Dataset, Samples, fetch
from accept_mpi.device.compute import here
from accept_mpi.device.cpu import computing_takes_all
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import trial_of
from accept_mpi.profiling.cluster_profile import StageTimes
from accept_mpi.profiling.message_costs import MessageCosts
from accept_mpi.profiling.timed_piece import stretch_of
from accept_mpi.tree import LONE, Tree


def time_stage(
    stage: Stage,
    size: int,
    behind: BoundarySpecs,
    ahead: BoundarySpecs,
    train: Dataset | None,
    costs: MessageCosts,
    cores: float,
    budget: float = 1.0,
) -> StageTimes:
    """Measure a stage for about ``budget`` seconds, longer than a CPU quota's period, without changing it.

    ``size``: samples per micro-batch. ``behind`` and ``ahead``: specs of the boundaries, empty at the ends of the pipeline.
    ``train``: needed by the first and the last stage. ``costs``: CPU seconds of messages on this device. ``cores``: number
    that this rank has. All ranks do this at the same time, because in training they share the same resources.
    """
    data = Samples(None, None)
    if train is not None:
        data = fetch(train, np.arange(size) % len(train), 0, inputs=not behind.forward, targets=not ahead.forward)
    clock = here().seconds
    times: list[tuple[float, float]] = []
    wall = 0.0
    until = time.perf_counter() + budget
    with trial_of(stage) as trial:
        while len(times) < 2 or time.perf_counter() < until:
            given = _given(stage, size, behind, data)
            halfway: list[float] = []

            def gradients(_: Tensors, of: Tree, halfway: list[float] = halfway) -> Tensors:
                zeros = tuple(spec.zeros() for spec in ahead.backward[size]) if ahead.forward else ()
                halfway.append(clock())
                return zeros

            began, cpu = time.perf_counter(), clock()
            trial.probe(given.tensors, data.targets, gradients, given.tree, size)
            times.append((halfway[0] - cpu, clock() - halfway[0]))
            wall += time.perf_counter() - began if len(times) > 1 else 0.0
    # CPU seconds of a fast round, since first rounds take memory from the kernel and last up to three times as long; then
    # stretched by the wall-clock time of all rounds, since the pauses that a CPU quota imposes are part of a rank's speed.
    forward, backward = (float(np.quantile(column, 0.25)) for column in zip(*times[1:], strict=True))
    stretch = stretch_of(wall, sum(map(sum, times[1:])))
    return StageTimes(
        forward=stretch * forward,
        backward=stretch * backward,
        encode={name: stretch * encode for name, (encode, _) in costs.codecs.items()},
        decode={name: stretch * decode for name, (_, decode) in costs.codecs.items()},
        seconds_per_byte=stretch * costs.seconds_per_byte,
        seconds_per_message=stretch * costs.seconds_per_message,
        shared=computing_takes_all(cores),
    )


def _given(stage: Stage, size: int, behind: BoundarySpecs, data: Samples) -> Inputs:
    """Inputs of the shapes that training has; new ones for each round, since a layer may work in place."""
    if behind.forward:
        return Inputs(behind.made_up(size), behind.trees.get(size, LONE))
    return stage.from_data(tree.replace(data.inputs, torch.clone))
