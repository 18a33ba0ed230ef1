"""A model whose stages compute for a given time and whose boundary carries a given number of bytes; run as a script, the
same training with sends that block (what a pipeline without a data-plane thread does)."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

FORWARD, BACKWARD = 0.020, 0.040  # seconds of computing a micro-batch and stage
FLOATS = 125_000  # 0.5 MB a micro-batch and direction


def burn(seconds: float) -> None:
    """Compute for this long."""
    until = time.monotonic() + seconds
    matrix = torch.ones(96, 96)
    while time.monotonic() < until:
        matrix = matrix @ matrix * 1e-3


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        burn(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        burn(BACKWARD)
        return gradient.clone()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Burn.apply(x * self.scale)


class Last(nn.Module):
    def forward(self, x):
        return x[:, :2]


def model() -> list[nn.Module]:
    return [Layer(), nn.Sequential(Layer(), Last())]


def data():
    x, y = torch.randn(160, FLOATS), torch.zeros(160, dtype=torch.int64)
    return (x, y), (x[:1], y[:1])


if __name__ == "__main__":
    from accept_mpi.comm import ends
    from accept_mpi.comm.runtime import Runtime
    from accept_mpi.training.run import train
    from accept_mpi.training.start import Options

    send = ends.Sender.send

    def blocking(self, *arguments, **keywords):
        send(self, *arguments, **keywords)
        self.drain(60)

    ends.Sender.send = blocking
    runtime = Runtime.start()
    try:
        train(runtime, Options(Path(sys.argv[1]), quiet=True))
    except BaseException as error:
        runtime.fail(error)
    runtime.finish(0)
