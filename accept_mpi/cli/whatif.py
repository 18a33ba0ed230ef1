"""Cluster profiles without a cluster: a run's own with changes, or that of a fleet on paper.

For a device on paper, this machine is timed with the threads and instruction set that the fleet gives the device, and the
times are scaled by its share of a core. Its figures are therefore only as good as the fleet's persona.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from accept_mpi.data import of_job as data_of
from accept_mpi.data.calendar import micro_batch_size, micro_batches_of
from accept_mpi.device.allocator import keep_memory
from accept_mpi.device.fleet import Host
from accept_mpi.device.memory import planned
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.job_file import parse, read_text
from accept_mpi.logs.reader import open_log
from accept_mpi.models import chain_of
from accept_mpi.models.losses import loss_of
from accept_mpi.planning.codec_choice import codings_of
from accept_mpi.planning.micro_batches import of_size
from accept_mpi.prediction.imputation import impute
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.lane_timer import time_lanes
from accept_mpi.profiling.layer_timer import MicroBatch, Subject, micro_batch, time_layers
from accept_mpi.profiling.layer_times import LayerTimes
from accept_mpi.profiling.message_costs import MessageCosts, message_costs
from accept_mpi.profiling.outline import Outline, outline_of

_SHAPING = ("memory_format", "freeze", "unfreeze", "lora")
"""Keys of ``[train]`` that change what layers take."""
_CARRIED = 0.93  # share of a link's rate that is left to messages by TCP and MPI
_UNLIMITED = 1e9  # bytes/s of a link without a limit
_LATENCY = 2e-4  # seconds
_BYTE_CPU = 2e-9  # seconds of a whole core to send or receive a byte through TCP
_MESSAGE_CPU = 1e-4  # the same for a message without its bytes, within MPI
_PROCESS = 450 << 20  # bytes of Python, torch, MPI and a small data set, without a model
_DEADLINE = 300.0


class _Measured(NamedTuple):
    """Measurements of this machine."""

    model: Outline
    times: LayerTimes
    costs: MessageCosts


def cluster_of_log(path: Path, job: Job) -> ClusterProfile:
    """The cluster profile from which a run was planned.

    Raises UserError if the run was not planned by measuring, or its measurements do not apply to this job: another model,
    micro-batch size or number of threads, or codecs that it did not measure.
    """
    with open_log(path) as log:
        if "survey" not in log:
            why = 'as runs with pipeline.cuts = "auto" on several ranks are'
            raise UserError(f"{path}: this run was not planned by measuring, {why}")
        cluster, ran = ClusterProfile.read(log["survey"]), msgspec.json.decode(log.attrs["job"])
    timed = cluster.outline.samples
    job = of_size(job, timed)
    if (asked := micro_batch_size(job)) != timed:
        raise UserError(
            f"{path}: layers were timed with {timed} samples per micro-batch, but train.batch_size = "
            f"{job.train.batch_size} and train.micro_batches = {job.train.micro_batches} make {asked}; keep their ratio, or "
            "run this job to measure anew"
        )
    try:
        wanted = codings_of(job)
    except ValueError as error:
        raise UserError(f"pipeline.forward or backward: {error}") from error
    known = set.intersection(*({*device.encode} & {*device.decode} for device in cluster.devices))
    if missing := [name for name in wanted if name not in known]:
        raise UserError(
            f"{path}: this run did not measure what coding with {', '.join(missing)} takes; "
            f"run this job, which may use it, to measure anew"
        )
    threads, timed_threads = job.train.threads, ran["train"]["threads"]
    if threads != timed_threads:
        raise UserError(
            f"{path}: layers were timed with train.threads = {timed_threads}, the job asks for {threads}; "
            f"run this job to measure anew"
        )
    if not _same_model(cluster.outline, job, ran):
        raise UserError(
            f"{path}: the layers timed were those of another model than the job's (with other parts frozen, perhaps), or "
            f"took data of another shape, memory format or precision; run this job to measure anew"
        )
    return _with_weights(cluster) if job.pipeline.schedule == "zero-bubble" else cluster


def _with_weights(cluster: ClusterProfile) -> ClusterProfile:
    """A copy in which devices without measured weight gradients (another schedule ran) have half of each backward."""
    devices = [
        device
        if any(device.weight_gradient)
        else msgspec.structs.replace(device, weight_gradient=[v / 2 for v in device.backward])
        for device in cluster.devices
    ]
    return msgspec.structs.replace(cluster, devices=devices)


def _same_model(timed: Outline, job: Job, ran: dict[str, Any]) -> bool:
    """True if a job's layers are those that were timed for the job that ran. Builds the model only if the jobs' settings
    differ."""
    if timed.precision != job.train.precision:
        return False
    model, data = (msgspec.to_builtins(section) == ran[key] for key, section in (("model", job.model), ("data", job.data)))
    train = msgspec.to_builtins(job.train)
    if model and data and all(train[key] == ran["train"].get(key, train[key]) for key in _SHAPING):
        return True
    with contextlib.redirect_stdout(sys.stderr):  # a user's code may print, and standard output is for the plan
        first = timed.layers[0]
        batch = MicroBatch(tuple(spec.zeros() for spec in first.inputs), None, first.tree, timed.samples)
        if not data:
            batch = micro_batch(data_of(job)[0], job)
        chain = chain_of(job, lambda: batch.value)
        if chain.names != list(timed.names):
            return False
        return _sizes(outline_of(chain, job, batch.inputs, batch.tree, batch.samples)) == _sizes(timed)


def _sizes(model: Outline) -> tuple[bool, list[tuple[int, int, list[tuple[int, ...]]]]]:
    """The parts of an outline by which models are compared: memory format, and each layer's parameters, bytes of frozen ones
    and input shapes."""
    layers = [(one.parameters, one.frozen_bytes, [spec.shape for spec in one.inputs]) for one in model.layers]
    return model.channels_last, layers


def cluster_of_fleet(hosts: Sequence[Host], job: Path, overrides: Iterable[str]) -> ClusterProfile:
    """The cluster profile of a fleet on paper, timed on this machine. Raises UserError if layers cannot be timed here."""
    measured: dict[frozenset[tuple[str, str]], _Measured] = {}
    devices = []
    for host in hosts:
        kind = frozenset(host.environment().items())  # all that a measurement knows of a host
        if kind not in measured:
            measured[kind] = _measure_here(host, job, list(overrides))
        model, times, costs = measured[kind]
        forward, backward, weights, update = (host.threads / host.cpu * impute([times], model)[:, 0]).tolist()
        devices.append(
            DeviceProfile(
                host=host.name,
                forward=forward,
                backward=backward,
                weight_gradient=weights,
                update=update,
                encode={name: encode / min(1.0, host.cpu) for name, (encode, _) in costs.codecs.items()},
                decode={name: decode / min(1.0, host.cpu) for name, (_, decode) in costs.codecs.items()},
                seconds_per_byte=costs.seconds_per_byte / min(1.0, host.cpu),
                seconds_per_message=costs.seconds_per_message / min(1.0, host.cpu),
                shared=True,
                lanes=times.lanes,
                memory=planned((host.memory or 1 << 40) - _PROCESS),
            )
        )
    links = np.array([_bytes_per_second(host.link) for host in hosts])
    rate = np.minimum(links[:, None], links[None, :])
    return ClusterProfile(model, devices, rate.tolist(), np.full_like(rate, _LATENCY).tolist())


def joined(cluster: ClusterProfile, more: ClusterProfile) -> ClusterProfile:
    """The devices of both profiles; a link between the two groups is as fast as the slower device's own link.

    Raises UserError if the profiles have different models or micro-batch sizes.
    """
    if more.outline.key != cluster.outline.key:
        raise UserError("the added devices were timed on another model or size of micro-batch than the log's")
    both = ClusterProfile(cluster.outline, cluster.devices + more.devices, [], [])
    count, before = len(both.devices), len(cluster.devices)
    host_links = np.array([cluster.host_link(n) for n in range(before)] + [more.host_link(n) for n in range(count - before)])
    rate, latency = np.minimum(host_links[:, None], host_links[None, :]), np.full((count, count), _LATENCY)
    rate[:before, :before], latency[:before, :before] = cluster.rate, cluster.latency
    return msgspec.structs.replace(both, rate=rate.tolist(), latency=latency.tolist())


def with_links(cluster: ClusterProfile, links: Mapping[str, float]) -> ClusterProfile:
    """A copy with other links (``links``: Mbit/s by host).

    Between two hosts the slower one's own link counts; rates between ranks on the same host stay. Raises UserError if there
    is no such host.
    """
    hosts = [device.host for device in cluster.devices]
    for host in links:
        if host not in hosts:
            raise UserError(f"--link {host}: no such host; there are {', '.join(dict.fromkeys(hosts))}")
    host_links = np.array(
        [_bytes_per_second(links[host]) if host in links else cluster.host_link(n) for n, host in enumerate(hosts)]
    )
    names, touched = np.array(hosts), np.isin(hosts, list(links))
    crossing = (names[:, None] != names) & (touched[:, None] | touched)
    return msgspec.structs.replace(
        cluster, rate=np.where(crossing, np.minimum(host_links[:, None], host_links), cluster.rate).tolist()
    )


def _bytes_per_second(mbit: float | None) -> float:
    return _CARRIED * mbit * 1e6 / 8 if mbit else _UNLIMITED


def _measure_here(host: Host, job: Path, overrides: list[str]) -> _Measured:
    """Measure this machine with a host's threads and instruction set, in a new process: both are fixed at its start."""
    command = [sys.executable, "-m", "accept_mpi.cli.whatif", str(job), *overrides]
    environment = os.environ | host.environment()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{job}: timing layers on this machine took longer than {_DEADLINE:.0f} s") from error
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"{job}: layers cannot be timed on this machine: {text[-1] if text else 'no message'}")
    return msgspec.msgpack.decode(done.stdout, type=_Measured)


def _measure(path: Path, overrides: list[str]) -> _Measured:
    """Measure this machine in this process, for the job at ``path``."""
    job = parse(read_text(path), str(path), overrides)
    keep_memory()
    train, _ = data_of(job)
    batch = micro_batch(train, job)
    chain = chain_of(job, lambda: batch.value)
    model = outline_of(chain, job, batch.inputs, batch.tree, batch.samples)
    subject = Subject(chain, model, job, loss_of(job), *batch)
    times = time_layers(subject, job.pipeline.probe_seconds)
    times = msgspec.structs.replace(times, lanes=time_lanes(subject, micro_batches_of(job)))
    return _Measured(model, times, message_costs(codings_of(job), _BYTE_CPU, _MESSAGE_CPU))


if __name__ == "__main__":
    # Standard output carries the answer, so whatever a user's code prints goes to standard error.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        try:
            answer.write(msgspec.msgpack.encode(_measure(Path(sys.argv[1]), sys.argv[2:])))
        except UserError as mistake:
            sys.exit(str(mistake))
