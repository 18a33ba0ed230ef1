"""A model on devices that say they have little memory. By its import path: "little_memory:mlp"."""

import os

from torch import nn

from accept_mpi.training import auto_plan, deployment


def mlp(memory: float, poor: int = -1) -> nn.Sequential:
    """3.8 MB with gradients and momentum, and ``memory`` bytes for a plan on each machine; none on rank ``poor``, which then
    has none for compiled kernels either."""
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", -2)) == poor:
        auto_plan.planned = lambda available: 0.0
        auto_plan.prepare = auto_plan.message_costs = deployment.prepare = None
    else:
        auto_plan.planned = lambda available: memory
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 256)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(256, 256)]
    return nn.Sequential(*layers, nn.Linear(256, 10))
