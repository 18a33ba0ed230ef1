"""Every rank's measurements become one cluster profile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from accept_mpi.comm.links import PairRates
from accept_mpi.comm.runtime import Runtime
from accept_mpi.device.cgroups import cpu_share
from accept_mpi.device.cpu import cpu_name
from accept_mpi.job import Job
from accept_mpi.models import Chain
from accept_mpi.prediction.database import device_key, recall, remember
from accept_mpi.prediction.imputation import impute, pieces_to_time, predictor_for
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.layer_timer import MicroBatch, Subject, retime
from accept_mpi.profiling.layer_times import LayerTimes, TimedRange, bit_reversed_order
from accept_mpi.profiling.message_costs import MessageCosts
from accept_mpi.profiling.outline import Outline, outline_of
from accept_mpi.profiling.pooling import DeviceKind, merged, pool, pool_message_costs, probing_order


def agree_on_outline(runtime: Runtime, chain: Chain, job: Job, batch: MicroBatch, source: int) -> Outline:
    """The model as rank ``source``, which has data for it, draws it."""

    def draw() -> Outline | None:
        return outline_of(chain, job, batch.inputs, batch.tree, batch.samples) if runtime.rank == source else None

    drawn = runtime.agree("the model's layers", draw)
    told = runtime.messenger.allgather(msgspec.to_builtins(drawn), runtime.startup_seconds, "the model's layers")
    return msgspec.convert(told[source], Outline)


class Devices(NamedTuple):
    """All ranks' devices, by rank, as they introduce themselves."""

    facts: list[dict[str, Any]]
    """What their times depend on."""
    keys: list[str]
    """In the latency database; the same for ranks that share a host."""
    kinds: list[DeviceKind]
    known: list[LayerTimes | None]
    """What the latency database knows of them."""
    wanted: list[int]
    """In which order the model's pieces tell most, as the predictor thinks; empty without one."""

    def order(self, rank: int, count: int) -> list[int]:
        """In which order a rank should time the model's ``count`` pieces."""
        mates = [n for n, kind in enumerate(self.kinds) if kind.processor == self.kinds[rank].processor]
        return probing_order(self.wanted or bit_reversed_order(count), mates.index(rank), len(mates))

    def together(self, times: Sequence[LayerTimes]) -> list[LayerTimes]:
        """What all ranks measured, with what those of one host measured made one."""
        hosts = {key: [one for one, own in zip(times, self.keys, strict=True) if own == key] for key in self.keys if times}
        return [merged(hosts[key]) for key in self.keys if times]


def introduce_devices(runtime: Runtime, job: Job, model: Outline, path: Path | None) -> Devices:
    """Who is there, and what rank 0's database, if there is one, knows of them."""
    messenger, seconds = runtime.messenger, runtime.startup_seconds
    facts = messenger.allgather(_facts(runtime, job), seconds, "the kind of each device")
    keys = [device_key(one) for one in facts]
    known = recall(path, model, keys) if path else [None] * runtime.size
    wanted = pieces_to_time(path, model) if path and not all(one and all(one.measured) for one in known) else []
    told = messenger.broadcast([msgspec.to_builtins(known), wanted], seconds, "what is known of each device")
    known, wanted = msgspec.convert(told, tuple[list[LayerTimes | None], list[int]])
    return Devices(facts, keys, [_kind(one) for one in facts], known, wanted)


def retime_doubted(
    runtime: Runtime, subject: Subject, doubts: Sequence[Sequence[Sequence[int]]], room: float
) -> list[list[TimedRange]]:
    """What each rank measures at the same time of the pieces that are ``doubted`` on it."""
    asked = [(start, stop) for start, stop in doubts[runtime.rank]]
    seen = runtime.agree("a second look", lambda: retime(subject, asked, room) if asked else [])
    gathered = runtime.messenger.allgather(seen, runtime.startup_seconds, "a second look")
    return msgspec.convert(gathered, list[list[TimedRange]])


class Report(msgspec.Struct, frozen=True):
    """What a rank tells rank 0."""

    times: LayerTimes
    rates: PairRates
    costs: MessageCosts
    data: bool
    memory: float
    shared: bool
    snapshots: bool = False


class Measured(NamedTuple):
    """What all ranks measured, by rank."""

    reports: list[Report]
    times: list[LayerTimes]
    """Of the reports, with what ranks of one host measured made one."""
    doubts: Sequence[Sequence[Sequence[int]]]
    """Pieces that a second look was for."""
    again: list[list[TimedRange]]
    """What that found."""


def pooled_profile(model: Outline, devices: Devices, seen: Measured, path: Path | None, assumed: bool) -> ClusterProfile:
    """Devices of a kind pooled, what is new kept in the database, what nobody has measured predicted. ``assumed``: all but
    rank 0, which alone has measured, are taken to be as fast."""
    pooled = pool(seen.times, devices.kinds, seen.again)
    # What a second look did not find again is not remembered.
    kept = [one if doubt else own for one, own, doubt in zip(pooled, seen.times, seen.doubts, strict=True)]
    leaders = {key: devices.keys.index(key) for key in devices.keys}  # of each host the first rank
    if path:
        there = {key: (devices.facts[n], kept[n]) for key, n in leaders.items() if any(kept[n].measured)}
        remember(path, model, there)
    predictor = None
    if not assumed and not all(all(one.measured) for one in pooled):  # nor any of their kind
        predictor = predictor_for(path, model, {key: kept[n] for key, n in leaders.items()})
    same = [one is not own for one, own in zip(pooled, seen.times, strict=True)]
    handled = pool_message_costs([report.costs for report in seen.reports], devices.kinds, same)
    said = [
        msgspec.structs.replace(report, times=one, costs=costs)
        for report, one, costs in zip(seen.reports, pooled, handled, strict=True)
    ]
    cluster = cluster_profile_of(model, said, [facts["host"] for facts in devices.facts], predictor)
    if assumed:
        others = [msgspec.structs.replace(device, assumed=n > 0) for n, device in enumerate(cluster.devices)]
        return msgspec.structs.replace(cluster, devices=others)
    return cluster


def cluster_profile_of(
    model: Outline, reports: list[Report], hosts: list[str], predictor: Predictor | None = None
) -> ClusterProfile:
    """All reports as one; what devices have not measured is predicted."""
    forward, backward, weights, update = impute([report.times for report in reports], model, predictor).tolist()
    devices = []
    for n, report in enumerate(reports):
        # What a quota does to long computing it does to the sum of all short pieces.
        stretch = report.times.stretch
        devices.append(
            DeviceProfile(
                host=hosts[n],
                forward=forward[n],
                backward=backward[n],
                weight_gradient=weights[n],
                update=update[n],
                encode={name: stretch * encode for name, (encode, _) in report.costs.codecs.items()},
                decode={name: stretch * decode for name, (_, decode) in report.costs.codecs.items()},
                seconds_per_byte=stretch * report.costs.seconds_per_byte,
                seconds_per_message=stretch * report.costs.seconds_per_message,
                shared=report.shared,
                memory=report.memory,
                snapshots=report.snapshots,
                data=report.data,
            )
        )
    # Each rank has measured what comes in.
    rate = np.array([report.rates.rate for report in reports]).T.tolist()
    latency = np.array([report.rates.latency for report in reports]).T.tolist()
    return ClusterProfile(model, devices, rate, latency)


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


def _kind(facts: dict[str, Any]) -> DeviceKind:
    """Of a device with these facts."""
    processor = {name: fact for name, fact in facts.items() if name not in ("host", "cores", "share")}
    return DeviceKind(device_key(processor), f"{facts['share']} of {facts['cores']}")
