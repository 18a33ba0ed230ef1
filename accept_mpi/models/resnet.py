"""ResNet-18 (He et al. 2016) with the stem usual for 32 x 32 images, cut inside its blocks."""

import torch
from torch import nn

from accept_mpi.models.base import Chain, Named
from accept_mpi.models.blocks import Classifier, Pair, conv_bn, positive


class _First(nn.Module):
    """First half of a basic block: x -> (relu(norm(conv(x))), x)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = conv_bn(inputs, outputs, stride=stride)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.conv(x), x


class _Second(nn.Module):
    """Second half of a basic block: (h, x) -> relu(norm(conv(h)) + shortcut(x))."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = conv_bn(outputs, outputs, activation=None)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, kernel=1, stride=stride, activation=None)

    def forward(self, pair: Pair) -> torch.Tensor:
        h, x = pair
        return torch.relu(self.conv(h) + self.shortcut(x))


def resnet18(classes: int = 10, channels: int = 3) -> Chain:
    """ResNet-18 in 18 layers: a 3 x 3 stem without pooling, 8 blocks of two layers, a classifier.

    Images (n, channels, h, w) -> scores (n, classes). At a cut inside a block, the block's input crosses as the second
    tensor of a tuple.
    """
    positive(classes=classes, channels=channels)
    layers: list[Named] = [("stem", lambda: conv_bn(channels, 64))]
    inputs = 64
    for number in range(8):
        outputs = 64 << number // 2
        stride = 2 if number in (2, 4, 6) else 1
        shape = (inputs, outputs, stride)
        layers.append((f"block{number + 1}_first", lambda shape=shape: _First(*shape)))  # type: ignore[misc]
        layers.append((f"block{number + 1}_second", lambda shape=shape: _Second(*shape)))  # type: ignore[misc]
        inputs = outputs
    layers.append(("classifier", lambda: Classifier(512, classes)))
    return Chain(layers)
