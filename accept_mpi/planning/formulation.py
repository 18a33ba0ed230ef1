"""From what devices have measured to the partitioner's problem: what layers, messages and codecs cost where; what fits."""

from collections.abc import Sequence

import numpy as np

from accept_mpi.codecs.coding import Coding, parse
from accept_mpi.data.calendar import per_step
from accept_mpi.errors import UserError
from accept_mpi.job import Job, Pipeline
from accept_mpi.models.shared import uncuttable
from accept_mpi.pipeline.schedule import depth
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import AUTO, ladder
from accept_mpi.planning.forecast import bits_of
from accept_mpi.planning.search import Problem
from accept_mpi.polling import per_message, while_sending
from accept_mpi.profiling.cluster_profile import Device, Survey
from accept_mpi.profiling.outline import LayerOutline
from accept_mpi.recovery.replicas import most_held

NEVER = 1e9
"""Seconds of a layer that a device must not get."""
_MOST_RUNS = 1e7  # of layers on devices, that have a cost of their own
_FILL = {"1f1b-async": 0.0, "1f1b": 1.0, "gpipe": 1.0, "zero-bubble": 1 / 3}  # ZB-H1: Qi et al. 2023, section 2.2
_OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}


def micro_batches_of(job: Job) -> int:
    """Of a whole batch."""
    return per_step(job.train.batch_size, job.train.micro_batches)


def problem_of(survey: Survey, job: Job, share: float = 1.0) -> tuple[Problem, list[str]]:
    """The partitioner's problem, and the names of its codecs. Links carry ``share`` of what they were measured to."""
    outline, devices = survey.outline, survey.devices
    count, layers = len(devices), len(outline.layers)
    seconds = np.array([np.add(d.forward, d.backward) + np.array(d.update) / micro_batches_of(job) for d in devices])
    for n, device in enumerate(devices):
        if device.shared:  # two messages a micro-batch less for a stage at an end (``_messages``)
            ends = seconds[n, [0, -1]]
            seconds[n, [0, -1]] = np.maximum(ends / 10, ends - 2 * per_message(device.message))
        if not device.data:
            seconds[n, [0, -1]] = NEVER
    crossings = [outline.crossing(layer) for layer in range(layers)] + [(0, 0)]
    names, pairs = _codecs(job.pipeline)
    nics = share * np.array([min(survey.nic(n), 1e15) for n in range(count)])
    rate = np.array(survey.rate, float)
    np.fill_diagonal(rate, 1e15)
    needs = Needs(survey, job, count)
    return Problem(
        layer_seconds=seconds,
        extra_seconds=_messages(devices, layers),
        values=np.array([values for values, _ in crossings], float),
        other=np.array([other for _, other in crossings], float),
        rate=share * np.minimum(rate, 1e15),
        nic=nics,
        codecs=tuple(names),
        bits=np.array([max(map(bits_of, pair)) / 8 for pair in pairs]),
        coding=np.array([[_handling(d, float(nic), *pair) for pair in pairs] for d, nic in zip(devices, nics, strict=True)]),
        state=np.array([needs.state(layer) for layer in outline.layers]),
        held=np.array([float(layer.held) for layer in outline.layers]),
        uncuttable=uncuttable(outline.shared, layers),
        capacity=np.array([device.memory for device in devices], float),
        kept=needs.kept,
        copies=needs.copies,
        micro_batches=float(micro_batches_of(job)) if job.pipeline.schedule != "1f1b-async" else 1e9,
        fill=_FILL[job.pipeline.schedule],
    ), names


def codings_of(job: Job) -> dict[str, Coding]:
    """All codecs that a plan for this job may use, by name."""
    _, pairs = _codecs(job.pipeline)
    return {name: parse(name, False) for pair in pairs for name in pair} | {"none": Coding()}


def _messages(devices: Sequence[Device], layers: int) -> np.ndarray | None:
    """(devices, layers + 1, layers + 1): seconds that the four messages of a stage between two others take from its device's
    computing core each micro-batch. None where none do, or runs of layers are too many to list."""
    each = np.array([4 * per_message(device.message) if device.shared else 0.0 for device in devices])
    if not each.any() or len(devices) * (layers + 1) ** 2 >= _MOST_RUNS:
        return None
    return each[:, None, None] * np.triu(np.ones((layers + 1, layers + 1)), 1)


def _codecs(pipeline: Pipeline) -> tuple[list[str], list[tuple[str, str]]]:
    """What the partitioner chooses from for each boundary: names, and (forward, backward) of each."""
    if not isinstance(pipeline.forward, str) or not isinstance(pipeline.backward, str):
        raise UserError('pipeline.forward and backward: a list has one codec a boundary, which cuts = "auto" may change')
    options = list(ladder(pipeline.min_bits))
    forward, backward = (options if name == AUTO else [name] for name in (pipeline.forward, pipeline.backward))
    length = max(len(forward), len(backward))
    pairs = [(forward[min(k, len(forward) - 1)], backward[min(k, len(backward) - 1)]) for k in range(length)]
    return ["/".join(dict.fromkeys(pair)) for pair in pairs], pairs


def _handling(device: Device, nic: float, forward: str, backward: str) -> float:
    """Seconds that a boundary takes from a device's computing core for each value: one message out, another in. Each
    counts as one that must be looked after while it is sent; where it need not be, it is small, and that costs little."""
    if not device.shared:
        return 0.0
    coding = sum(costs[name] for costs in (device.encode, device.decode) for name in (forward, backward)) / 2
    nbytes = (bits_of(forward) + bits_of(backward)) / 8  # in and out
    return coding + nbytes * device.byte + while_sending(nbytes / 2 / nic, device.message)


def memory_of(survey: Survey, job: Job, plan: Plan) -> list[float]:
    """Bytes that each stage takes by what a plan rests on."""
    needs = Needs(survey, job, len(plan.stages))
    rows = []
    for s, stage in enumerate(plan.stages):
        layers = survey.outline.layers[stage.start : stage.stop]
        behind = len(plan.stages) - 1 - s
        state = sum(needs.state(layer) for layer in layers)
        values, other = survey.outline.crossing(stage.start) if s else (0, 0)
        held = sum(layer.held for layer in layers) + 4 * values + other
        rows.append(float(needs.copies[behind] * state + needs.kept[behind] * held))
    return rows


class Needs:
    """Memory of a stage, by how many stages are behind it."""

    def __init__(self, survey: Survey, job: Job, stages: int) -> None:
        kind, slack = job.pipeline.schedule, job.pipeline.transfer_slack
        self._optimizer = _OPTIMIZER_COPIES[job.train.optimizer.name]
        if job.train.optimizer.name == "sgd" and not job.train.optimizer.momentum:
            self._optimizer = 0
        many = 1 << 20 if kind == "1f1b-async" else micro_batches_of(job)
        # A stage with so many behind it is the first of a pipeline of one more; zero-bubble holds most in the longest.
        self.kept = np.array(
            [depth(kind, stages - 1 - behind, stages, many, slack) if kind == "zero-bubble"
             else depth(kind, 0, behind + 1, many, slack) for behind in range(stages)], float
        )  # fmt: skip
        weights = np.ones(stages)
        if kind == "1f1b-async":  # the optimizer's own, and a version for every update that happens while one is in flight
            versions = np.full(stages, self.kept.max()) if job.pipeline.vertical_sync else self.kept
            weights = 2 + np.ceil(versions / micro_batches_of(job))
        whole = 2 + self._optimizer
        snapshots = most_held(job.recovery.replicate_every) * (1 + self._optimizer) if survey.snapshots else 0
        self.copies = (weights + 1 + self._optimizer + snapshots) / whole

    def state(self, layer: LayerOutline) -> float:
        """Bytes of a layer's weights, gradients and optimizer, one version. What is frozen has weights alone."""
        trained = layer.parameter_bytes - layer.frozen_bytes
        return (2 + self._optimizer) * trained + layer.frozen_bytes + layer.buffer_bytes
