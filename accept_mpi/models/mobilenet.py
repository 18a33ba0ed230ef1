"""MobileNetV2 (Sandler et al. 2018) with the stem and strides usual for 32 x 32 images, cut inside its blocks."""

import torch
from torch import nn

from accept_mpi.models.base import Chain, Named
from accept_mpi.models.blocks import Classifier, Pair, conv_bn, positive, share

# Table 2 of the paper: expansion t, channels c, repeats n, stride s; the first stride of 2 is 1 here (32 x 32 images).
_BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class _Branch(nn.Module):
    """The first layer of a residual block: x -> (layer(x), x)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Pair:
        return self.layer(x), x


class _Along(nn.Module):
    """A layer within a residual block: (h, x) -> (layer(h), x)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, pair: Pair) -> Pair:
        h, x = pair
        return self.layer(h), x


class _Join(nn.Module):
    """The last layer of a residual block: (h, x) -> layer(h) + x."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, pair: Pair) -> torch.Tensor:
        h, x = pair
        joined: torch.Tensor = self.layer(h) + x
        return joined


class _Plain(nn.Module):
    """A layer of a block without residual, wrapped to have the same parameter names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def mobilenetv2(classes: int = 10, channels: int = 3, width: float = 1.0, dropout: float = 0.2) -> Chain:
    """MobileNetV2 in 53 layers. Images (n, channels, h, w) -> scores (n, classes).

    A block is three layers (expand | depthwise | project; the first block has no expand). In a block with a residual, the
    block's input travels along as the second tensor of a tuple, so that cuts inside the block are possible. ``width`` scales
    all channels, rounded to multiples of 8 as in the paper.
    """
    positive(classes=classes, channels=channels)
    share(dropout=dropout)
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    before = _round(32 * width)
    layers: list[Named] = [("stem", lambda c=before: conv_bn(channels, c, activation=nn.ReLU6))]  # type: ignore[misc]
    number = 0
    for expansion, base, repeats, first_stride in _BLOCKS:
        for repeat in range(repeats):
            number += 1
            after = _round(base * width)
            stride = first_stride if repeat == 0 else 1
            layers += _block(f"block{number:02}", before, after, expansion, stride)
            before = after
    last = _round(1280 * max(1.0, width))
    layers.append(("head", lambda a=before: conv_bn(a, last, kernel=1, activation=nn.ReLU6)))  # type: ignore[misc]
    layers.append(("classifier", lambda: Classifier(last, classes, dropout)))
    return Chain(layers)


def _block(name: str, before: int, after: int, expansion: int, stride: int) -> list[Named]:
    hidden = before * expansion
    parts: list[Named] = [
        (f"{name}_expand", lambda: conv_bn(before, hidden, 1, activation=nn.ReLU6)),
        (f"{name}_depthwise", lambda: conv_bn(hidden, hidden, 3, stride, hidden, nn.ReLU6)),
        (f"{name}_project", lambda: conv_bn(hidden, after, 1, activation=None)),
    ]
    if expansion == 1:
        parts = parts[1:]
    wraps: list[type[nn.Module]] = [_Plain] * len(parts)
    if stride == 1 and before == after:
        wraps = [_Branch, *[_Along] * (len(parts) - 2), _Join]
    return [(n, lambda wrap=wrap, make=make: wrap(make())) for wrap, (n, make) in zip(wraps, parts, strict=True)]  # type: ignore[misc]


def _round(channels: float) -> int:
    """Nearest multiple of 8 that is at least 8 and at most a tenth below ``channels``."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
