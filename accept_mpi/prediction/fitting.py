"""Small networks and how they are trained."""

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from accept_mpi.pipeline.optimizer import leave_the_compiler_out, update

_BATCH = 8
BETA = 0.02  # logarithm of a ratio from which on errors count as they are, not squared


def some_of(count: int, generator: torch.Generator) -> list[int]:
    """A batch of what is known."""
    return torch.randint(count, (min(_BATCH, count),), generator=generator).tolist()


def descend(
    network: nn.Module, losses: Callable[[int], list[torch.Tensor]], steps: int, rate: float, until: float = math.inf
) -> None:
    """AdamW with a cosine's rate on the mean of what ``losses`` gives for each step; done by ``until`` (monotonic)."""
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
    """One hidden layer."""
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))
