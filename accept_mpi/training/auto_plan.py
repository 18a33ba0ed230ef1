"""Plans by measuring (``cuts = "auto"``): rank 0 learns what the devices can do, and all ranks get the plan that follows."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from accept_mpi.codecs.coding import kernels_of
from accept_mpi.comm.links import pair_rates
from accept_mpi.comm.machine_code import Meanwhile, compile_together
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
from accept_mpi.planning.memory import memory_of
from accept_mpi.planning.micro_batches import best_of, settled, tried
from accept_mpi.planning.planner import planning_kernels, with_paying_lanes
from accept_mpi.planning.tables import table
from accept_mpi.prediction.database import (
    database_path,
    observe,
)
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.lane_timer import are_known, lane_counts, time_lanes
from accept_mpi.profiling.layer_timer import MicroBatch, Subject, micro_batch, time_layers
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
    drawing,
    introduce_devices,
    pooled_profile,
    retime_doubted,
)

_OUTLINE_SECONDS = 0.6  # of CPU, of a model of 53 layers, beside ``machine_code.SECONDS``
_MOST_ROWS = 50_000  # newest rows of a trace that are evaluated after a run


class AutoPlan(NamedTuple):
    """Result of planning by measurement; some fields are set on rank 0 only."""

    plan: Plan
    """The plan, with a codec wherever the job says "auto", unless it was given."""
    job: Job
    """The job, with the number of micro-batches that was found if it says "auto"."""
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
    jobs = tried(job, runtime.size)
    batches = [_micro_batch(runtime, data, one) for one in jobs]
    codings = codings_of(job)
    sharers = _sharers(runtime)
    idle = given is None and _room(most, sharers) <= 0
    planner = planning_kernels(runtime.size) if runtime.rank == 0 and given is None else []
    drawings = [drawing(chain, one, batch) for one, batch in zip(jobs, batches, strict=True)]
    outlining = Meanwhile(lambda: _tried(drawings), _OUTLINE_SECONDS * len(jobs)) if runtime.rank == source else None
    compile_together(runtime, planner if idle else [*kernels_of(codings.values()), *planner], outlining)
    models = [agree_on_outline(runtime, draw, source) for draw in drawings]
    rates = pair_rates(runtime.world)
    linked = time.monotonic()
    path = database_path(job.pipeline.latency_db) if runtime.rank == 0 and not given else None
    give_back_memory()  # kept from an earlier run in the same process
    room = 0.0 if idle else _room(most, sharers)
    costs = None if idle else message_costs(codings, rates.seconds_per_byte, rates.seconds_per_message)
    copies = job.recovery.copies(runtime.size, runtime.survives)
    mine = Report(
        nothing_measured(models[0]), rates, costs, data[0] is not None, room, computing_takes_all(runtime.cores), copies,
        bool(here().alone),
    )  # fmt: skip
    measures = not idle and (given is None or runtime.rank == 0)
    seconds = job.pipeline.probe_seconds / len(jobs)
    surveys = [
        _survey(runtime, Subject(chain, model, one, loss, *batch), mine, path, seconds if measures else 0.0)
        for one, model, batch in zip(jobs, models, batches, strict=True)
    ]
    took = _Took(began, linked, time.monotonic())
    decided = runtime.agree(
        "the plan", lambda: _decided(job, given, data, surveys, path, took) if runtime.rank == 0 else None
    )
    mine_told = [decided.plan.to_json(), jobs.index(decided.job)] if decided else None
    told, number = runtime.messenger.broadcast(mine_told, runtime.startup_seconds, "the plan")
    return decided or AutoPlan(Plan.from_json(told), jobs[number], data, [], None, None, models[number])


def micro_batches_alone(runtime: Runtime, job: Job, chain: Chain, have: Data, plan: Plan) -> tuple[Job, Data]:
    """The job of a run with one rank, with as few micro-batches as its lanes and its memory allow; and the data. All ranks
    call this together. Raises Agreed if there are no data."""
    data, source = load_here(runtime, job, have)
    lanes, most = job.pipeline.lanes, job.train.batch_size
    count = {"auto": torch.get_num_threads(), "off": 1, "F+B": 2}.get(str(lanes), lanes)
    assert isinstance(count, int)
    room = planned(here().room())
    while True:
        found = settled(job, min(count, most))
        batch = _micro_batch(runtime, data, found)
        model = agree_on_outline(runtime, drawing(chain, found, batch), source)
        (need,) = memory_of(ClusterProfile(model, [], [], []), found, plan)
        if need <= room or count >= most:
            return found, data
        count *= 2


def with_best_lanes(runtime: Runtime, job: Job, chain: Chain, loss: Loss, have: Data, plan: Plan) -> tuple[Plan, Data]:
    """The plan of a run with one rank, with the lanes with which it computes fastest, if the job leaves that open; and the
    data, if they were needed for it. Raises Agreed if there are none."""
    threads, micro_batches = torch.get_num_threads(), micro_batches_of(job)
    if job.pipeline.lanes != "auto" or not lane_counts(threads, micro_batches):
        return plan, have
    data, source = load_here(runtime, job, have)
    batch = _micro_batch(runtime, data, job)
    model = agree_on_outline(runtime, drawing(chain, job, batch), source)
    path = database_path(job.pipeline.latency_db)
    devices = introduce_devices(runtime, job, model, path)
    room = planned(here().room())
    gains = devices.known[0].lanes if devices.known[0] else {}
    if not are_known(gains, micro_batches):
        gains = time_lanes(Subject(chain, model, job, loss, *batch), micro_batches, room)
    each = [1.0] * len(model.layers)  # only their sums with and without lanes are compared
    device = DeviceProfile(
        host="", forward=each, backward=each, weight_gradient=each, update=[0.0] * len(each), encode={}, decode={},
        seconds_per_byte=0.0, shared=False, memory=room, lanes=gains,
    )  # fmt: skip
    cluster = ClusterProfile(model, [device], [[1e12]], [[0.0]])
    return with_paying_lanes(cluster, job, plan), data


def _tried(drawings: Sequence[Callable[[], Outline]]) -> None:
    """Draw what can be drawn; mistakes in it are told when ranks agree on it."""
    for draw in drawings:
        with contextlib.suppress(Exception):
            draw()


def _micro_batch(runtime: Runtime, data: Data, job: Job) -> MicroBatch:
    """A micro-batch of the data; all ranks call this together."""
    return runtime.agree("a micro-batch", lambda: micro_batch(data[0], job))


def _sharers(runtime: Runtime) -> int:
    """Number of ranks that share the memory in which this one computes: its host's, or a GPU's. All ranks call this
    together."""
    host, memory = runtime.hosts[runtime.rank]["machine_id"], here().memory
    told = runtime.messenger.allgather([host, memory], runtime.startup_seconds, "where each rank computes")
    return sum(one == host and memory in ("", of) for one, of in told)


def _room(most: float, sharers: int) -> float:
    """Bytes that a stage may take on this rank, whose memory so many ranks share, and no more than ``most``."""
    return min(most, planned(here().room() / sharers))


class _Took(NamedTuple):
    """Times at which parts of the measurement were done, in monotonic seconds."""

    began: float
    linked: float
    measured: float


class _Survey(NamedTuple):
    """What all ranks have measured at one size of micro-batch; the times and reports on rank 0 only."""

    subject: Subject
    devices: Devices
    seen: Measured


def _survey(runtime: Runtime, subject: Subject, mine: Report, path: Path | None, seconds: float) -> _Survey:
    """Measure the layers of a job on all ranks, which call this together. ``mine``: this rank's report without times;
    ``seconds``: how long to measure on this rank, 0 for not at all."""
    devices = introduce_devices(runtime, subject.job, subject.outline, path)
    times = runtime.agree(
        "the time of each layer",
        lambda: (
            _times_here(runtime, subject, devices, mine.memory, seconds) if seconds else nothing_measured(subject.outline)
        ),
    )
    return _Survey(subject, devices, _gathered(runtime, devices, subject, msgspec.structs.replace(mine, times=times)))


def _times_here(runtime: Runtime, subject: Subject, devices: Devices, room: float, seconds: float) -> LayerTimes:
    """Time the layers on this rank, the most informative pieces first."""
    known, order = devices.known[runtime.rank], devices.order(runtime.rank, len(pieces(subject.outline)))
    crowded = runtime.cores < torch.get_num_threads()
    found = time_layers(subject, seconds, known, room, order, crowded)
    if subject.job.pipeline.lanes != "auto" or are_known(found.lanes, micro_batches_of(subject.job)):
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
    job: Job, given: Plan | None, data: Data, surveys: Sequence[_Survey], path: Path | None, took: _Took
) -> AutoPlan:
    """Make the plan on rank 0, from all measurements. Raises UserError if none fits."""
    profiles = [pooled_profile(one.subject.outline, one.devices, one.seen, path, given is not None) for one in surveys]
    if given:
        (only,), (cluster,) = surveys, profiles
        seconds = time.monotonic() - took.began
        return AutoPlan(given, job, data, [], cluster, None, cluster.outline, seconds, tuple(only.devices.keys))
    found = best_of([(one.subject.job, profile) for one, profile in zip(surveys, profiles, strict=True)])
    known = sum(bool(times) for one in surveys for times in one.devices.known)
    twice = sum(bool(again) for one in surveys for again in one.seen.again)
    lines = table(found.cluster, found.job, found.best, found.even)
    lines += [found.line] if found.line else []
    lines.append(
        f"measuring took {took.measured - took.began:.1f} s (layers {took.measured - took.linked:.1f} s; "
        f"{known // len(surveys)} of {len(surveys[0].devices.known)} devices were known"
        f"{f', {twice} timed twice' if twice else ''}), planning {time.monotonic() - took.measured:.1f} s"
    )
    return AutoPlan(
        with_codecs(found.best), found.job, data, lines, found.cluster, found.best.step, found.cluster.outline,
        time.monotonic() - took.began, tuple(surveys[0].devices.keys),
    )  # fmt: skip


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
                again = took["F"] if stage.recompute else 0.0  # in each backward
                times = took["F"] / longer, max(0.0, took["B"] + took.get("W", 0.0) - again) / longer
                runs.setdefault(planned.keys[rank], []).append((stage.start, stage.stop, *times))
    observe(path, planned.cluster.outline, runs)
