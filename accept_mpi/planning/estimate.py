"""Estimates of plans on measured devices: the time of a step, each stage's computing and memory, codecs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from accept_mpi.codecs.gradient_chunks import chunk_bytes
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.direction import Crossing, Direction
from accept_mpi.errors import UserError
from accept_mpi.job import Job, ScheduleKind
from accept_mpi.logs.format import Rows
from accept_mpi.logs.replay import mean_times, rerun
from accept_mpi.pipeline.deal import Deal
from accept_mpi.plan import BoundaryCodecs, Plan
from accept_mpi.planning.codec_choice import (
    AUTO,
    EXACT,
    LINK_SHARE,
    Choice,
    choose,
    gradient_codec,
    ladder_of,
    quickest,
    sums_of,
)
from accept_mpi.planning.forecast import Forecast, Groups
from accept_mpi.planning.memory import memory_of
from accept_mpi.planning.message_model import Traffic
from accept_mpi.planning.ties import trained_in, with_ties
from accept_mpi.profiling.cluster_profile import ClusterProfile, StageTimes


class Estimate(msgspec.Struct, frozen=True):
    """A plan with its expected times, codecs and memory."""

    plan: Plan
    step: float
    """Seconds per step."""
    loaded: float
    """Seconds per step if links carry only ``LINK_SHARE`` of their measured rates."""
    busy: list[float]
    """Share of a step during which each device computes, in the order of ``Plan.holders``."""
    computes: list[float]
    """Seconds of the computing core per micro-batch, for each device; with lanes, of all of them together."""
    choices: dict[Crossing, Choice]
    """The codec of each crossing."""
    memory: list[float]
    """Bytes that each device needs."""

    @property
    def expected(self) -> float:
        """Seconds by which plans of similar speed are compared: the mean of ``step`` and ``loaded``. Cuts that need a nearly
        full link wait whenever it wavers, or need a stronger codec."""
        return (self.step + self.loaded) / 2


def estimate(cluster: ClusterProfile, job: Job, plan: Plan) -> Estimate:
    """Estimate a plan; codecs are chosen where it leaves them open."""
    forecast = forecast_of(cluster, job, plan)
    fixed = {crossing: name for crossing, name in plan.codecs.items() if name != AUTO}
    choices, _ = choose(forecast, fixed, list(ladder_of(job.pipeline)))
    codecs = {crossing: choice.name for crossing, choice in choices.items()}
    step, busy = forecast.steady(codecs)
    loaded, _ = forecast.with_links(LINK_SHARE).steady(codecs)
    step, loaded = _with_ties(cluster, job, plan, step, loaded)
    computes = [
        profile.forward + profile.backward + sum(forecast.handling(d, way, codecs) for way in Direction)
        for d, profile in enumerate(forecast.profiles)
    ]
    lanes = [[d for d, (_, rank, _) in enumerate(plan.slots) if rank == holder] for _, holder in plan.holders]
    busy = [fmean(busy[d] for d in mine) for mine in lanes]
    computes = [fmean(computes[d] for d in mine) / len(mine) for mine in lanes]
    return Estimate(plan, step, loaded, busy, computes, choices, memory_of(cluster, job, plan))


def roughly(cluster: ClusterProfile, job: Job, plan: Plan) -> float:
    """``Estimate.expected`` with codecs that are chosen one by one, for a hundredth of the work; infinite for a plan that
    does not fit."""
    if not _have_room(cluster, plan, memory_of(cluster, job, plan)):
        return math.inf
    forecast = forecast_of(cluster, job, plan)
    loaded = forecast.with_links(LINK_SHARE)
    fixed = {crossing: name for crossing, name in plan.codecs.items() if name != AUTO}
    codecs = quickest(loaded, fixed, list(ladder_of(job.pipeline)))
    return fmean(_with_ties(cluster, job, plan, forecast.step(codecs), loaded.step(codecs)))


def _with_ties(cluster: ClusterProfile, job: Job, plan: Plan, step: float, loaded: float) -> tuple[float, float]:
    """``Estimate.step`` and ``loaded`` with what tied parameters cost, if without them a step takes so long."""
    if not job.parts_ties:
        return step, loaded
    return with_ties(cluster, job, plan, step), with_ties(cluster, job, plan, loaded, LINK_SHARE)


def least_seconds(cluster: ClusterProfile, job: Job) -> float:
    """Seconds per step that no plan can fall below: all devices compute all the time, in the lanes that are fastest, and
    nothing else takes time. (``planning.problem.lower_bound`` is for plans without groups, which cannot share a long
    layer.)"""
    lanes = job.pipeline.lanes != "off"
    each = [min([1.0, *(d.lanes.values() if lanes else ())]) * (sum(d.forward) + sum(d.backward)) for d in cluster.devices]
    return micro_batches_of(job) / sum(1 / max(seconds, 1e-12) for seconds in each)


def fits(cluster: ClusterProfile, found: Estimate) -> bool:
    """True if every device has the memory that its part of the plan needs."""
    return _have_room(cluster, found.plan, found.memory)


def _have_room(cluster: ClusterProfile, plan: Plan, memory: Sequence[float]) -> bool:
    """True if every device has so much ``memory`` (``Estimate.memory``)."""
    rooms = [cluster.devices[rank].memory for _, rank in plan.holders]
    return all(need <= room for need, room in zip(memory, rooms, strict=True))


def with_codecs(found: Estimate) -> Plan:
    """The plan of an estimate, with the chosen codecs wherever the job leaves them open."""
    codecs = []
    for boundary, codec in enumerate(found.plan.boundaries):
        chosen = [found.choices[boundary, way].name for way in Direction]
        forward, backward = (
            new if old == AUTO else old for old, new in zip((codec.forward, codec.backward), chosen, strict=True)
        )
        codecs.append(BoundaryCodecs(forward=forward, backward=backward))
    return msgspec.structs.replace(found.plan, boundaries=tuple(codecs))


def forecast_of(cluster: ClusterProfile, job: Job, plan: Plan) -> Forecast:
    """Forecast for the stages and boundaries of a plan."""
    kind: ScheduleKind = job.pipeline.schedule
    profiles = []
    for s, rank, _ in plan.slots:
        stage = plan.stages[s]
        device, mine = cluster.devices[rank], slice(stage.start, stage.stop)
        forward, backward = device.passes(stage, rank)
        profiles.append(
            StageTimes(
                forward=forward,
                backward=backward,
                encode=device.encode,
                decode=device.decode,
                seconds_per_byte=device.seconds_per_byte,
                seconds_per_message=device.seconds_per_message,
                shared=device.shared,
                weight_gradient=device.in_lane(stage.lanes_of(rank)) * sum(device.weight_gradient[mine]),
                update=sum(device.update[mine]),
            )
        )
    host_links = [max(cluster.host_link(rank), 1.0) for _, rank, _ in plan.slots]
    groups = _groups(cluster, job, plan) if plan.hybrid or plan.laned else None
    return Forecast(kind, micro_batches_of(job), plan.slack, profiles, _crossings(cluster, plan), host_links, groups)


def _groups(cluster: ClusterProfile, job: Job, plan: Plan) -> Groups:
    """The groups of a plan for its forecast."""
    slots = plan.slots
    rates = {
        (d, e): (max(cluster.rate[rank][other], 1.0), cluster.latency[rank][other])
        for (d, (s, rank, _)), (e, (t, other, _)) in itertools.permutations(enumerate(slots), 2)
        if abs(s - t) <= 1 and rank != other
    }
    gradients = [float(sum(trained_in(cluster.outline, stage.start, stage.stop))) for stage in plan.stages]
    early = [_passed_on(cluster, plan, s) for s in range(len(plan.stages))]
    return groups_of(job, plan, gradients, rates, early)


def groups_of(
    job: Job,
    plan: Plan,
    gradients: Sequence[float],
    rates: Mapping[tuple[int, int], tuple[float, float]],
    early: Sequence[Sequence[tuple[float, float]]] = (),
) -> Groups:
    """The groups of a plan, for the forecast of this job. ``gradients``, ``rates``, ``early``: as in ``Groups``."""
    deals, how, slots = [Deal.of(stage) for stage in plan.stages], sums_of(job, plan), plan.slots
    stages, ranks = [s for s, _, _ in slots], [rank for _, rank, _ in slots]
    return Groups(stages, deals, gradients, how == EXACT, gradient_codec(how), rates, ranks, early)


def _passed_on(cluster: ClusterProfile, plan: Plan, s: int) -> list[tuple[float, float]]:
    """``Groups.early`` of a stage, with the times of the first of its group."""
    stage = plan.stages[s]
    trained = trained_in(cluster.outline, stage.start, stage.stop)
    seconds = cluster.devices[stage.ranks[0]].backward[stage.start : stage.stop]
    total = max(sum(trained), 1)
    chunk = max(1, chunk_bytes(total, len(stage.ranks)))
    found, end, to_go = [], 0, 0.0
    for nbytes, backward in zip(trained, seconds, strict=True):
        begin, end = end, end + nbytes
        last = (end - 1) // chunk * chunk  # where the last chunk begins that has values of this layer
        if last >= begin:  # then it is there once this layer has gone back, and so are all later ones
            found.append((min(1.0, (last + chunk) / total), to_go / max(sum(seconds), 1e-12)))
        to_go += backward
    return found or [(1.0, 0.0)]


class Replayed(NamedTuple):
    """Seconds per step in the middle of a run, measured and simulated."""

    measured: float
    simulated: float
    """Simulated with the measured length of every action."""
    with_means: float
    """Simulated with each stage's mean times."""


def replayed(cluster: ClusterProfile, job: Job, plan: Plan, trace: Rows) -> Replayed:
    """Simulate a run with the computing times in its trace and the links in the cluster profile, regardless of the speeds
    that the profile foresaw. Raises UserError if the trace holds fewer than three finished steps."""
    foreseen = forecast_of(cluster, job, plan)
    codecs = plan.codecs
    ranks = [rank for _, rank in sorted(plan.holders)]  # in a trace those of a group are in the order of their numbers
    of_slots = [rank for _, rank, _ in plan.slots]
    firsts = [of_slots.index(rank) for rank in ranks]
    took, held = (
        lambda source, target, seconds=seconds: seconds(firsts[source], firsts[target])
        for seconds in foreseen.messages(codecs)
    )
    run = rerun(trace, took, foreseen.sum_seconds, held=held)
    if run is None:
        raise UserError("the trace holds fewer than three finished steps")
    means = dict(zip(ranks, mean_times(trace).values(), strict=False))
    each = [means[rank] for rank in of_slots]
    profiles = [
        StageTimes(
            forward=took["F"],
            backward=took["B"] + took.get("W", 0.0),
            encode=profile.encode,
            decode=profile.decode,
            weight_gradient=took.get("W", 0.0),
            update=took["U"],
        )
        for took, profile in zip(each, foreseen.profiles, strict=True)
    ]
    forecast = foreseen.with_profiles(profiles)
    return Replayed(run.took / run.steps, run.seconds / run.steps, forecast.steady(codecs)[0])


def _crossings(cluster: ClusterProfile, plan: Plan) -> dict[Crossing, Traffic]:
    """Traffic of all boundaries, in both directions."""
    ranks = plan.leaders
    found = {}
    for boundary, (stage, (a, b)) in enumerate(zip(plan.stages[1:], itertools.pairwise(ranks), strict=True)):
        sizes = cluster.outline.crossing(stage.start), cluster.outline.returning(stage.start)
        for way, size, (source, target) in zip(Direction, sizes, ((a, b), (b, a)), strict=True):
            rate = max(cluster.rate[source][target], 1.0)
            found[boundary, way] = Traffic.of(size, rate, cluster.latency[source][target])
    return found
