"""The small CNN on devices that may be slow: each layer sleeps a little, five times as long while a file ``slow-RANK`` lies
in the working directory, and not at all once ``awake`` does. By the model's import path: "slow_layers:cnn"."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accept_mpi.models import Chain
from accept_mpi.models import cnn as plain_cnn

SECONDS = 0.01
_FLAG = Path(f"slow-{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}")
_AWAKE = Path("awake")


class _Nap(torch.autograd.Function):
    """Nothing, slowly, both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _sleep()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _sleep()
        return gradients[0]


def _sleep() -> None:
    if not _AWAKE.exists():
        time.sleep(SECONDS * (5 if _FLAG.exists() else 1))


class Sleepy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(_Nap.apply(x) if not x.is_meta else x)


def cnn(**args: Any) -> Chain:
    chain = plain_cnn(**args)
    return Chain([(name, lambda make=make: Sleepy(make())) for name, make in chain.layers])


def always_the_same(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric that never gets better."""
    return torch.zeros(())
