from typing import Any

import torch
from test_stage import make, received
from torch import nn

from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.suspects import Suspects
from accept_mpi.pipeline.trials import copy_of
from accept_mpi.tree import packed


class Blow(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / 0


def suspect(stage: Stage, x: torch.Tensor, target: Any = None) -> int:
    assert not stage.forward(0, 0, (x,), target=target).sound
    return Suspects().find(stage, 0, 0, Inputs((x,), packed(1)), target)


def test_names_the_layer_that_makes_infinity() -> None:
    blow = Blow()
    stage, suspects = make([nn.Linear(3, 3), blow, nn.ReLU()]), Suspects()
    given = Inputs((received(2, 3),), packed(1))
    assert not stage.forward(0, 0, given.tensors).sound
    assert [suspects.find(stage, 0, 0, given, None) for _ in range(4)] == [3, 3, 3, 0]  # layer 1; not for ever
    assert blow.calls == 1  # the others were of copies
    assert make([nn.Linear(3, 3)]).forward(0, 0, given.tensors).sound


class Slope(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return slope


def test_a_layer_may_take_derivatives() -> None:
    """The search had no gradients, and ended the run with torch's error."""
    assert suspect(make([nn.Linear(3, 3), Slope(), nn.ReLU(inplace=True), Blow()]), received(2, 3)) == 5


def test_data_that_are_not_finite_are_named() -> None:
    """It was the loss that they were said to come out of."""
    layers, nan, classes = [nn.Linear(3, 3)], torch.full((2, 3), torch.nan), torch.zeros(2, dtype=torch.long)
    assert suspect(make(layers), nan) == 1
    assert suspect(make(layers, last=True), nan, classes) == 1
    assert suspect(make(layers, last=True), torch.ones(2, 3), nan) == 1


def test_a_search_leaves_gradients_to_a_lane_beside() -> None:
    """One computes backwards meanwhile, and gives its gradients to who sums them: they came back, and counted twice."""
    stage = make([nn.Linear(3, 3)])
    stage.forward(0, 0, (received(2, 3),))
    stage.backward(0, 0, (torch.ones(2, 3),))
    with copy_of(stage):
        assert all(gradient is not None for gradient in stage.exchange_gradients())
    assert all(parameter.grad is None for parameter in stage.parameters)
