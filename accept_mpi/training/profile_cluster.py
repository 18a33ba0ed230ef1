"""Turns the measurements of all ranks into one cluster profile."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from accept_mpi.comm.links import PairRates
from accept_mpi.comm.runtime import Runtime
from accept_mpi.device.cgroups import cpu_share
from accept_mpi.device.compute import here
from accept_mpi.job import Job, flows
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


def drawing(chain: Chain, job: Job, batch: MicroBatch) -> Callable[[], Outline]:
    """A function that draws the model's outline once, for the first who asks."""
    return cache(lambda: outline_of(chain, job, batch.inputs, batch.tree, batch.samples))


def agree_on_outline(runtime: Runtime, draw: Callable[[], Outline], source: int) -> Outline:
    """The model's outline, which rank ``source``, since it has data, draws for all ranks; they call this together."""
    drawn = runtime.agree("the model's layers", lambda: draw() if runtime.rank == source else None)
    told = runtime.messenger.allgather(msgspec.to_builtins(drawn), runtime.startup_seconds, "the model's layers")
    return msgspec.convert(told[source], Outline)


class Devices(NamedTuple):
    """All ranks' devices, by rank, with what is known of them before they measure."""

    facts: list[dict[str, Any]]
    """Facts that a device's times depend on."""
    keys: list[str]
    """Keys in the latency database; the same for ranks that share a host."""
    kinds: list[DeviceKind]
    known: list[LayerTimes | None]
    """Times in the latency database; None for a device that it does not have."""
    wanted: list[int]
    """Order of the model's pieces, most informative first, according to the predictor; empty without one."""

    def order(self, rank: int, count: int) -> list[int]:
        """The order in which a rank should time the model's ``count`` pieces."""
        mates = [n for n, kind in enumerate(self.kinds) if kind.processor == self.kinds[rank].processor]
        return probing_order(self.wanted or bit_reversed_order(count), mates.index(rank), len(mates))

    def together(self, times: Sequence[LayerTimes]) -> list[LayerTimes]:
        """Merge the times of ranks that share a host. ``times``: by rank, or empty."""
        hosts = {key: [one for one, own in zip(times, self.keys, strict=True) if own == key] for key in self.keys if times}
        return [merged(hosts[key]) for key in self.keys if times]


def introduce_devices(runtime: Runtime, job: Job, model: Outline, path: Path | None) -> Devices:
    """Exchange the facts of all devices, and share the times that rank 0's latency database at ``path`` has for them (None:
    there is no database). All ranks call this together."""
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
    """Time the doubted pieces again, on all ranks at the same time, which call this together; returns the results by rank.

    ``doubts``: pieces (first layer, last + 1) by rank; ``room``: most bytes of memory that this rank may take.
    """
    asked = [(start, stop) for start, stop in doubts[runtime.rank]]
    seen = runtime.agree("the times to check", lambda: retime(subject, asked, room) if asked else [])
    gathered = runtime.messenger.allgather(seen, runtime.startup_seconds, "the times to check")
    return msgspec.convert(gathered, list[list[TimedRange]])


class Report(msgspec.Struct, frozen=True):
    """Measurements that a rank reports to rank 0."""

    times: LayerTimes
    rates: PairRates
    costs: MessageCosts | None
    """None if the rank can hold no stage."""
    data: bool
    """True if the rank has the data set."""
    memory: float
    """Bytes that a stage may take."""
    shared: bool
    """True if the data-plane thread competes with computation for the same core."""
    snapshots: bool = False
    """True if the rank will keep copies of its own stage's state and of another stage's."""
    alone: bool = False
    """True if it cannot hold a stage together with others."""


class Measured(NamedTuple):
    """Measurements of all ranks, by rank."""

    reports: list[Report]
    times: list[LayerTimes]
    """Layer times of the reports, merged for ranks that share a host."""
    doubts: Sequence[Sequence[Sequence[int]]]
    """Pieces (first layer, last + 1) that were timed again."""
    again: list[list[TimedRange]]
    """Times of these pieces when timed again."""


def pooled_profile(model: Outline, devices: Devices, seen: Measured, path: Path | None, assumed: bool) -> ClusterProfile:
    """The cluster profile: devices of one kind are pooled, new times are stored in the latency database at ``path``, missing
    ones are predicted. ``assumed``: rank 0 alone has measured, and the others are assumed to be as fast."""
    pooled = pool(seen.times, devices.kinds, seen.again)
    # A doubted device is stored with its pooled times, so that what retiming did not confirm is forgotten.
    kept = [one if doubt else own for one, own, doubt in zip(pooled, seen.times, seen.doubts, strict=True)]
    leaders = {key: devices.keys.index(key) for key in devices.keys}  # the first rank of each host
    if path:
        there = {key: (devices.facts[n], kept[n]) for key, n in leaders.items() if any(kept[n].measured)}
        remember(path, model, there)
    predictor = None
    if not assumed and not all(all(one.measured) for one in pooled):  # on this device or another of its kind
        predictor = predictor_for(path, model, {key: kept[n] for key, n in leaders.items()})
    same = [one is not own for one, own in zip(pooled, seen.times, strict=True)]
    usual = next((report.costs for report in seen.reports if report.costs), MessageCosts({}, 0.0, 0.0))
    handled = pool_message_costs([report.costs or usual for report in seen.reports], devices.kinds, same)
    said = [msgspec.structs.replace(report, times=one) for report, one in zip(seen.reports, pooled, strict=True)]
    cluster = cluster_profile_of(model, said, handled, [facts["host"] for facts in devices.facts], predictor)
    if assumed:
        others = [msgspec.structs.replace(device, assumed=n > 0) for n, device in enumerate(cluster.devices)]
        return msgspec.structs.replace(cluster, devices=others)
    return cluster


def cluster_profile_of(
    model: Outline,
    reports: list[Report],
    costs: Sequence[MessageCosts],
    hosts: list[str],
    predictor: Predictor | None = None,
) -> ClusterProfile:
    """Combine all reports into a cluster profile; times that devices have not measured are predicted. ``costs``: of messages
    on each device."""
    forward, backward, weights, update = impute([report.times for report in reports], model, predictor).tolist()
    devices = []
    for n, report in enumerate(reports):
        # A CPU quota stretches many short pieces as much, in sum, as long computing.
        stretch = report.times.stretch
        devices.append(
            DeviceProfile(
                host=hosts[n],
                forward=forward[n],
                backward=backward[n],
                weight_gradient=weights[n],
                update=update[n],
                encode={name: stretch * encode for name, (encode, _) in costs[n].codecs.items()},
                decode={name: stretch * decode for name, (_, decode) in costs[n].codecs.items()},
                seconds_per_byte=stretch * costs[n].seconds_per_byte,
                seconds_per_message=stretch * costs[n].seconds_per_message,
                shared=report.shared,
                memory=report.memory,
                snapshots=report.snapshots,
                data=report.data,
                alone=report.alone,
                lanes=report.times.lanes,
            )
        )
    # Each rank has measured what it receives, so its row becomes a column.
    rate = np.array([report.rates.rate for report in reports]).T.tolist()
    latency = np.array([report.rates.latency for report in reports]).T.tolist()
    return ClusterProfile(model, devices, rate, latency)


def _facts(runtime: Runtime, job: Job) -> dict[str, Any]:
    """Facts that a device's times depend on, apart from the model."""
    host = runtime.hosts[runtime.rank]
    optimizer, kind = job.train.optimizer, job.pipeline.schedule
    precision = {"precision": job.train.precision} if job.train.precision != "float32" else {}  # as in early databases
    return {
        "host": host["host"],
        "machine": host["machine"],
        "cpu": here().name,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": host["cores"],
        "share": str(cpu_share()),
        "ranks": runtime.ranks_on_host,
        "threads": torch.get_num_threads(),
        "torch": host["versions"]["torch"],
        "schedule": "versions" if flows(kind) else "deferred" if kind == "zero-bubble" else "plain",
        "optimizer": f"{optimizer.name} {'with' if optimizer.momentum else 'without'} momentum",
        "loss": job.train.loss,
        **precision,
    }


def _kind(facts: dict[str, Any]) -> DeviceKind:
    """Kind of a device with these facts."""
    processor = {name: fact for name, fact in facts.items() if name not in ("host", "cores", "share")}
    return DeviceKind(device_key(processor), f"{facts['share']} of {facts['cores']}")
