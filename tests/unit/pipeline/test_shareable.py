"""Which layers a group of ranks can hold."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accept_mpi.pipeline.shareable import Watch


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def reason(layer: nn.Module, x: torch.Tensor) -> str:
    watch = Watch(["a"], [layer])
    out = layer(x)
    watch.after_forward()
    if out.requires_grad:
        out.sum().backward()
    return watch.after_backward()


@pytest.mark.parametrize(
    ("layer", "x", "expected"),
    [
        (nn.Linear(4, 4), torch.ones(3, 4), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.ones(3, 4), ""),
        (Counting(), torch.ones(3, 4), 'a forward changes the buffer "a.calls"'),
        (
            nn.InstanceNorm1d(4, track_running_stats=True),
            torch.ones(3, 4, 5),
            'a forward changes the buffer "a.running_mean"',
        ),
        (Recomputed(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(3, 4).requires_grad_(), "a backward changes the buffer"),
        (nn.Embedding(9, 4, sparse=True), torch.tensor([1, 2]), "sparse"),
        (nn.LazyLinear(4), torch.ones(3, 4), 'the first forward makes "a.weight"'),
        (nn.BatchNorm1d(4).double(), torch.ones(3, 4).double(), "of another type than float32"),
    ],
)
def test_what_a_forward_leaves_behind(layer: nn.Module, x: torch.Tensor, expected: str) -> None:
    found = reason(layer, x)
    assert expected in found
    assert bool(found) == bool(expected)
