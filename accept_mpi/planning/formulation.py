"""From what devices have measured to the partitioner's problem: what layers, messages and codecs cost where; what fits."""

from collections.abc import Sequence

import numpy as np

from accept_mpi.codecs.coding import bits_of
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job
from accept_mpi.models.shared import uncuttable
from accept_mpi.planning.codec_choice import codec_pairs
from accept_mpi.planning.memory import MemoryModel
from accept_mpi.planning.message_model import per_message, while_sending
from accept_mpi.planning.problem import Problem
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile

NEVER = 1e9
"""Seconds of a layer that a device must not get."""
_MOST_RUNS = 1e7  # of layers on devices, that have a cost of their own
_FILL = {"1f1b-async": 0.0, "1f1b": 1.0, "gpipe": 1.0, "zero-bubble": 1 / 3}  # ZB-H1: Qi et al. 2023, section 2.2


def problem_of(cluster: ClusterProfile, job: Job, share: float = 1.0) -> tuple[Problem, list[str]]:
    """The partitioner's problem, and the names of its codecs. Links carry ``share`` of what they were measured to."""
    outline, devices = cluster.outline, cluster.devices
    count, layers = len(devices), len(outline.layers)
    seconds = np.array([np.add(d.forward, d.backward) + np.array(d.update) / micro_batches_of(job) for d in devices])
    for n, device in enumerate(devices):
        if device.shared:  # two messages a micro-batch less for a stage at an end (``_messages``)
            ends = seconds[n, [0, -1]]
            seconds[n, [0, -1]] = np.maximum(ends / 10, ends - 2 * per_message(device.seconds_per_message))
        if not device.data:
            seconds[n, [0, -1]] = NEVER
    crossings = [outline.crossing(layer) for layer in range(layers)] + [(0, 0)]
    names, pairs = codec_pairs(job.pipeline)
    host_links = share * np.array([min(cluster.host_link(n), 1e15) for n in range(count)])
    rate = np.array(cluster.rate, float)
    np.fill_diagonal(rate, 1e15)
    needs = MemoryModel(cluster, job, count)
    return Problem(
        layer_seconds=seconds,
        extra_seconds=_messages(devices, layers),
        values=np.array([values for values, _ in crossings], float),
        other=np.array([other for _, other in crossings], float),
        rate=share * np.minimum(rate, 1e15),
        host_link=host_links,
        codecs=tuple(names),
        bytes_per_value=np.array([max(map(bits_of, pair)) / 8 for pair in pairs]),
        coding=np.array(
            [
                [_handling(d, float(host_link), *pair) for pair in pairs]
                for d, host_link in zip(devices, host_links, strict=True)
            ]
        ),
        state=np.array([needs.state(layer) for layer in outline.layers]),
        saved_bytes=np.array([float(layer.saved_bytes) for layer in outline.layers]),
        uncuttable=uncuttable(outline.shared, layers),
        capacity=np.array([device.memory for device in devices], float),
        in_flight=needs.in_flight,
        state_copies=needs.state_copies,
        micro_batches=float(micro_batches_of(job)) if job.pipeline.schedule != "1f1b-async" else 1e9,
        fill=_FILL[job.pipeline.schedule],
    ), names


def _messages(devices: Sequence[DeviceProfile], layers: int) -> np.ndarray | None:
    """(devices, layers + 1, layers + 1): seconds that the four messages of a stage between two others take from its device's
    computing core each micro-batch. None where none do, or runs of layers are too many to list."""
    each = np.array([4 * per_message(device.seconds_per_message) if device.shared else 0.0 for device in devices])
    if not each.any() or len(devices) * (layers + 1) ** 2 >= _MOST_RUNS:
        return None
    return each[:, None, None] * np.triu(np.ones((layers + 1, layers + 1)), 1)


def _handling(device: DeviceProfile, host_link: float, forward: str, backward: str) -> float:
    """Seconds that a boundary takes from a device's computing core for each value: one message out, another in. Each
    counts as one that must be looked after while it is sent; where it need not be, it is small, and that costs little."""
    if not device.shared:
        return 0.0
    coding = sum(costs[name] for costs in (device.encode, device.decode) for name in (forward, backward)) / 2
    nbytes = (bits_of(forward) + bits_of(backward)) / 8  # in and out
    return coding + nbytes * device.seconds_per_byte + while_sending(nbytes / 2 / host_link, device.seconds_per_message)
