"""Clusters on paper for tests: devices of given speeds with a small model of equal layers."""

import torch
from torch import nn

from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import as_chain
from accept_mpi.planning.codec_choice import codings_of
from accept_mpi.profiling.cluster_profile import ClusterProfile, DeviceProfile
from accept_mpi.profiling.outline import outline

JOB = """
[model]
name = "m"
[data]
name = "d"
[train]
steps = 1
batch_size = 32
micro_batches = 8
[pipeline]
schedule = "1f1b-async"
groups = false
[output]
directory = "r"
"""
LAYERS = 12
WIDTH = 64


def job(*changes: str) -> Job:
    return parse(JOB, "job", changes)


def cluster(*speeds: float, rate: float = 1e9, of: Job | None = None, **changed: list[object]) -> ClusterProfile:
    """Devices that take so many times 1 ms forward and 2 ms back for each of 12 equal layers of 64 x 64."""
    chain = as_chain([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    codecs = codings_of(of or job())
    devices = [
        DeviceProfile(**{
            "host": f"edge{n}", "forward": [1e-3 * speed] * LAYERS, "backward": [2e-3 * speed] * LAYERS,
            "weight_gradient": [1e-3 * speed] * LAYERS, "update": [0.0] * LAYERS, "encode": dict.fromkeys(codecs, 0.0),
            "decode": dict.fromkeys(codecs, 0.0), "seconds_per_byte": 0.0, "shared": False, "memory": 1e9,
        } | {key: values[n] for key, values in changed.items()})
        for n, speed in enumerate(speeds)
    ]  # fmt: skip
    count = len(speeds)
    latency = [[0.0] * count for _ in range(count)]
    return ClusterProfile(
        outline(chain, 0, (torch.zeros(4, WIDTH),)), devices, [[rate] * count for _ in range(count)], latency
    )
