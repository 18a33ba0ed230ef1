"""Small regression networks and their training loop."""

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from accept_mpi.pipeline.optimizer import update
from accept_mpi.without_compiler import leave_the_compiler_out

_BATCH = 8
BETA = 0.02  # log ratio above which the smooth L1 loss is linear instead of quadratic


def some_of(count: int, generator: torch.Generator) -> list[int]:
    """Indices of a random batch from ``count`` examples."""
    return torch.randint(count, (min(_BATCH, count),), generator=generator).tolist()


def descend(
    network: nn.Module, losses: Callable[[int], list[torch.Tensor]], steps: int, rate: float, until: float = math.inf
) -> None:
    """Minimize the mean of ``losses(step)`` by AdamW with a cosine schedule of the learning ``rate``.

    The time of ``until`` (``time.monotonic``) ends it before all ``steps`` are made; the schedule takes that into account.
    """
    leave_the_compiler_out()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-3)
    began = time.monotonic()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - began) / max(until - began, 1e-9))
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * done)) / 2
        torch.stack(losses(step)).mean().backward()
        update(optimizer)


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """A network with one hidden layer of ``width`` units (SiLU)."""
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))
