"""Tied parameters in plans: which stages have a copy of one, and what adding up their gradients costs."""

from collections.abc import Iterable

import msgspec

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job
from accept_mpi.models.shared import Shared
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import EXACT, sums_of
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.profiling.outline import Outline


def parted(shared: Iterable[Shared], plan: Plan) -> list[tuple[Shared, list[int]]]:
    """The tied parameters of which several stages of a plan have a copy, and these stages."""
    found = []
    for one in shared:
        layers = {layer for layer, _ in one.places}
        stages = [s for s, stage in enumerate(plan.stages) if any(stage.start <= layer < stage.stop for layer in layers)]
        if one.tied and len(stages) > 1:
            found.append((one, stages))
    return found


def trained_in(outline: Outline, start: int, stop: int, apart: bool = False) -> list[int]:
    """Bytes of the trained parameters of each layer of a stage; one that several of them have in common counts for the first
    of these. ``apart``: it counts for all, if stages may each have a copy of it, wherever the model is cut."""
    found = [layer.trained_bytes for layer in outline.layers[start:stop]]
    for one in outline.shared:
        uses = sorted({layer for layer, _ in one.places if start <= layer < stop})
        for layer in uses[1:] if one.nbytes and not (apart and one.tied) else ():
            found[layer - start] = max(0, found[layer - start] - one.nbytes)
    return found


def with_ties(cluster: ClusterProfile, job: Job, plan: Plan, step: float, share: float = 1.0) -> float:
    """Seconds per step, if without tied parameters it takes ``step`` seconds; links carry this ``share`` of their rates.

    Each rank with a copy sends its gradients to the owners of their parts, for every micro-batch if the job sums exactly,
    and an owner sends its sums back. Most of that hides behind computing unless the link is busy for longer than the step;
    the last micro-batch's does not.
    """
    for one, stages in parted(cluster.outline.shared, plan):
        ranks = [rank for s in stages for rank in plan.stages[s].ranks]
        link = share * min(cluster.host_link(rank) for rank in ranks)
        each = one.nbytes * (len(ranks) - 1) / len(ranks) / max(link, 1.0)
        times = micro_batches_of(job) if sums_of(job, plan) == EXACT else 1
        step = max(step, each * times) + 2 * each
    return step


def kept_together(cluster: ClusterProfile) -> ClusterProfile | None:
    """The same cluster with layers that have a parameter in common kept in one stage; None if no layers have one."""
    shared = cluster.outline.shared
    if not any(one.tied for one in shared):
        return None
    together = tuple(msgspec.structs.replace(one, tied=False) for one in shared)
    return msgspec.structs.replace(cluster, outline=msgspec.structs.replace(cluster.outline, shared=together))
