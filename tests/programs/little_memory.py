"""A model on devices that say they have little memory. By its import path: "little_memory:mlp"."""

from torch import nn

from accept_mpi.training import auto_plan


def mlp(memory: float) -> nn.Sequential:
    """3.8 MB with gradients and momentum, and ``memory`` bytes for a plan on each machine."""
    auto_plan.planned = lambda available: memory
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(192, 256)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(256, 256)]
    return nn.Sequential(*layers, nn.Linear(256, 10))
