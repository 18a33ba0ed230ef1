"""Plans by measuring (``cuts = "auto"``): rank 0 learns what the devices can do, and all ranks get the plan that follows."""

import math
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from accept_mpi.codecs.coding import prepare
from accept_mpi.comm.links import pair_rates
from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.device.allocator import give_back_memory
from accept_mpi.device.compute import here
from accept_mpi.device.cpu import computing_takes_all
from accept_mpi.device.memory import planned
from accept_mpi.job import Job
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.replay import mean_times
from accept_mpi.models import Chain
from accept_mpi.models.losses import Loss
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import codings_of
from accept_mpi.planning.estimate import with_codecs
from accept_mpi.planning.planner import plans_for, with_paying_lanes
from accept_mpi.planning.tables import table
from accept_mpi.prediction.database import (
    database_path,
    observe,
)
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.lane_timer import lane_counts, time_lanes
from accept_mpi.profiling.layer_timer import Subject, micro_batch, time_layers
from accept_mpi.profiling.layer_times import LayerTimes, TimedRange, nothing_measured, pieces
from accept_mpi.profiling.message_costs import message_costs
from accept_mpi.profiling.outline import Outline
from accept_mpi.profiling.pooling import doubted
from accept_mpi.training.data_here import Data, load_here
from accept_mpi.training.profile_cluster import (
    Devices,
    Measured,
    Report,
    agree_on_outline,
    introduce_devices,
    pooled_profile,
    retime_doubted,
)

_MOST_ROWS = 50_000  # newest rows of a trace that are evaluated after a run


class AutoPlan(NamedTuple):
    """Result of planning by measurement; some fields are set on rank 0 only."""

    plan: Plan
    """The plan, with a codec wherever the job says "auto", unless it was given."""
    data: Data
    """Training and test set, if this rank has them."""
    lines: list[str]
    """On rank 0: the plan as a table, and how long measuring and planning took."""
    cluster: ClusterProfile | None
    """On rank 0: the cluster profile that was measured."""
    step: float | None
    """On rank 0: expected seconds per step; None if the plan was given."""
    outline: Outline
    """Outline of the model."""
    seconds: float = 0.0
    """On rank 0: seconds that measuring and planning took."""
    keys: tuple[str, ...] = ()
    """On rank 0: each rank's key in the latency database."""


def plan_by_measuring(
    runtime: Runtime, job: Job, chain: Chain, loss: Loss, have: Data, given: Plan | None = None, most: float = math.inf
) -> AutoPlan:
    """Measure devices and links, and cut the model so that training is fastest. All ranks call this together.

    Every rank that can load the data may hold the first or the last stage. If a plan is ``given``, it stays as it is: only
    rank 0 times layers, and the others are assumed to be as fast (FTPipeHD, section III-D: capacity 1 until training shows
    another). ``have``: the data, if this rank has loaded them; ``most``: most bytes of memory that this rank may take. One
    that has no memory for any stage measures its links only: compiled kernels alone take 60 MiB.

    Raises Agreed if no plan fits or no rank has the data.
    """
    data, source = load_here(runtime, job, have)
    began = time.monotonic()
    batch = runtime.agree("a micro-batch", lambda: micro_batch(data[0], job))
    codings = codings_of(job)
    idle = given is None and _room(runtime, most) <= 0
    if not idle:
        prepare(list(codings.values()))  # now, since it takes a slow device as long as another rank takes for the outline
    model = agree_on_outline(runtime, chain, job, batch, source)
    rates = pair_rates(runtime.world)
    linked = time.monotonic()
    path = database_path(job.pipeline.latency_db) if runtime.rank == 0 and not given else None
    devices = introduce_devices(runtime, job, model, path)
    give_back_memory()  # kept from an earlier run in the same process
    room = 0.0 if idle else _room(runtime, most)
    subject = Subject(chain, model, job, loss, *batch)
    times = runtime.agree(
        "the time of each layer",
        lambda: (
            _times_here(runtime, subject, devices, room)
            if not idle and (given is None or runtime.rank == 0)
            else nothing_measured(model)
        ),
    )
    costs = None if idle else message_costs(codings, rates.seconds_per_byte, rates.seconds_per_message)
    copies = job.recovery.copies(runtime.size, runtime.survives)
    mine = Report(times, rates, costs, data[0] is not None, room, computing_takes_all(runtime.cores), copies)
    seen = _gathered(runtime, devices, subject, mine)
    took = _Took(began, linked, time.monotonic())
    decided = runtime.agree(
        "the plan", lambda: _decided(job, given, data, devices, seen, path, model, took) if runtime.rank == 0 else None
    )
    told = decided.plan.to_json() if decided else None
    plan = Plan.from_json(runtime.messenger.broadcast(told, runtime.startup_seconds, "the plan"))
    return decided or AutoPlan(plan, data, [], None, None, model)


def with_best_lanes(runtime: Runtime, job: Job, chain: Chain, loss: Loss, have: Data, plan: Plan) -> tuple[Plan, Data]:
    """The plan of a run with one rank, with the lanes with which it computes fastest, if the job leaves that open; and the
    data, if they were needed for it. Raises Agreed if there are none."""
    threads, micro_batches = torch.get_num_threads(), micro_batches_of(job)
    if job.pipeline.lanes != "auto" or not lane_counts(threads, micro_batches):
        return plan, have
    data, source = load_here(runtime, job, have)
    batch = runtime.agree("a micro-batch", lambda: micro_batch(data[0], job))
    model = agree_on_outline(runtime, chain, job, batch, source)
    path = database_path(job.pipeline.latency_db)
    devices = introduce_devices(runtime, job, model, path)
    room = planned(here().room())
    gains = devices.known[0].lanes if devices.known[0] else {}
    gains = gains or time_lanes(Subject(chain, model, job, loss, *batch), micro_batches, room)
    each = [1.0] * len(model.layers)  # only their sums with and without lanes are compared
    device = DeviceProfile(
        host="", forward=each, backward=each, weight_gradient=each, update=[0.0] * len(each), encode={}, decode={},
        seconds_per_byte=0.0, shared=False, memory=room, lanes=gains,
    )  # fmt: skip
    cluster = ClusterProfile(model, [device], [[1e12]], [[0.0]])
    return with_paying_lanes(cluster, job, plan), data


def _room(runtime: Runtime, most: float) -> float:
    """Bytes that a stage may take on this rank, and no more than ``most``."""
    return min(most, planned(here().room() / runtime.ranks_on_host))


class _Took(NamedTuple):
    """Times at which parts of the measurement were done, in monotonic seconds."""

    began: float
    linked: float
    measured: float


def _times_here(runtime: Runtime, subject: Subject, devices: Devices, room: float) -> LayerTimes:
    """Time the layers on this rank, the most informative pieces first."""
    known, order = devices.known[runtime.rank], devices.order(runtime.rank, len(pieces(subject.outline)))
    crowded = runtime.cores < torch.get_num_threads()
    found = time_layers(subject, subject.job.pipeline.probe_seconds, known, room, order, crowded)
    if subject.job.pipeline.lanes != "auto" or found.lanes:
        return found
    return msgspec.structs.replace(found, lanes=time_lanes(subject, micro_batches_of(subject.job), room))


def _gathered(runtime: Runtime, devices: Devices, subject: Subject, mine: Report) -> Measured:
    """Gather all ranks' reports on rank 0, and have devices of one kind that disagree time some pieces again. All ranks call
    this together."""
    messenger, seconds = runtime.messenger, runtime.startup_seconds
    told = messenger.allgather(msgspec.to_builtins(mine), seconds, "what each device has measured")
    reports = [msgspec.convert(one, Report) for one in told] if runtime.rank == 0 else []
    first = devices.together([report.times for report in reports])
    doubts = messenger.broadcast(doubted(first, devices.kinds) if first else None, seconds, "which times to check")
    again = retime_doubted(runtime, subject, doubts, mine.memory) if any(doubts) else []
    return Measured(reports, first, doubts, again)


def _decided(
    job: Job,
    given: Plan | None,
    data: Data,
    devices: Devices,
    seen: Measured,
    path: Path | None,
    model: Outline,
    took: _Took,
) -> AutoPlan:
    """Make the plan on rank 0, from all measurements. Raises UserError if none fits."""
    cluster = pooled_profile(model, devices, seen, path, given is not None)
    keys = tuple(devices.keys)
    if given:
        return AutoPlan(given, data, [], cluster, None, model, time.monotonic() - took.began, keys)
    found, even = plans_for(cluster, job)
    known, twice = sum(map(bool, devices.known)), sum(map(bool, seen.again))
    lines = table(cluster, job, found, even)
    lines.append(
        f"measuring took {took.measured - took.began:.1f} s (layers {took.measured - took.linked:.1f} s; {known} of "
        f"{len(devices.known)} devices were known{f', {twice} timed twice' if twice else ''}), "
        f"planning {time.monotonic() - took.measured:.1f} s"
    )
    return AutoPlan(with_codecs(found), data, lines, cluster, found.step, model, time.monotonic() - took.began, keys)


def learn(job: Job, planned: AutoPlan, plan: Plan, log: Path) -> None:
    """Store the times of a run's stages in the latency database, where the predictor learns from them (AccEPT's continual
    learning; reconstruction). On rank 0, after the run."""
    path = database_path(job.pipeline.latency_db)
    if path is None or planned.cluster is None:
        return
    with open_log(log) as file:
        trace = file["trace"][-_MOST_ROWS:]
    runs: dict[str, list[TimedRange]] = {}
    means = mean_times(trace)
    for stage in plan.stages:
        for rank in stage.ranks:
            took = means.get(rank, {})
            if {"F", "B"} <= took.keys():
                longer = planned.cluster.devices[rank].in_lane(stage.lanes_of(rank))  # than one pass after another
                times = took["F"] / longer, (took["B"] + took.get("W", 0.0)) / longer
                runs.setdefault(planned.keys[rank], []).append((stage.start, stage.stop, *times))
    observe(path, planned.cluster.outline, runs)
