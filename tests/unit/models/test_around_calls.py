"""What a forward does around its calls, without a trace in them, is done as in the plain model, or refused in a sentence."""

from typing import Any

import torch
from recorded_models import check
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.other, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)


def every_cut(count: int) -> list[list[int]]:
    return [[], *([n] for n in range(1, count)), list(range(1, count))]


def loss(result: Any) -> torch.Tensor:
    return result.float().square().mean()


class OtherOrder(Net):
    """Uses its parameters in another order in evaluation, and some only there or in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        for layer in (self.b, self.other) if self.training else (self.other, self.b):
            x = torch.tanh(layer(x))
        return self.c(x) if self.training else x


def test_cut_only_where_training_and_evaluation_can_both_be_cut() -> None:
    assert len(check(OtherOrder, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)) == 3


class EndsEarly(Net):
    """In evaluation, without its last layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.other(torch.tanh(self.b(x))))) if self.training else x


def test_layers_of_which_evaluation_does_nothing() -> None:
    assert len(check(EndsEarly, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)) == 4
