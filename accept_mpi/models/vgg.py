"""VGG-11 with batch norm (Simonyan and Zisserman 2015, configuration A) and one linear layer, for small images."""

from torch import nn

from accept_mpi.models.base import Chain, Named
from accept_mpi.models.blocks import Classifier, conv_bn, positive

_WIDTHS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)  # 0: max pooling by 2


def vgg11(classes: int = 10, channels: int = 3) -> Chain:
    """VGG-11 in 14 layers. Images (n, channels, h, w) with h, w >= 32 -> scores (n, classes)."""
    positive(classes=classes, channels=channels)
    layers: list[Named] = []
    before = channels
    for number, width in enumerate(_WIDTHS, 1):
        if width == 0:
            layers.append((f"pool{number:02}", lambda: nn.MaxPool2d(2)))
        else:
            layers.append((f"conv{number:02}", lambda a=before, b=width: conv_bn(a, b)))  # type: ignore[misc]
            before = width
    layers.append(("classifier", lambda: Classifier(512, classes)))
    return Chain(layers)
