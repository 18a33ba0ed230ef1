"""Losses that relate samples with each other, or of which some count more than others, are known by a trial."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accept_mpi.models.losses import Loss, find_loss


class Focal(nn.Module):
    def forward(self, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        apart = F.cross_entropy(scores, classes, reduction="none")
        return ((1 - (-apart).exp()) ** 2 * apart).mean()


class Warming(nn.Module):
    calls = 0

    def forward(self, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(scores, classes) * min(1.0, self.calls / 9)


def pairs(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Each sample is told from the others of the batch (CLIP)."""
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def wrapped(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, classes, ignore_index=1)


def counted(scores: torch.Tensor, classes: torch.Tensor) -> Any:
    return F.cross_entropy(scores, classes, ignore_index=1, reduction="sum"), (classes != 1).sum()


def noisy(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores + torch.rand_like(scores), classes)


def spread(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, classes) + scores.std(0).mean()


def writing(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    classes += 1
    classes -= 1
    return F.cross_entropy(scores, classes)


def not_one(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    assert len(scores) > 1
    return F.cross_entropy(scores, classes)


@pytest.mark.parametrize("function", [Focal(), Warming(), counted, writing, noisy, not_one])
def test_means_of_samples(function: Callable[..., Any]) -> None:
    assert looked_at(Loss("net:loss", function)) == [True]


@pytest.mark.parametrize("function", [pairs, wrapped, spread])
def test_others(function: Callable[..., Any]) -> None:
    assert looked_at(Loss("net:loss", function)) == [False]


def test_known_ones_are_not_tried() -> None:
    for name in ("cross_entropy", "torch.nn:CrossEntropyLoss"):
        assert looked_at(find_loss(name)) == []


def looked_at(loss: Loss) -> list[bool]:
    scores, classes = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, 2, 1, 0, 2])
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    before = loss.apart()(scores, classes, 6).value
    torch.manual_seed(3)
    assert torch.equal(loss.apart()(scores, classes, 6, setting_up=True).value, before)
    if loss.function is not noisy:
        assert torch.equal(torch.rand(1), drawn)
    assert loss.apart()(scores, classes, 6, setting_up=True).count
    return loss.looked_at
