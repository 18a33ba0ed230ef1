"""Memory that a stage needs, which depends on its place in the pipeline."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import LOCAL_KEPT, Job, flows, most_held
from accept_mpi.pipeline.deal import Deal, widths
from accept_mpi.pipeline.optimizer import values_kept
from accept_mpi.pipeline.schedule import DELAY, max_in_flight, most_anywhere
from accept_mpi.plan import Lanes, Plan, at_once
from accept_mpi.planning.codec_choice import gradient_codec, sums_of
from accept_mpi.planning.ties import parted, trained_in
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.profiling.outline import LayerOutline

_SUMMING = 4
"""Copies of the gradients in the sum of a group, or of the stages with copies of a tied parameter: two contributions under
way, the part that is added up, and the sum."""
_LEFT_OUT = 2
"""The same of what coding leaves out of a group's sum: of the step that is summed, and from before (``comm.left_out``)."""
_SUMMED_HERE = 2
"""The same on a rank with lanes, beside those of each lane: the sums of two steps."""


def summed_in(lanes: Lanes) -> int:
    """Copies of the gradients on a rank with so many lanes, beside those that a rank without has."""
    return 0 if lanes == 1 else _SUMMED_HERE + at_once(lanes)


def memory_of(cluster: ClusterProfile, job: Job, plan: Plan) -> list[float]:
    """Bytes that each device of a plan needs (``Plan.holders``), including what it has received of the micro-batches in
    flight, and in a group, or with a copy of a tied parameter, what it needs to sum gradients."""
    wide = widths(plan.stages)
    needs = MemoryModel(cluster, job, len(wide), plan.slack, wide)
    ties = parted(cluster.outline.shared, plan) if job.parts_ties else []
    rows = []
    for s, stage in enumerate(plan.stages):
        layers = cluster.outline.layers[stage.start : stage.stop]
        behind = len(plan.stages) - 1 - s
        state, fixed, least = (sum(map(of, layers)) for of in (needs.state, needs.fixed, needs.least))
        saved, received = sum(layer.saved_bytes for layer in layers), cluster.outline.arriving(stage.start)
        copies, in_flight = needs.state_copies[behind], [needs.in_flight[behind]]
        if plan.hybrid or plan.laned:
            count = micro_batches_of(job)
            most = int(needs.in_flight[behind])
            table = Deal.of(stage).table(count) * (1 if not flows(job.pipeline.schedule) else 1 + -(-most // count))
            windows = [table[at : at + most] for at in range(max(1, min(count, len(table) - most + 1)))]
            in_flight = [max(window.count(m) for window in windows) for m in range(len(stage.ranks))]
            copies += needs.local_copies if plan.hybrid else 0.0
            fixed += needs.local_fixed * sum(layer.unchanged_bytes for layer in layers) if plan.hybrid else 0.0
        gradients = sum(trained_in(cluster.outline, stage.start, stage.stop))
        again = sum(layer.trained_bytes for layer in layers) - gradients  # copies have it under each of its names
        coded = len(stage.ranks) > 1 and gradient_codec(sums_of(job, plan)) != "none"
        summing = (_SUMMING if len(stage.ranks) > 1 else 0) + (_LEFT_OUT if coded else 0)
        copied = _SUMMING * sum(one.nbytes for one, stages in ties if s in stages) if not summing else 0
        for rank, flying in zip(stage.ranks, in_flight, strict=True):
            lanes = stage.lanes_of(rank)
            mine = summing + summed_in(lanes)
            whole = min(flying, at_once(lanes)) if stage.recompute else flying  # micro-batches whose activations are there
            training = copies * state - needs.live[behind] * again + fixed
            training += flying * received + whole * saved + mine * gradients + copied
            rows.append(float(max(training, least - needs.ends * again if rank == stage.leader else 0)))
    return rows


def memory_on(rank: int, cluster: ClusterProfile, job: Job, plan: Plan) -> float:
    """Bytes that the device of a ``rank`` that holds a stage needs."""
    return memory_of(cluster, job, plan)[[holder for _, holder in plan.holders].index(rank)]


class MemoryModel:
    """Memory of a stage, as a function of the number of stages behind it.

    ``slack``: ``Plan.slack``; ``wide``: ``deal.widths`` of the stages, by default 1 each. ``in_flight`` and ``state_copies``
    (stages,) are those of ``planning.problem.Problem``, by that number; ``state``, ``fixed`` and ``least`` are its bytes of
    a layer.
    """

    def __init__(self, cluster: ClusterProfile, job: Job, stages: int, slack: int, wide: Sequence[int] = ()) -> None:
        kind = job.pipeline.schedule
        self._optimizer = values_kept(job.train.optimizer) + (1 if job.train.ema else 0)
        many = most_anywhere(kind, micro_batches_of(job))
        # With zero-bubble a stage holds the more the longer the pipeline is, so the longest possible one counts.
        behind = range(stages)
        self.in_flight = np.array([max_in_flight(kind, stages - 1 - n, stages, many, slack, wide) for n in behind], float)
        self.whole: npt.NDArray[np.float64] | None = None
        """Those in flight whose activations are kept, if every stage but the last computes forwards again; None: all."""
        if job.pipeline.recompute == "on":
            self.whole = np.ones(stages)
            self.whole[0] = self.in_flight[0]
        weights = np.ones(stages)
        if kind == "1f1b-async":  # the optimizer's own, and one version per update while a micro-batch is in flight
            grouped = stages > 1 and wide and wide[0] > 1
            late = wide[0] if grouped else 0  # micro-batches by which the first stage's updates are late
            versions = np.full(stages, self.in_flight.max() + late) if job.pipeline.vertical_sync else self.in_flight
            weights = 2 + np.ceil(versions / micro_batches_of(job))
        elif kind == "1f1b-delayed":
            weights = np.full(stages, 1.0 + DELAY)
        whole = 2 + self._optimizer
        copied = 1 + self._optimizer + (DELAY if kind == "1f1b-delayed" else 0)
        # Gradients of two steps and those of a micro-batch, where updates are late (``Updates``).
        apart = 2 if kind == "1f1b-delayed" and job.train.clip_norm is not None else 0
        # The weights before an update, of which a correction is made.
        apart += 1 if job.train.optimizer.correction != "none" else 0
        # Copies are in the host's memory, which a GPU's (``alone``) is not; where there are CPUs, too, all count them.
        here = not cluster.devices or not all(device.alone for device in cluster.devices)
        held = most_held(job.recovery.replicate_every) if cluster.snapshots and here else 0
        # A checkpoint is sent from a copy while training goes on; that at the end while nothing is in flight any more.
        saved = 1 if here and (job.output.checkpoint_every or job.output.keep_best) else 0
        at_end = 1 if here and job.output.checkpoint_at_end else 0
        self.values, self.kept, self.ends = whole, (held + saved) * copied, copied
        """Values per trained value: in one version of the state, in copies of it, and at the end of a run without copies."""
        self.live = weights + 1 + apart + self._optimizer
        """(stages,): the same while training, without copies."""
        self.state_copies = (self.live + self.kept) / whole
        self._fixed = 1 + held + saved
        self._least = copied + (held + at_end) * copied, 1 + held + at_end
        self.local_copies = LOCAL_KEPT * copied / whole if cluster.snapshots else 0.0
        """States that a rank keeps for itself, if groups hold stages."""
        self.local_fixed = LOCAL_KEPT if cluster.snapshots else 0
        """The same of what does not change."""

    def state(self, layer: LayerOutline) -> float:
        """Bytes of one version of a layer's trained weights, gradients and optimizer state."""
        return (2 + self._optimizer) * layer.trained_bytes

    def fixed(self, layer: LayerOutline) -> float:
        """Bytes of a layer's frozen parameters and buffers, of which there are no versions, and of their copies."""
        return self._fixed * layer.unchanged_bytes

    def least(self, layer: LayerOutline) -> float:
        """Bytes that a layer takes at the end of a run, with the copy of which the last checkpoint is made."""
        trained, others = self._least
        return trained * layer.trained_bytes + others * layer.unchanged_bytes
