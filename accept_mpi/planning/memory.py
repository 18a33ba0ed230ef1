"""Bytes that a stage needs, by its place in the pipeline."""

import numpy as np

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job, most_held
from accept_mpi.pipeline.schedule import depth
from accept_mpi.plan import Plan
from accept_mpi.profiling.cluster_profile import Survey
from accept_mpi.profiling.outline import LayerOutline

_OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}


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
