"""Building blocks that several models share."""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


def positive(**numbers: int) -> None:
    """Raise ValueError for the first argument below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def share(**numbers: float) -> None:
    """Raise ValueError for the first argument that is not in [0, 1)."""
    for name, number in numbers.items():
        if not 0 <= number < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {number}")


def conv_bn(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: Callable[..., nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution without bias, batch norm and, unless ``activation`` is None, an activation in place."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out")
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs))
    if activation is not None:
        parts["activation"] = activation(inplace=True)
    return nn.Sequential(parts)


class Classifier(nn.Module):
    """Global average pool, dropout, linear: (n, features, h, w) -> scores (n, classes)."""

    def __init__(self, features: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(self.dropout(x.mean((2, 3))))
        return scores
