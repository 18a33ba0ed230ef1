"""Run under mpirun: ``train`` jobs with a device for each rank, given as in "cuda,cpu"; "late" stands for a device to and
from which tensors take a while."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from accept_mpi.comm.runtime import Runtime
from accept_mpi.device import compute
from accept_mpi.device.compute import Compute, Given
from accept_mpi.training.run import train
from accept_mpi.training.start import Options

SECONDS = 0.004


class Late(Compute):
    """The CPU; but what crosses is not there at once, and not a number until then."""

    alone = "it is computed late"

    def __init__(self, device: str) -> None:
        super().__init__("cpu")

    def fetch(self, tensors: compute.Tensors) -> compute.Tensors:
        return self.give(tensors)

    def take(self, tensors: compute.Tensors) -> compute.Tensors:
        if isinstance(tensors, Given):
            tensors.ready.__self__.wait()
        return tuple(tensors)

    def give(self, tensors: Sequence[torch.Tensor | None]) -> compute.Tensors:
        kept = [None if one is None else one.detach().clone() for one in tensors]
        given = [
            None if one is None else torch.full_like(one, float("nan") if one.is_floating_point() else 0) for one in kept
        ]
        arrived = threading.Event()

        def arrive() -> None:
            for one, value in zip(given, kept, strict=True):
                if one is not None:
                    one.detach().copy_(value)
            arrived.set()

        for one, like in zip(given, tensors, strict=True):
            if one is not None and like is not None:
                one.requires_grad_(like.requires_grad)
        threading.Timer(SECONDS, arrive).start()
        return Given(given, arrived.is_set)


runtime = Runtime.start()
try:
    device = sys.argv[1].split(",")[runtime.rank]
    if device == "late":
        compute.Gpu, torch.cuda.device_count, device = Late, lambda: 1, "cuda"
    os.environ["ACCEPT_MPI_DEVICE"] = device
    for job in sys.argv[2:]:
        train(runtime, Options(Path(job), quiet=True))
except BaseException as error:
    runtime.fail(error)
runtime.finish(0)
