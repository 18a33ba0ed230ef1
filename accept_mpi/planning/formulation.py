"""Turns a cluster profile into the partitioner's problem: what layers, messages and codecs cost where, and what fits."""

from collections.abc import Sequence

import numpy as np

from accept_mpi.codecs.coding import bits_of
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job, flows
from accept_mpi.models.shared import uncuttable
from accept_mpi.plan import Lanes, at_once
from accept_mpi.planning.codec_choice import codec_pairs
from accept_mpi.planning.memory import MemoryModel, summed_in
from accept_mpi.planning.message_model import message_seconds
from accept_mpi.planning.problem import F64, Problem
from accept_mpi.planning.ties import trained_in
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile

NEVER = 1e9
"""Seconds per micro-batch that mark a layer which a device must not get."""
_TOO_MANY = 1e15
"""Micro-batches in flight, and versions of weights, that fit on no device."""
_FILL = {"1f1b-async": 0.0, "1f1b-delayed": 0.0, "1f1b": 1.0, "gpipe": 1.0, "zero-bubble": 1 / 3}
"""``Problem.fill`` by schedule (zero-bubble: ZB-H1, Qi et al. 2023, section 2.2)."""


def stage_counts(cluster: ClusterProfile, job: Job) -> list[int]:
    """The most stages for which ``problem_of`` makes problems: all devices; where the memory of a stage depends on how many
    stages are before it, fewer, too, since a problem counts what the longest pipeline takes."""
    count = len(cluster.devices)
    if job.pipeline.schedule == "zero-bubble" or job.pipeline.vertical_sync:
        return sorted({count, *(1 << n for n in range(count.bit_length()))})
    return [count]


def problem_of(cluster: ClusterProfile, job: Job, share: float = 1.0, most: int = 0) -> Problem:
    """The partitioner's problem. Links carry ``share`` of their measured rates. ``most``: stages that a plan may have (0: as
    many as devices); others do not fit."""
    outline, devices = cluster.outline, cluster.devices
    count, layers = len(devices), len(outline.layers)
    most = most or count
    forwards = 2 if job.pipeline.recompute == "on" else 1
    seconds = np.array(
        [forwards * np.array(d.forward) + d.backward + np.array(d.update) / micro_batches_of(job) for d in devices]
    )
    for n, device in enumerate(devices):
        if not device.data:
            seconds[n, [0, -1]] = NEVER
    values, uncoded, other = np.array([outline.crossing(layer) for layer in range(layers + 1)], float).T.copy()
    names, pairs = codec_pairs(job.pipeline)
    if all(name == "none" for pair in pairs for name in pair):
        values = uncoded / 4
    # Uncoded, all values count as those of mean width, since a problem has one number of bytes per value for all boundaries.
    width = float(uncoded.sum() / values.sum()) if values.any() else 4.0
    host_links = share * np.array([min(cluster.host_link(n), 1e15) for n in range(count)])
    rate = np.array(cluster.rate, float)
    np.fill_diagonal(rate, 1e15)
    # Lanes that the job asks for take memory on every device; what those of "auto" take is looked at when there is a plan.
    lanes: Lanes = 1 if job.pipeline.lanes == "auto" or job.pipeline.lanes == "off" else job.pipeline.lanes
    needs = MemoryModel(cluster, job, most, job.pipeline.slack, [at_once(lanes)] * most)
    whole = None if needs.whole is None else np.minimum(needs.in_flight, at_once(lanes) * needs.whole)
    gradients = np.array(trained_in(outline, 0, layers, job.parts_ties), float)
    again = np.array([layer.trained_bytes for layer in outline.layers]) - gradients  # as ``memory_of`` counts it
    return Problem(
        layer_seconds=seconds,
        values=values,
        other=other,
        rate=share * np.minimum(rate, 1e15),
        host_link=host_links,
        codecs=tuple(names),
        bytes_per_value=np.array([max(_bytes_of(name, width) for name in pair) for pair in pairs]),
        messages=_messages(devices, values, other, host_links, pairs, width),
        state=np.array([needs.state(layer) for layer in outline.layers]) - needs.values * again,
        fixed=np.array([needs.fixed(layer) for layer in outline.layers]) + summed_in(lanes) * gradients + needs.kept * again,
        least=np.array([needs.least(layer) for layer in outline.layers]) - needs.ends * again,
        saved_bytes=np.array([float(layer.saved_bytes) for layer in outline.layers]),
        uncuttable=uncuttable(outline.shared, layers, job.parts_ties),
        capacity=np.array([device.memory for device in devices], float),
        in_flight=_up_to(count, needs.in_flight),
        whole=None if whole is None else _up_to(count, whole),
        state_copies=_up_to(count, needs.state_copies),
        micro_batches=1e9 if flows(job.pipeline.schedule) else float(micro_batches_of(job)),
        real_micro_batches=float(micro_batches_of(job)),
        fill=_FILL[job.pipeline.schedule],
    )


def _up_to(count: int, each: F64) -> F64:
    """Numbers by stages behind, for up to ``count``: too many where there cannot be so many."""
    return np.concatenate([each, np.full(count - len(each), _TOO_MANY)])


def _messages(
    devices: Sequence[DeviceProfile],
    values: F64,
    other: F64,
    host_links: F64,
    pairs: Sequence[tuple[str, str]],
    width: float,
) -> F64 | None:
    """Seconds of a device's computing core per micro-batch (devices, layers + 1, codecs) for the messages of a boundary in
    front of a layer; None if the data plane has a core of its own on all devices.

    Each end of a boundary sends one message and receives one, activations or gradients; the mean of both ends is taken.
    """
    if not any(device.shared for device in devices):
        return None
    seconds = np.zeros((len(devices), len(values), len(pairs)))
    for n, device in enumerate(devices):
        if not device.shared:
            continue
        fixed = device.seconds_per_byte, device.seconds_per_message
        for k, pair in enumerate(pairs):
            for name in pair:
                nbytes = values * _bytes_of(name, width) + other
                out = message_seconds(values, nbytes, device.encode[name], *fixed, nbytes / host_links[n])
                seconds[n, :, k] += (out + message_seconds(values, nbytes, device.decode[name], *fixed)) / 2
    return seconds


def _bytes_of(name: str, width: float) -> float:
    """Bytes that a codec takes for a value that takes ``width`` bytes without one."""
    return width if name == "none" else min(bits_of(name) / 8, width)
