"""How rank 0 learns what the devices can do, and all ranks learn the plan that follows (``cuts = "auto"``)."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from accept_mpi.codecs.coding import prepare
from accept_mpi.comm.links import PairRates, pair_rates
from accept_mpi.comm.runtime import Runtime
from accept_mpi.data import Dataset
from accept_mpi.data import load as load_data
from accept_mpi.device.cgroups import cpu_share
from accept_mpi.device.cpu import computing_takes_all, cpu_name, give_back_memory
from accept_mpi.device.memory import available_memory, planned
from accept_mpi.errors import Agreed, UserError
from accept_mpi.job import Job
from accept_mpi.logs.log import open_log
from accept_mpi.logs.replay import mean_times
from accept_mpi.models import Chain
from accept_mpi.models.losses import Loss
from accept_mpi.plan import Plan
from accept_mpi.planning.estimate import settled
from accept_mpi.planning.formulation import codings_of
from accept_mpi.planning.planner import plans_for
from accept_mpi.planning.tables import table
from accept_mpi.prediction.database import (
    database_path,
    device_key,
    keep_predictor,
    known_of,
    library,
    observe,
    recall,
    recall_predictor,
    remember,
)
from accept_mpi.prediction.imputation import fill, learned
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.profiling.cluster_profile import Device, Survey
from accept_mpi.profiling.layer_timer import (
    LayerTimes,
    MicroBatch,
    Run,
    Subject,
    look,
    micro_batch,
    nothing_measured,
    pieces,
    probe,
    scattered,
)
from accept_mpi.profiling.outline import Outline, outline_of
from accept_mpi.profiling.pooling import Handling, Kind, alike, doubted, handled_alike, together, turns
from accept_mpi.profiling.stage_timer import codec_costs, message_cost, one_that_codes

Data = tuple[Dataset | None, Dataset | None]

_MOST_ROWS = 50_000  # of a trace, that are looked at after a run


class Surveyed(NamedTuple):
    """What all ranks know afterwards."""

    plan: Plan
    """With a codec wherever the job says "auto", unless the plan was given."""
    data: Data
    """Training and test set, where this rank has them."""
    lines: list[str]
    """Rank 0: the plan as a table, and how long this took."""
    survey: Survey | None
    """Rank 0: what was measured."""
    step: float | None
    """Rank 0: seconds that a step should take."""
    outline: Outline
    """Of the model."""
    seconds: float = 0.0
    """That measuring and planning took."""
    keys: tuple[str, ...] = ()
    """Rank 0: each rank's key in the latency database."""


def plan_by_measuring(
    runtime: Runtime, job: Job, chain: Chain, loss: Loss, given: Plan | None = None, most: float = math.inf
) -> Surveyed:
    """Measure devices and links, and cut the model where training is fastest. All ranks call this together.

    Every rank that can load the data may be first or last. Where a plan is ``given``, it stays as it is, rank 0 alone times
    layers and the others are taken to be as fast (FTPipeHD, section III-D: capacity 1 until training shows another). This
    rank gets ``most`` bytes of memory at most.

    Raises Agreed where no plan fits or nobody has the data.
    """
    messenger, seconds = runtime.messenger, runtime.startup_seconds
    data, source = _load(runtime, job)
    began = time.monotonic()
    batch = runtime.agree("a micro-batch", lambda: micro_batch(data[0], job))
    codings = codings_of(job)
    prepare(list(codings.values()))  # a slow device takes as long for this as rank 0 for the model's layers
    model = _outlined(runtime, chain, job, batch, source)
    rates = pair_rates(runtime.world)
    linked = time.monotonic()
    path = database_path(job.pipeline.latency_db) if runtime.rank == 0 and not given else None
    devices = _introduced(runtime, job, model, path)
    give_back_memory()  # of a run before this one in the same process
    room = min(most, planned(available_memory() / runtime.ranks_on_host))
    crowded = runtime.cores < torch.get_num_threads()
    subject = Subject(chain, model, job, loss, *batch)
    before, order = devices.known[runtime.rank], devices.order(runtime.rank, len(pieces(model)))
    times = runtime.agree(
        "the time of each layer",
        lambda: (
            probe(subject, job.pipeline.probe_seconds, before, room, order, crowded)
            if given is None or runtime.rank == 0
            else nothing_measured(model)
        ),
    )
    shared = computing_takes_all(runtime.cores)
    copies = runtime.survives and runtime.size > 1 and job.recovery.replicate_every != 0
    handling = Handling(codec_costs(codings), rates.cpu, rates.message + message_cost(one_that_codes(codings)))
    mine = _Report(times, rates, handling, data[0] is not None, room, shared, copies)
    gathered = messenger.allgather(msgspec.to_builtins(mine), seconds, "what each device has measured")
    reports = [msgspec.convert(one, _Report) for one in gathered] if runtime.rank == 0 else []
    first = devices.together([report.times for report in reports])
    doubts = messenger.broadcast(doubted(first, devices.kinds) if first else None, seconds, "whom to ask again")
    again = _second_look(runtime, subject, doubts, room) if any(doubts) else []
    measured = time.monotonic()

    def decide() -> Surveyed | None:
        if runtime.rank:
            return None
        survey = _pooled_survey(model, devices, _Measured(reports, first, doubts, again), path, given is not None)
        keys = tuple(devices.keys)
        if given:
            return Surveyed(given, data, [], survey, None, model, time.monotonic() - began, keys)
        found, even = plans_for(survey, job)
        looked = sum(map(bool, again))
        lines = table(survey, job, found, even)
        lines.append(
            f"measuring took {measured - began:.1f} s (layers {measured - linked:.1f} s; {sum(map(bool, devices.known))} of "
            f"{runtime.size} devices were known{f', {looked} looked twice' if looked else ''}), "
            f"planning {time.monotonic() - measured:.1f} s"
        )
        return Surveyed(settled(found), data, lines, survey, found.step, model, time.monotonic() - began, keys)

    decided = runtime.agree("the plan", decide)
    plan = Plan.from_json(messenger.broadcast(decided.plan.to_json() if decided else None, seconds, "the plan"))
    return decided or Surveyed(plan, data, [], None, None, model)


def _outlined(runtime: Runtime, chain: Chain, job: Job, batch: MicroBatch, source: int) -> Outline:
    """The model as rank ``source``, which has data for it, draws it."""

    def draw() -> Outline | None:
        return outline_of(chain, job, batch.inputs, batch.tree, batch.samples) if runtime.rank == source else None

    drawn = runtime.agree("the model's layers", draw)
    told = runtime.messenger.allgather(msgspec.to_builtins(drawn), runtime.startup_seconds, "the model's layers")
    return msgspec.convert(told[source], Outline)


class _Devices(NamedTuple):
    """All ranks' devices, by rank, as they introduce themselves."""

    facts: list[dict[str, Any]]
    """What their times depend on."""
    keys: list[str]
    """In the latency database; the same for ranks that share a host."""
    kinds: list[Kind]
    known: list[LayerTimes | None]
    """What the latency database knows of them."""
    wanted: list[int]
    """In which order the model's pieces tell most, as the predictor thinks; empty without one."""

    def order(self, rank: int, count: int) -> list[int]:
        """In which order a rank should time the model's ``count`` pieces."""
        mates = [n for n, kind in enumerate(self.kinds) if kind.processor == self.kinds[rank].processor]
        return turns(self.wanted or scattered(count), mates.index(rank), len(mates))

    def together(self, times: Sequence[LayerTimes]) -> list[LayerTimes]:
        """What all ranks measured, with what those of one host measured made one."""
        hosts = {key: [one for one, own in zip(times, self.keys, strict=True) if own == key] for key in self.keys if times}
        return [together(hosts[key]) for key in self.keys if times]


def _introduced(runtime: Runtime, job: Job, model: Outline, path: Path | None) -> _Devices:
    """Who is there, and what rank 0's database, if there is one, knows of them."""
    messenger, seconds = runtime.messenger, runtime.startup_seconds
    facts = messenger.allgather(_facts(runtime, job), seconds, "the kind of each device")
    keys = [device_key(one) for one in facts]
    known = recall(path, model, keys) if path else [None] * runtime.size
    wanted = _wanted(path, model) if path and not all(one and all(one.measured) for one in known) else []
    told = messenger.broadcast([msgspec.to_builtins(known), wanted], seconds, "what is known of each device")
    known, wanted = msgspec.convert(told, tuple[list[LayerTimes | None], list[int]])
    return _Devices(facts, keys, [_kind(one) for one in facts], known, wanted)


def _second_look(
    runtime: Runtime, subject: Subject, doubts: Sequence[Sequence[Sequence[int]]], room: float
) -> list[list[Run]]:
    """What each rank measures at the same time of the pieces that are ``doubted`` on it."""
    asked = [(start, stop) for start, stop in doubts[runtime.rank]]
    seen = runtime.agree("a second look", lambda: look(subject, asked, room) if asked else [])
    gathered = runtime.messenger.allgather(seen, runtime.startup_seconds, "a second look")
    return msgspec.convert(gathered, list[list[Run]])


def _learned(path: Path | None, model: Outline, times: dict[str, LayerTimes]) -> Predictor | None:
    """A predictor of what devices have not measured, kept in the database; without one, from this run's devices alone."""
    known = library(path) if path else [known_of(model, key, one) for key, one in times.items() if one.pieces]
    stored = recall_predictor(path) if path else None
    predictor = learned(known, stored)
    if path and predictor and predictor is not stored:
        keep_predictor(path, predictor)
    return predictor


def _wanted(path: Path, model: Outline) -> list[int]:
    """In which order devices never seen probe the model's pieces, as what is known of others suggests."""
    predictor = recall_predictor(path)
    return predictor.order(model, np.array(pieces(model))) if predictor else []


def learn(job: Job, planned: Surveyed, plan: Plan, log: Path) -> None:
    """Rank 0, after a run: what its stages took goes into the latency database, for the predictor to learn from (AccEPT's
    continual learning; reconstruction)."""
    path = database_path(job.pipeline.latency_db)
    if path is None or planned.survey is None:
        return
    with open_log(log) as file:
        trace = file["trace"][-_MOST_ROWS:]
    runs: dict[str, list[Run]] = {}
    for stage, took in zip(plan.stages, mean_times(trace), strict=False):
        if {"F", "B"} <= took.keys():
            key = planned.keys[stage.ranks[0]]
            runs.setdefault(key, []).append((stage.start, stage.stop, took["F"], took["B"] + took.get("W", 0.0)))
    observe(path, planned.survey.outline, runs)


class _Report(msgspec.Struct, frozen=True):
    """What a rank tells rank 0."""

    times: LayerTimes
    rates: PairRates
    handling: Handling
    data: bool
    memory: float
    shared: bool
    snapshots: bool = False


class _Measured(NamedTuple):
    """What all ranks measured, by rank."""

    reports: list[_Report]
    times: list[LayerTimes]
    """Of the reports, with what ranks of one host measured made one."""
    doubts: Sequence[Sequence[Sequence[int]]]
    """Pieces that a second look was for."""
    again: list[list[Run]]
    """What that found."""


def _pooled_survey(model: Outline, devices: _Devices, seen: _Measured, path: Path | None, assumed: bool) -> Survey:
    """Devices of a kind pooled, what is new kept in the database, what nobody has measured predicted. ``assumed``: all but
    rank 0, which alone has measured, are taken to be as fast."""
    pooled = alike(seen.times, devices.kinds, seen.again)
    # What a second look did not find again is not remembered.
    kept = [one if doubt else own for one, own, doubt in zip(pooled, seen.times, seen.doubts, strict=True)]
    leaders = {key: devices.keys.index(key) for key in devices.keys}  # of each host the first rank
    if path:
        there = {key: (devices.facts[n], kept[n]) for key, n in leaders.items() if any(kept[n].measured)}
        remember(path, model, there)
    predictor = None
    if not assumed and not all(all(one.measured) for one in pooled):  # nor any of their kind
        predictor = _learned(path, model, {key: kept[n] for key, n in leaders.items()})
    same = [one is not own for one, own in zip(pooled, seen.times, strict=True)]
    handled = handled_alike([report.handling for report in seen.reports], devices.kinds, same)
    said = [
        msgspec.structs.replace(report, times=one, handling=costs)
        for report, one, costs in zip(seen.reports, pooled, handled, strict=True)
    ]
    survey = survey_of(model, said, [facts["host"] for facts in devices.facts], predictor)
    if assumed:
        others = [msgspec.structs.replace(device, assumed=n > 0) for n, device in enumerate(survey.devices)]
        return msgspec.structs.replace(survey, devices=others)
    return survey


def survey_of(model: Outline, reports: list[_Report], hosts: list[str], predictor: Predictor | None = None) -> Survey:
    """All reports as one; what devices have not measured is predicted."""
    forward, backward, weights, update = fill([report.times for report in reports], model, predictor).tolist()
    devices = []
    for n, report in enumerate(reports):
        # What a quota does to long computing it does to the sum of all short pieces.
        stretch = report.times.stretch
        devices.append(
            Device(
                host=hosts[n],
                forward=forward[n],
                backward=backward[n],
                weights=weights[n],
                update=update[n],
                encode={name: stretch * encode for name, (encode, _) in report.handling.codecs.items()},
                decode={name: stretch * decode for name, (_, decode) in report.handling.codecs.items()},
                byte=stretch * report.handling.byte,
                message=stretch * report.handling.message,
                shared=report.shared,
                memory=report.memory,
                snapshots=report.snapshots,
                data=report.data,
            )
        )
    # Each rank has measured what comes in.
    rate = np.array([report.rates.rate for report in reports]).T.tolist()
    latency = np.array([report.rates.latency for report in reports]).T.tolist()
    return Survey(model, devices, rate, latency)


def _facts(runtime: Runtime, job: Job) -> dict[str, Any]:
    """What a device's times depend on, the model apart."""
    host = runtime.hosts[runtime.rank]
    optimizer = job.train.optimizer
    return {
        "host": host["host"],
        "machine": host["machine"],
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": host["cores"],
        "share": str(cpu_share()),
        "ranks": runtime.ranks_on_host,
        "threads": torch.get_num_threads(),
        "torch": host["versions"]["torch"],
        "schedule": {"1f1b-async": "versions", "zero-bubble": "deferred"}.get(job.pipeline.schedule, "plain"),
        "optimizer": f"{optimizer.name} {'with' if optimizer.momentum else 'without'} momentum",
        "loss": job.train.loss,
    }


def _kind(facts: dict[str, Any]) -> Kind:
    """Of a device with these facts."""
    processor = {name: fact for name, fact in facts.items() if name not in ("host", "cores", "share")}
    return Kind(device_key(processor), f"{facts['share']} of {facts['cores']}")


def _load(runtime: Runtime, job: Job) -> tuple[Data, int]:
    """The data, where it can be loaded, and the first rank that has it."""
    data: Data = (None, None)
    error = None
    try:
        data = load_data(job.data.name, job.data.args, job.model)
    except UserError as mistake:
        error = str(mistake)
    errors = runtime.messenger.allgather(error, runtime.startup_seconds, "the data")
    if None not in errors:
        raise Agreed(str(errors[0]))
    return data, errors.index(None)
